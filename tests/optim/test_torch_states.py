"""State dicts of torch's optimizers load into chains of the same algorithm; `opt.state`; keywords of torch's optimizers."""

import copy

import pytest
import torch

import moduli as mo
from moduli import m, presets
from moduli.optim import ChainError, Optimizer

D = torch.float64
CASES = {
    "Adam": (
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95), weight_decay=0.1),
        lambda: presets.adam(weight_decay=0.5),
    ),
    "Adam, amsgrad": (lambda p: torch.optim.Adam(p, 0.01, amsgrad=True), lambda: presets.adam(amsgrad=True)),
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1), lambda: presets.adamw()),
    "SGD": (lambda p: torch.optim.SGD(p, 0.01), lambda: presets.sgd()),
    "SGD, momentum": (lambda p: torch.optim.SGD(p, 0.01, momentum=0.8, dampening=0.1), lambda: presets.momentum()),
    "SGD, nesterov": (lambda p: torch.optim.SGD(p, 0.01, momentum=0.8, nesterov=True), lambda: presets.nesterov()),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1), lambda: presets.adagrad()),
    "RMSprop": (
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, centered=True, momentum=0.5),
        lambda: presets.rmsprop(centered=True, momentum=0.1),
    ),
    "NAdam": (
        lambda p: torch.optim.NAdam(p, 0.01, momentum_decay=0.01, weight_decay=0.1),
        lambda: presets.nadam(weight_decay=0.5),
    ),
    "RAdam": (lambda p: torch.optim.RAdam(p, 0.01, betas=(0.8, 0.9)), lambda: presets.radam()),
    "Adamax": (lambda p: torch.optim.Adamax(p, 0.01, betas=(0.8, 0.9)), lambda: presets.adamax()),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, 0.5, rho=0.8), lambda: presets.adadelta()),
    "Rprop": (lambda p: torch.optim.Rprop(p, 0.02, etas=(0.4, 1.3), step_sizes=(1e-5, 1.0)), lambda: presets.rprop()),
}


def net(dtype=D):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(dtype)


def data(dtype=D):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 4, generator=generator).to(dtype), torch.randn(7, 2, generator=generator).to(dtype)


def loss_of(model):
    x, y = data(next(model.parameters()).dtype)
    return (model(x) - y).square().mean()


def train(model, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        loss_of(model).backward()
        opt.step()


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_torch_resumes_in_moduli(name):
    make, links = CASES[name]
    model = net()
    theirs = make(model.parameters())
    train(model, theirs, 3)
    other = copy.deepcopy(model)
    ours = Optimizer(other, links())
    ours.load_state_dict(theirs.state_dict())
    train(model, theirs, 3)
    train(other, ours, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if name == "NAdam" else 1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_moduli_resumes_in_torch(name):
    make, links = CASES[name]
    model = net()
    theirs = make(model.parameters())
    train(model, theirs, 2)
    ours = Optimizer(model, links())
    ours.load_state_dict(theirs.state_dict())  # settings included
    train(model, ours, 2)
    other = copy.deepcopy(model)
    again = make(other.parameters())
    for group in again.param_groups:
        group["lr"] = 123.0  # loading the state must replace it
    again.load_state_dict(ours.to_torch_state_dict())
    train(model, ours, 3)
    train(other, again, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-6 if name == "NAdam" else 1e-12, atol=1e-12
        )  # its product of momenta is a float32 in torch


def test_muon_of_torch_resumes_in_moduli_and_back():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
    theirs = torch.optim.Muon(weights, 0.02, weight_decay=0.1)
    for weight in weights:
        weight.grad = torch.randn(4, 6)
    theirs.step()
    ours = Optimizer(weights, presets.muon(method="newtonschulz", weight_decay=0.1))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.02
    back = torch.optim.Muon(weights, 0.5)
    back.load_state_dict(ours.to_torch_state_dict())
    for weight in weights:
        assert torch.equal(back.state[weight]["momentum_buffer"], theirs.state[weight]["momentum_buffer"])
    assert back.param_groups[0]["weight_decay"] == 0.1


def test_a_chain_that_torch_does_not_have_is_refused():
    model = net()
    with pytest.raises(ValueError, match="is none of torch's optimizers"):
        Optimizer(model, m.Lion(), m.Sign()).to_torch_state_dict()
    clipped = Optimizer(model, m.ClipNorm(1.0), m.Adam(), m.LR(0.1))
    with pytest.raises(ValueError, match="torch's Adam has no ClipNorm"):
        clipped.to_torch_state_dict()
    assert clipped.to_torch_state_dict(strict=False)["param_groups"][0]["lr"] == 0.1


def test_loaded_state_has_the_dtype_of_the_parameter():
    model = net(torch.float32)
    theirs = torch.optim.Adam(model.parameters(), 0.01)
    train(model, theirs, 2)
    other = net(torch.float64)
    ours = Optimizer(other, presets.adam())
    ours.load_state_dict(theirs.state_dict())
    entries = ours.state[other[0].weight]
    assert entries["0.Adam/exp_avg"].dtype is torch.float64
    assert entries["0.Adam/step"] == 2


def test_another_algorithm_is_refused():
    model = net()
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, 1)
    before = theirs.state_dict()
    for links, says in (
        ([m.Lion(), m.LR(0.1)], "Adam keeps here, but the chain has 0"),
        ([m.HeavyBall(0.9), m.LR(0.1)], "which has no 0.HeavyBall"),
        ([m.Adam(), m.Adam(), m.LR(0.1)], "has 2 of those"),
    ):
        with pytest.raises(ValueError, match=says):
            Optimizer(net(), *links).load_state_dict(before)
    with pytest.raises(ValueError, match="of 4 parameters, here are 2"):
        Optimizer(net()[0], presets.adamw()).load_state_dict(before)
    with pytest.raises(ValueError, match="neither the state of a moduli Optimizer nor"):
        Optimizer(net(), presets.adamw()).load_state_dict(torch.optim.ASGD(model.parameters()).state_dict())
    with pytest.raises(ValueError, match=r"Rprop\(backtrack=False\)"):
        Optimizer(net(), m.Rprop()).load_state_dict(torch.optim.Rprop(model.parameters()).state_dict())


def decayed(p):
    return torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.2)


