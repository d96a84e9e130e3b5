"""Errors for arguments that a link does not take; which functions are schedules; settings with one value for all parameters."""

import pickle

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim import Schedule, TensorTransform, schedules

D = torch.float64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: m.BFGS(restart_intervall=3),
            "BFGS has no setting 'restart_intervall'; did you mean 'restart_interval'?",
        ),
        (lambda: m.SR1(update_frequency=10), "SR1 has no setting 'update_frequency'"),
        (lambda: m.DNRTR(dampingg=1), "DNRTR has no setting 'dampingg'"),
        (lambda: m.NewDQN(dampingg=1), "NewDQN has no setting 'dampingg'"),
        (lambda: m.NewtonCGSteihaug(dampingg=1), "NewtonCGSteihaug has no setting 'dampingg'"),
        (
            lambda: m.Adam(amsgradd=True),
            "Adam has no setting 'amsgradd'; did you mean 'amsgrad'? (it takes beta1, beta2",
        ),
        (lambda: m.Adam(1e-3), "a step size is a link of its own: Adam(), LR(0.001)"),
    ],
)
def test_arguments_that_a_link_does_not_take_are_named(make, words):
    with pytest.raises(TypeError) as caught:
        make()
    assert words in str(caught.value)


def test_a_choice_is_not_taken_for_a_step_size():
    with pytest.raises(TypeError) as caught:
        m.NegateOnLossIncrease(True)
    assert "LR" not in str(caught.value)


class Through(TensorTransform):
    """A link with a setting that is a function of tensors, not a schedule."""

    def __init__(self, fn):
        super().__init__({"fn": fn})

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return setting["fn"](tensor)


@pytest.mark.parametrize(
    "fn", [torch.sign, lambda t: torch.sign(t), nn.Hardsigmoid()], ids=["torch", "lambda", "module"]
)
def test_a_setting_that_is_a_function_is_no_schedule(fn):
    w = nn.Parameter(torch.tensor([2.0, -3.0], dtype=D))
    opt = mo.Optimizer([w], Through(fn), m.LR(1.0))
    w.grad = torch.tensor([5.0, -5.0], dtype=D)
    expected = w.detach() - fn(w.grad)
    opt.step()
    assert torch.equal(w.detach(), expected)


def test_functions_for_numbers_are_schedules():
    w = nn.Parameter(torch.zeros(1, dtype=D))
    opt = mo.Optimizer([w], m.Mul(lambda step: 2.0 + step), m.LR(1.0))
    for expected in (-2.0, -5.0, -9.0):
        w.grad = torch.ones_like(w)
        opt.step()
        assert w.item() == expected
    assert m.LR(lambda step: 0.1).defaults["lr"](3) == 0.1
    assert repr(m.LR(schedules.Cosine(1.0, steps=3))).startswith("LR(lr=Cosine(")
    assert Schedule(max) == Schedule(max) != Schedule(min)
    assert pickle.loads(pickle.dumps(Schedule(max))) == Schedule(max)
    with pytest.raises(TypeError, match="a function of the step"):
        Schedule(3)


def test_functions_in_groups_are_schedules_where_the_setting_is_a_number():
    a, b = (nn.Parameter(torch.zeros(1, dtype=D)) for _ in range(2))
    opt = mo.Optimizer([{"params": [a]}, {"params": [b], "lr": lambda step: step + 1.0}], m.LR(1.0))
    for _ in range(2):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        opt.step()
    assert (a.item(), b.item()) == (-2.0, -3.0)
    other = mo.Optimizer([{"params": [a], "fn": torch.neg}], Through(torch.sign), m.LR(1.0))
    a.grad = torch.ones_like(a)
    other.step()
    assert a.item() == -1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda fn: m.LBFGS(history_size=fn),
        lambda fn: m.TrustCG(m.BFGS(), init=fn),
        lambda fn: m.SNES(sigma=fn),
    ],
    ids=["history_size", "init", "sigma"],
)
def test_numbers_that_are_read_once_refuse_functions_by_name(make, request):
    key = request.node.callspec.id
    with pytest.raises((TypeError, ValueError), match=rf"{key} (can't be a function of the step|is )"):
        make(lambda step: 1.0)


def two():
    return [nn.Parameter(torch.ones(2, dtype=D)) for _ in range(2)]


def test_one_value_for_all_parameters_is_refused_when_given():
    a, b = two()
    groups = [{"params": [a]}, {"params": [b], "newton.damping": 0.5}]
    with pytest.raises(ValueError, match="Newton has one value of damping for all parameters that it sees"):
        mo.Optimizer(groups, m.Newton())
    opt = mo.Optimizer([a], m.Newton())
    with pytest.raises(ValueError, match="one value of damping"):
        opt.add_param_group({"params": [b], "damping": 0.5})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [b]})
    opt.param_groups[1]["damping"] = 0.5
    for _ in range(2):
        with pytest.raises(ValueError, match="one value of damping"):
            opt.step(mo.closure(lambda: (a**2).sum() + (b**2).sum()))
    assert torch.equal(a, torch.ones_like(a))
    opt.param_groups[1]["damping"] = 0.0
    opt.step(mo.closure(lambda: (a**2).sum() + (b**2).sum()))
    assert a.abs().max() < 1e-9
    with pytest.raises(ValueError, match="one value of damping"):
        opt.link("Newton").set_param_groups([{"params": [a], "damping": 0.1}])


def test_parts_of_a_split_may_have_values_of_their_own():
    a, b = two()
    groups = [{"params": [a], "history_size": 3}, {"params": [b], "history_size": 5}]
    opt = mo.Optimizer(groups, m.Split([a], m.LBFGS(), m.LBFGS()), m.LR(0.1))
    for _ in range(3):
        opt.step(mo.closure(lambda: (a**2).sum() + (b**4).sum()))
    assert a.abs().max() < 1
    searches = [link for _, link in opt.modules[0].links() if isinstance(link, m.LBFGS)]
    assert [link.settings[p]["history_size"] for link, p in zip(searches, (a, b), strict=True)] == [3, 5]


@pytest.mark.parametrize(
    ("link", "key"),
    [
        (m.SOAP, "precond_freq"),
        (m.LBFGS, "history_size"),
        (m.SR1, "init_scale"),
        (m.Normalize, "ord"),
        (m.Dion, "rank"),
    ],
)
def test_a_schedule_that_is_refused_is_called_one(link, key):
    with pytest.raises(TypeError, match=f"{link.__name__}: {key} can't be a function of the step"):
        link(**{key: lambda step: 2})
