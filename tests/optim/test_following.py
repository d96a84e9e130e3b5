"""Optimizers follow edits of the module that they were given."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.layout import REMOVED, ParameterWatch
from moduli.optim import ChainError

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=g) / 2)
    return module


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Particle(mo.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    forward = Plain.forward


def loss_of(net):
    return mo.closure(lambda: ((net(X) - 1) ** 2).mean())


def values(net):
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def moved(net, before):
    return {name for name, param in net.named_parameters() if not torch.equal(param, before[name])}


CHAINS = {
    "pointwise": lambda: [m.Adam(), m.WeightDecay(0.01), m.LR(0.05)],
    "unfused": lambda: [m.ClipNorm(1.0), m.HeavyBall(0.9), m.LR(0.05)],
    "matrix": lambda: [m.Orthogonalize(), m.LR(0.05)],
    "kronecker": lambda: [m.Shampoo(), m.LR(0.05)],
    "rotated": lambda: [m.Adan(), m.LR(0.05)],
    "low rank": lambda: [m.GaLore(m.Adam(), rank=2), m.LR(0.05)],
    "vector": lambda: [m.LBFGS(), m.StrongWolfe()],
    "dense": lambda: [m.BFGS(), m.Backtracking()],
    "conjugate": lambda: [m.PolakRibiere(), m.StrongWolfe()],
    "line search": lambda: [m.Adam(), m.Backtracking()],
    "average": lambda: [m.Adam(), m.LR(0.05), m.EMA(0.9)],
    "split": lambda: [m.Split("head.*", m.Adam(), m.HeavyBall(0.9)), m.LR(0.05)],
    "split vector": lambda: [m.Split("head.*", m.LBFGS(), m.HeavyBall(0.9)), m.LR(0.05)],
    "foreign": lambda: [m.Wrap(torch.optim.Adam, lr=0.05)],
    "newton": lambda: [m.NewtonCG(), m.LR(0.1)],
}


@pytest.mark.parametrize("kind", [Plain, Particle])
@pytest.mark.parametrize("name", CHAINS)
def test_new_parameters_are_trained_and_old_ones_leave(name, kind):
    net = fill(kind())
    opt = mo.Optimizer(net, *CHAINS[name]())
    for _ in range(3):
        opt.step(loss_of(net))
    gone = net.body.weight
    net.body = fill(nn.Linear(4, 4), 1)
    before, old = values(net), gone.detach().clone()
    for _ in range(2):
        opt.step(loss_of(net))
    assert moved(net, before) == set(before)
    assert torch.equal(gone, old)
    assert [id(param) for param in opt.list_params()] == [id(param) for param in net.parameters()]
    # One edit with another shape, new names and removed names.
    net.body = nn.Sequential(fill(nn.Linear(4, 5), 2), nn.Tanh())
    net.head = fill(nn.Linear(5, 2), 3)
    before = values(net)
    for _ in range(2):
        opt.step(loss_of(net))
    assert moved(net, before) == set(before)
    assert {id(param) for param in opt.list_params()} == {id(param) for param in net.parameters()}
    assert sorted(opt.state_dict()["shapes"]) == sorted(before)


@pytest.mark.parametrize("name", ["pointwise", "unfused", "matrix", "kronecker", "average"])
def test_parameters_that_stay_have_the_steps_of_an_optimizer_without_edit(name):
    """The head steps as without an edit of the body; gradients are given, so that they do not depend on the body."""
    nets = [fill(Plain()), fill(Plain())]
    opts = [mo.Optimizer(net, *[link for link in CHAINS[name]() if type(link) is not m.ClipNorm]) for net in nets]
    for step in range(6):
        if step == 3:
            nets[1].body = nn.Linear(4, 7)
            nets[1].extra = nn.Linear(2, 2)
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            for i, param in enumerate(net.head.parameters()):
                param.grad = torch.full_like(param, 0.1 * (step + 1) + i)
            opt.step()
    for a, b in zip(nets[0].head.parameters(), nets[1].head.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_same_shape_keeps_state_by_name_and_another_starts_fresh():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    adam = opt.link("Adam")
    moment = adam.state["body.weight"]["exp_avg"].clone()
    net.body, net.head = fill(nn.Linear(4, 4), 1), fill(nn.Linear(4, 3), 1)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    opt.step()
    torch.testing.assert_close(adam.state["body.weight"]["exp_avg"], 0.9 * moment)
    assert not adam.state["head.weight"]["exp_avg"].any()
    assert len(adam.rows) == 4
    assert "2 parameters replaced, with their state (body.weight, body.bias)" in opt.explain()
    assert "2 parameters replaced by others of another shape, without state (head.bias, head.weight)" in opt.explain()


def test_patterns_of_groups_hold_for_new_parameters():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1), groups={"head.*": {"lr": 0.5}, "*.bias": {"lr": 0.0}})
    groups = list(opt.param_groups)
    opt.step(loss_of(net))
    net.head = nn.Sequential(fill(nn.Linear(4, 2), 1), fill(nn.Linear(2, 2), 2))
    net.neck = nn.Linear(4, 4)
    opt.step(loss_of(net))
    assert all(a is b for a, b in zip(groups, opt.param_groups, strict=True))
    names = [group["param_names"] for group in opt.param_groups]
    assert names == [
        ["body.weight", "neck.weight"],
        ["head.0.weight", "head.1.weight"],
        ["head.0.bias", "head.1.bias"],
        ["body.bias", "neck.bias"],
    ]
    assert opt.link("LR").settings[net.head[1].weight]["lr"] == 0.5
    assert opt.link("LR").settings[net.head[1].bias]["lr"] == 0.0


def test_a_combination_of_patterns_without_a_group_gets_one():
    net = nn.Sequential(nn.Linear(4, 2))
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1), groups={"0.*": {"lr": 0.5}})
    opt.step(loss_of(net))
    net.append(nn.Linear(2, 2))
    opt.step(loss_of(net))
    net.append(nn.Linear(2, 2))
    opt.step(loss_of(net))
    assert [group["param_names"] for group in opt.param_groups][1] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.1]


def test_changes_of_groups_by_the_program_stay():
    net, alone = fill(Plain()), nn.Parameter(torch.ones(3))
    opt = mo.Optimizer(net, m.LR(0.1))
    opt.add_param_group({"params": [("alone", alone)]})
    del opt.param_groups[0]["params"][1], opt.param_groups[0]["param_names"][1]
    opt.step(loss_of(net))
    net.body = fill(nn.Linear(4, 4), 1)
    net.extra = nn.Linear(1, 1)
    opt.add_param_group({"params": "extra.*"})
    opt.step(loss_of(net))
    assert [group["param_names"] for group in opt.param_groups] == [
        ["body.weight", "head.weight", "head.bias"],
        ["alone"],
        ["extra.weight", "extra.bias"],
    ]
    assert opt.param_groups[1]["params"] == [alone]


class Low(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def test_a_layer_inside_of_another_keeps_its_state_under_its_new_name():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    body, row = net.body, opt.link("Adam").state[net.body.weight]
    net.body = Low(body)
    before = values(net)
    opt.step(loss_of(net))
    assert moved(net, before) == {"body.b", "head.weight", "head.bias"}
    assert opt.link("Adam").state["body.base.weight"] is row
    assert "2 parameters joined (body.a, body.b)" in opt.explain()


@pytest.mark.parametrize("kind", [Plain, Particle])
def test_the_optimizer_follows_every_kind_of_edit(kind):
    net = fill(kind())
    net.parts = nn.ModuleList([nn.Linear(1, 1)])
    net.scale = nn.Parameter(torch.ones(()))
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))

    def check():
        opt.step(loss_of(net))
        assert {id(param) for param in opt.list_params()} == {id(param) for param in net.parameters()}
        assert opt.binding.slots.find_name(next(net.body.parameters())) == "body.weight"

    check()
    net.parts.append(nn.Linear(1, 1))
    check()
    del net.parts[0]
    check()
    net.scale = nn.Parameter(torch.ones(()))  # equal to the one before
    check()
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    check()
    del net.scale
    check()
    net.body.bias = None
    check()
    net.body._parameters["bias"] = nn.Parameter(torch.zeros(4))
    check()
    nn.utils.parametrizations.weight_norm(net.head)
    check()


def test_relatives_that_follow_an_edit_are_trained():
    net = fill(Particle())
    child = net.clone()
    opt = mo.Optimizer(child, m.Adam(), m.LR(0.1))
    opt.step(loss_of(child))
    net.body = fill(nn.Linear(4, 4), 1)
    child.touch()
    before = values(child)
    opt.step(loss_of(child))
    assert moved(child, before) == set(before)


def test_labelled_tensors_that_are_assigned_are_trained():
    class Gain(mo.Module):
        def __init__(self, size):
            super().__init__()
            self.w = mo.Tensor(torch.ones(size, requires_grad=True), (mo.Space(size),))

    net = Gain(2)
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    loss = mo.closure(lambda: (net.w.data**2).sum())
    opt.step(loss)
    net.w = mo.Tensor(torch.ones(3, requires_grad=True), (mo.Space(3),))
    opt.step(loss)
    assert (net.w.data < 1).all()


class Scores(mo.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        values = torch.arange(1.0, 10.0).view(3, 3)
        self.w = mo.tensor(values * scale, row=["a", "b", "c"], column=["x", "y", "z"]).attach()

    def forward(self):
        target = mo.tensor([3.0, 1.0, 2.0], row=["a", "b", "c"]) * mo.tensor([1.0, 5.0, 2.0], column=["x", "y", "z"])
        return (self.w - target).square().mean().data


ORDERS = {
    "labels": lambda w: w.sel(row=["c", "a", "b"], column=["y", "x", "z"]),
    "axes": lambda w: w.permute("column row"),
    "both": lambda w: w.permute("column row").sel(row=["c", "a", "b"]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["Adam", "HeavyBall", "Lion", "Shampoo", "Adafactor"])
def test_state_follows_a_parameter_that_is_assigned_in_another_order(name, order):
    def train(edit):
        net = Scores()
        opt = mo.Optimizer(net, getattr(m, name)(), m.LR(0.1))
        for step in range(6):
            if step == 3 and edit:
                net.w = ORDERS[order](net.w).detach().attach()
            opt.step(mo.closure(lambda f: f()))
        return net.w.align_to(Scores().w.dims).detach(), opt.explain()

    (plain, _), (moved, words) = train(edit=False), train(edit=True)
    if "restarted for w" not in words and "restarted for tensor:w" not in words:
        torch.testing.assert_close(moved.data, plain.data, rtol=1e-5, atol=1e-5)
    else:  # factors of axes have no rule for exchanged axes
        assert order != "labels"
        assert name in ("Shampoo", "Adafactor")
    assert "replaced, with their state" in words


def test_state_does_not_go_to_other_labels():
    net = Scores()
    opt = mo.Optimizer(net, m.HeavyBall(0.9), m.LR(0.1))
    for _ in range(3):
        opt.step(mo.closure(lambda f: f()))
    values = net.w.data.detach().clone()
    net.w = mo.tensor(values, row=["a", "b", "d"], column=["x", "y", "z"]).attach()
    opt.step(mo.closure(lambda f: f.w.square().sum().data))
    torch.testing.assert_close(net.w.data, values - 0.1 * 2 * values)
    assert "replaced by others with other labels, without state" in opt.explain()


def test_schedulers_continue_after_an_edit():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1), groups={"head.*": {"lr": 0.2}})
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    opt.step(loss_of(net))
    scheduler.step()
    net.body, net.head = nn.Linear(4, 3), nn.Linear(3, 2)
    opt.step(loss_of(net))
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [0.025, 0.05]
    opt.step(loss_of(net))
    assert opt.link("LR").settings[net.head.weight]["lr"] == 0.05


def test_a_frozen_parameter_that_joins_does_not_move():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    net.body = fill(nn.Linear(4, 4), 1).requires_grad_(False)
    before = values(net)
    opt.step(loss_of(net))
    assert moved(net, before) == {"head.weight", "head.bias"}


def test_history_over_all_parameters_restarts_and_is_reported():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.LBFGS(), m.StrongWolfe())
    for _ in range(3):
        opt.step(loss_of(net))
    net.body = fill(nn.Linear(4, 4), 1)
    fresh_net = copy.deepcopy(net)
    fresh = mo.Optimizer(fresh_net, m.LBFGS(), m.StrongWolfe())
    for _ in range(3):
        opt.step(loss_of(net))
        fresh.step(loss_of(fresh_net))
    for a, b in zip(net.parameters(), fresh_net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert "LBFGS restarted" in opt.explain()


def test_an_edit_that_cannot_be_followed_leaves_the_optimizer_as_it_was():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    params, state = opt.list_params(), opt.state_dict()
    net.body = nn.Linear(4, 4, device="meta")
    for param in net.head.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with pytest.raises(ValueError, match="meta device"):
            opt.step()
    assert all(a is b for a, b in zip(params, opt.list_params(), strict=True))
    assert opt.state_dict()["current_step"] == state["current_step"]
    net.body = fill(nn.Linear(4, 4), 1)
    opt.step(loss_of(net))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_follow_their_own_module(copied):
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    other = copied(opt)
    other.model.body = fill(nn.Linear(4, 4), 1)
    before, own = values(other.model), values(net)
    other.step(loss_of(other.model))
    assert moved(other.model, before) == set(before)
    assert not moved(net, own)


def test_state_loads_into_another_shape_without_rows_that_do_not_fit():
    def make(out, links):
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, out))
        return net, mo.Optimizer(net, *links)

    for name in ("pointwise", "kronecker", "low rank", "vector", "foreign"):
        (small, a), (large, b) = make(2, CHAINS[name]()), make(5, CHAINS[name]())
        for _ in range(2):
            a.step(loss_of(small))
        with pytest.raises(ValueError, match=r"'1.weight' has shape \(5, 3\), its saved state is for \(2, 3\)"):
            b.load_state_dict(a.state_dict())
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            b.load_state_dict(a.state_dict(), strict=False)
        texts = [str(each.message) for each in warned]
        where = "is for shape (2, 3) and the parameter here has shape (5, 3), and is left out"
        assert texts[0] == f"saved state of 1.weight {where}"
        assert texts[1].startswith("saved state of 1.bias is for shape (2,)")
        assert b.current_step == 2
        if name == "pointwise":
            moments = [opt.link("Adam").state["0.weight"]["exp_avg"] for opt in (a, b)]
            assert torch.equal(*moments)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            b.step(loss_of(large))
        if name == "pointwise":
            old, new = a.link("Adam").state, b.link("Adam").state
            assert old["0.weight"]["exp_avg"].shape == new["0.weight"]["exp_avg"].shape
            assert new["1.weight"]["exp_avg"].shape == (5, 3)


def test_replacing_a_module_by_an_equal_one_is_detected():
    class Equal(nn.Module):
        def __eq__(self, other):
            return True

        __hash__ = nn.Module.__hash__

    net = nn.Module()
    net.part, net.one, net.two = Equal(), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))
    watch = ParameterWatch(net)
    net.two.data = torch.zeros(3)
    assert not watch.has_changed()
    for name, value in (("part", Equal()), ("one", nn.Parameter(torch.ones(()))), ("two", nn.Parameter(torch.ones(2)))):
        setattr(net, name, value)
        assert watch.has_changed(), name
        watch = ParameterWatch(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about TorchScript
        scripted = torch.jit.script(nn.Linear(2, 2))
    watch = ParameterWatch(scripted)
    assert not watch.has_changed()
    scripted.weight = nn.Parameter(torch.ones(2, 2))
    assert watch.has_changed()


def test_a_parameter_moved_between_modules_is_renamed():
    net = nn.Sequential(nn.Module(), nn.Module())
    net[0].w = nn.Parameter(torch.ones(2))
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    loss = mo.closure(lambda: sum((p**2).sum() for p in net.parameters()))
    opt.step(loss)
    row = opt.link("Adam").state["0.w"]
    param = net[0].w
    del net[0].w
    net[1].w = param
    opt.step(loss)
    assert opt.link("Adam").state["1.w"] is row


def test_gradients_of_new_parameters_are_unscaled():
    """A gradient scaler reads the parameters from the groups before the step, so these must follow the edit."""
    nets = [fill(Plain()), fill(Plain())]
    for net, scale in zip(nets, (1.0, 1024.0), strict=True):
        opt = mo.Optimizer(net, m.LR(0.1))
        opt.step(loss_of(net))
        opt.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        net.body = fill(nn.Linear(4, 4), 1)
        scaler.scale(((net(X) - 1) ** 2).mean()).backward()
        scaler.step(opt)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_groups_and_saved_state_have_the_current_parameters():
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    net.head = nn.Linear(4, 5)
    assert opt.param_groups[0]["params"][2] is net.head.weight
    assert opt.state_dict()["shapes"]["head.weight"] == (5, 4)


@pytest.mark.parametrize("looked", [False, True])
def test_new_parameters_in_a_separate_group(looked):
    net = fill(Plain())
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    net.head = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    if looked:
        opt.zero_grad()
    opt.add_param_group({"params": net.head.parameters(), "lr": 0.5})
    opt.step(loss_of(net))
    names = [group["param_names"] for group in opt.param_groups]
    assert names == [["body.weight", "body.bias"], ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"]]
    assert opt.link("LR").settings[net.head[0].weight]["lr"] == 0.5


def test_removed_parameters_of_an_optimizer_without_module_are_an_error():
    net = fill(Particle())
    opt = mo.Optimizer(net.parameters(), m.Adam(), m.LR(0.1))
    opt.step(loss_of(net))
    body = net.body
    net.body = fill(nn.Linear(4, 4), 1)
    before = values(net)
    for _ in range(2):
        with pytest.raises(
            ChainError, match=r"removed parameters of this optimizer \(body.weight, body.bias\).*module itself"
        ):
            opt.step(loss_of(net))
    assert not moved(net, before)
    opt.zero_grad()
    loss_of(net)()
    with pytest.raises(ChainError, match="body.weight"):
        opt.step()
    net.body = body  # restored
    opt.step(loss_of(net))
    del net.body
    net.trunk = nn.Linear(4, 4)
    alone = mo.Optimizer(body.parameters(), m.LR(0.1))  # given explicitly, without the module
    alone.step(mo.closure(lambda: (body(X) ** 2).sum()))


def test_removed_parameters_of_a_relative_are_an_error():
    net = fill(Particle())
    child = net.clone()
    opt = mo.Optimizer(child.parameters(), m.Adam(), m.LR(0.1))
    opt.step(loss_of(child))
    net.body = fill(nn.Linear(4, 4), 1)
    child.touch()
    with pytest.raises(ChainError, match="body.weight"):
        opt.step(loss_of(child))


def test_a_parameter_that_returns_to_its_module_is_trained_again():
    net = mo.Module()
    net.body, net.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    head = net.head
    params = list(net.parameters())
    opt = mo.Optimizer(params, m.LR(0.1))
    del net.head
    assert REMOVED.find(params) == ["head.weight", "head.bias"]
    net.other = head
    assert REMOVED.find(params) == []
    before = head.bias.detach().clone()
    opt.step(mo.closure(lambda: net.other(net.body(torch.ones(1, 2))).sum()))
    assert not torch.equal(head.bias, before)


@pytest.mark.parametrize("kind", [Plain, Particle])
@pytest.mark.parametrize(
    "links", [lambda: m.Adam(), lambda: m.HeavyBall(0.9), lambda: m.Adan()], ids=["Adam", "HeavyBall", "Adan"]
)
def test_state_is_converted_with_the_module(kind, links):
    runs = []
    for dtype in (torch.float32, torch.float64):
        net, x = fill(kind()), X
        opt = mo.Optimizer(net, links(), m.LR(0.01))
        for step in range(6):
            if step == 3:
                net.to(dtype)
                x = X.to(dtype)
            opt.step(mo.closure(lambda f, x=x: f(x).square().sum()))
        values = [value for state in opt.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        assert {value.dtype for value in values} == {dtype}
        runs.append([param.detach().double() for param in net.parameters()])
    assert "torch.float64" in opt.explain()
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-5)