@pytest.mark.parametrize(
    ("make", "links", "says"),
    [
        (lambda p: torch.optim.Adam(p, maximize=True), lambda: [presets.adam()], "maximize=True"),
        (torch.optim.AdamW, lambda: [m.Adam(), m.LR(0.1)], "which is WeightDecay after Adam"),
        (torch.optim.AdamW, lambda: [presets.adam(weight_decay=0.1)], "which is WeightDecay after Adam"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), lambda: [presets.adamw()], "WeightDecay before Adam"),
        (decayed, lambda: [presets.momentum()], "which is WeightDecay before HeavyBall"),
        (lambda p: torch.optim.SGD(p, 0.01, weight_decay=0.2), lambda: [presets.sgd()], "WeightDecay before HeavyBall"),
        (lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), lambda: [presets.sgd()], "HeavyBall or NAG keeps here"),
    ],
)
def test_settings_of_torch_that_the_chain_does_not_have_are_refused(make, links, says):
    model = net()
    theirs = make(model.parameters())
    train(model, theirs, 1)
    ours = Optimizer(net(), *links())
    with pytest.raises(ValueError, match=says):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.state
    ours.load_state_dict(theirs.state_dict(), strict=False)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_coupled_decay_loads_into_a_link_before_the_momentum():
    model = net()
    theirs = decayed(model.parameters())
    train(model, theirs, 2)
    other = copy.deepcopy(model)
    ours = Optimizer(other, m.WeightDecay(0.5), m.HeavyBall(0.1), m.LR(0.3))
    ours.load_state_dict(theirs.state_dict())
    train(model, theirs, 2)
    train(other, ours, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_state_of_other_shapes_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(D)
    theirs = torch.optim.Adam(model.parameters())
    train(model, theirs, 1)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(5, 4\), its saved state is for \(6, 4\)"):
        Optimizer(net(), presets.adam()).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("of_torch", [True, False])
def test_settings_of_groups_that_are_one_here_are_not_lost(of_torch):
    model = net()
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters())}]
    saved = torch.optim.AdamW(groups, lr=0.01) if of_torch else Optimizer(groups, presets.adamw(lr=0.01))
    train(model, saved, 1)
    other = net()
    ours = Optimizer(list(other.parameters()), presets.adamw())
    with pytest.raises(ValueError, match=r"lr=0.1 and .* with 0.01, and both are in group 0"):
        ours.load_state_dict(saved.state_dict())
    ours.load_state_dict(saved.state_dict(), strict=False)
    assert ours.param_groups[0]["lr"] == 0.1
    one = Optimizer(net(), presets.adamw(lr=0.3))
    parts = Optimizer([{"params": other[0].parameters()}, {"params": other[2].parameters()}], presets.adamw())
    parts.load_state_dict(one.state_dict())
    assert [group["lr"] for group in parts.param_groups] == [0.3, 0.3]


