"""Settings: groups, addresses, aliases, schedules, and what is refused."""

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import Optimizer
from optim.helpers import Half, Momentum


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def moved(*groups, links):
    """Return how far each parameter moves in one step from 0 with gradient 1."""
    opt = Optimizer(list(groups), *links)
    params = [p for group in opt.param_groups for p in group["params"]]
    opt.step(mo.closure(lambda: sum(p.sum() for p in params)))
    return [-p.item() for p in params]


def test_links_first_then_groups_then_defaults():
    a, b, c = parameter(0.0), parameter(0.0), parameter(0.0)
    link = Half(0.5).set_param_groups([{"params": [a], "factor": 0.1}])
    assert moved({"params": [a, b], "factor": 0.2}, {"params": [c]}, links=[link]) == [0.1, 0.2, 0.5]


def test_an_address_names_one_link():
    a, b = parameter(0.0), parameter(0.0)
    assert moved({"params": [a], "factor": 3.0}, {"params": [b], "half.factor": 3.0}, links=[Half(1.0)]) == [3.0, 3.0]

    class Third(Half):
        pass

    links = [Half(1.0), Third(1.0)]
    assert moved({"params": [parameter(0.0)], "factor": 2.0}, links=links) == [4.0]
    links = [Half(1.0), Third(1.0)]
    assert moved({"params": [parameter(0.0)], "third.factor": 2.0}, links=links) == [2.0]


def test_aliases_of_settings():
    w = parameter(1.0)
    opt = Optimizer([{"params": [w], "betas": (0.5, 0.6)}], m.Adam())
    setting = opt.link("Adam").settings[w]
    assert (setting["beta1"], setting["beta2"]) == (0.5, 0.6)
    with pytest.raises(ValueError, match="for Adam it is 2 numbers, beta1 and beta2"):
        Optimizer([{"params": [parameter(1.0)], "betas": 0.5}], m.Adam())
    link = m.Adam().set_param_groups([{"params": w, "betas": (0.1, 0.2)}])
    assert link.settings[w]["beta2"] == 0.2


def test_defaults_shown_in_groups_do_not_override_links():
    w = parameter(1.0)
    opt = Optimizer([{"params": [w], "beta1": 0.5}], m.Adam(beta2=0.9))
    assert opt.param_groups[0]["betas"] == (0.5, 0.9)
    setting = opt.link("Adam").settings[w]
    assert (setting["beta1"], setting["beta2"]) == (0.5, 0.9)


def test_unknown_settings_are_refused_with_a_hint():
    with pytest.raises(ValueError, match="sets 'facto', which no link of the chain has; did you mean 'factor'"):
        Optimizer([{"params": [parameter(1.0)], "facto": 1.0}], Half())
    w = parameter(1.0)
    opt = Optimizer([w], Half())
    opt.param_groups[0]["nonsense"] = 1
    with pytest.raises(ValueError, match="'nonsense'"):
        opt.step(mo.closure(lambda: w.sum()))
    del opt.param_groups[0]["nonsense"]
    opt.step(mo.closure(lambda: w.sum()))
    with pytest.raises(ValueError, match="'adam.factor'"):
        opt.add_param_group({"params": [parameter(1.0)], "adam.factor": 1.0})
    assert len(opt.param_groups) == 1


def test_nan_is_refused_naming_the_link():
    with pytest.raises(ValueError, match="for Half: factor is NaN"):
        Optimizer([{"params": [parameter(1.0)], "factor": float("nan")}], Half())
    with pytest.raises(ValueError, match="NaN"):
        Half(torch.tensor(float("nan")))


def test_every_number_can_be_a_schedule_or_a_tensor():
    w = parameter(0.0)
    lr = torch.tensor(1.0)
    opt = Optimizer([w], Half(lambda t: 0.5**t), m.LR(lr))
    path = []
    for t in range(3):
        opt.step(mo.closure(lambda: w.sum()))
        path.append(w.item())
        lr.fill_(10.0 if t == 0 else 100.0)
    assert path == [-1.0, -6.0, -31.0]


def test_changes_of_settings_in_any_place_take_effect():
    w = parameter(0.0)
    opt = Optimizer([w], Half(1.0), m.LR(1.0))
    step = lambda: (w.data.zero_(), opt.step(mo.closure(lambda: w.sum())), -w.item())[-1]  # noqa: E731
    assert step() == 1.0
    opt.param_groups[0]["lr"] = 2.0
    assert step() == 2.0
    opt.link("Half").defaults["factor"] = 3.0
    assert step() == 6.0
    opt.link("Half").set_param_groups([{"params": w, "factor": 5.0}])
    assert step() == 10.0
    del opt.param_groups[0]["lr"]
    assert step() == 5.0
    lr = torch.tensor(4.0)
    opt.param_groups[0]["lr"] = lr
    assert step() == 20.0
    lr.fill_(1.0)
    assert step() == 5.0


def test_new_numbers_make_no_new_kernel():
    from moduli.optim._fusion import FusedRun

    w = parameter(0.0, 1.0)
    opt = Optimizer([w], m.Adam(), Momentum(), m.LR(0.1))
    for t in range(5):
        opt.param_groups[0].update({"lr": 0.1 / (t + 1), "betas": (0.9 - 0.01 * t, 0.99), "momentum": 0.5 + 0.01 * t})
        opt.step(mo.closure(lambda: (w**2).sum()))
    (run,) = opt._plan.list_segments()
    assert isinstance(run, FusedRun)
    assert len(run._traced) == 1


def test_numpy_numbers_make_no_new_kernel():
    np = pytest.importorskip("numpy")
    w = parameter(0.0)
    opt = Optimizer([w], Half(1.0))
    for t in range(3):
        opt.param_groups[0]["factor"] = np.float64(t + 1)
        opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == -6.0
    assert len(opt._plan.list_segments()[0]._traced) == 1


def test_groups_are_plain_dictionaries_and_can_be_replaced():
    a, b = parameter(0.0), parameter(0.0)
    opt = Optimizer([a], m.LR(1.0))
    assert isinstance(opt.param_groups[0], dict)
    opt.add_param_group({"params": [b], "lr": 0.25})
    opt.step(mo.closure(lambda: (a + b).sum()))
    assert (a.item(), b.item()) == (-1.0, -0.25)
    assert opt.param_groups[1]["lr"] == 0.25