def test_opt_state_has_the_per_parameter_state_of_all_links():
    model = net()
    opt = Optimizer(model, m.ClipNorm(1.0), m.Adam(), m.HeavyBall(0.5), m.LR(0.1))
    assert not opt.state
    assert dict(opt.state[model[0].weight]) == {}
    train(model, opt, 2)
    entries = opt.state[model[0].weight]
    assert {"1.Adam/exp_avg", "1.Adam/exp_avg_sq", "1.Adam/step", "2.HeavyBall/exp_avg"} <= set(entries)
    assert entries["1.Adam/exp_avg"] is opt.link("Adam").state[model[0].weight]["exp_avg"]
    assert len(opt.state) == 4
    # Trainers that copy state to a device assign every row.
    for param, row in opt.state.items():
        opt.state[param] = dict(row)
        for key, value in row.items():
            opt.state[param][key] = value
    assert entries["1.Adam/exp_avg"] is opt.link("Adam").state[model[0].weight]["exp_avg"]
    again = copy.deepcopy(opt)
    assert len(again.state) == 4
    assert len(copy.deepcopy(opt.state)) == 4


def test_assigning_entries_that_no_link_has_is_refused():
    model = net()
    weight = model[0].weight
    opt = Optimizer(model, m.Adam(), m.LR(0.1))
    with pytest.raises(TypeError, match=r"not kept.*link\.state\[param\]"):
        opt.state[weight]["mine"] = torch.ones(1)
    train(model, opt, 1)
    before = opt.state_dict()
    row = opt.state[weight]
    for write in (
        lambda: row.__setitem__("mine", 1),
        lambda: row.__setitem__("0.Adam/exp_avg", torch.ones_like(weight)),
        lambda: row.setdefault("mine", 1),
        lambda: row.update(mine=1),
        lambda: row.__ior__({"mine": 1}),
        lambda: row.pop("0.Adam/step"),
        lambda: row.__delitem__("0.Adam/step"),
        lambda: opt.state.__setitem__(weight, {}),
        lambda: opt.state.__setitem__(weight, {**row, "mine": 1}),
        lambda: opt.state.clear(),
        lambda: setattr(opt, "state", {weight: {}}),
    ):
        with pytest.raises(TypeError, match="not kept"):
            write()
    assert str(opt.state_dict()) == str(before)
    plain = Optimizer(
        net(), m.LR(0.1)
    )  # ZeroRedundancyOptimizer writes back the state it read, which is empty for such a chain
    plain.state[plain.list_params()[0]] = {"moduli": torch.zeros(1)}


def test_maximize_ascends_as_torch_does():
    model, other, third = net(), net(), net()
    train(model, torch.optim.Adam(model.parameters(), 0.1, maximize=True), 3)
    opt = Optimizer(other, presets.adam(lr=0.1), maximize=True, foreach=True, fused=False)
    train(other, opt, 3)
    closures = Optimizer(third, presets.adam(lr=0.1), maximize=True)
    losses = [float(closures.step(mo.closure(lambda: loss_of(third)))) for _ in range(3)]
    assert losses == sorted(losses)
    assert losses[0] > 0
    for a, b, c in zip(model.parameters(), other.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a.grad, b.grad)  # `.grad` has the gradients of the user's loss, not of its negative
        torch.testing.assert_close(a.grad, c.grad)


@pytest.mark.parametrize(
    "links", [lambda: [m.LBFGS(), m.StrongWolfe()], lambda: [m.Newton(damping=1.0), m.Backtracking()]]
)
def test_maximize_is_descent_of_the_negated_loss(links):
    model, other = net(), net()
    up, down = Optimizer(model, *links(), maximize=True), Optimizer(other, *links())
    for _ in range(3):
        high = up.step(mo.closure(lambda: -loss_of(model)))
        low = down.step(mo.closure(lambda: loss_of(other)))
        assert float(high) == -float(low)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.grad, -b.grad)


def test_a_value_only_step_leaves_gradients_alone():
    model = net()
    loss_of(model).backward()
    before = [param.grad.clone() for param in model.parameters()]
    Optimizer(model, m.MeZO(), m.LR(1e-3), maximize=True).step(mo.closure(lambda: loss_of(model)))
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is None or torch.equal(param.grad, grad) or not torch.equal(param.grad, -grad)


def test_hints_and_capture():
    with pytest.raises(ChainError, match="StrongWolfe counts or decides in Python"):
        Optimizer(net(), m.StrongWolfe(), capturable=True)
    model = net()
    Optimizer(model, m.Sign(), m.LR(0.1), capturable=True).step(mo.closure(lambda: loss_of(model)))
