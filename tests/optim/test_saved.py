"""State is saved by link path and parameter name, as plain data, and loaded completely or not at all."""

import copy
import io
import pickle

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import Chain, Module, Optimizer, _saved
from optim.helpers import Backtrack, Half, Momentum, Noise, Vector


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def chain():
    return [Momentum(), m.Adam(), Noise(seed=3), Chain(Vector()), m.LR(0.05)]


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


def train(model, opt, steps):
    for _ in range(steps):
        opt.step(mo.closure(lambda: (model(X) ** 2).mean()))
    return [p.detach().clone() for p in model.parameters()]


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_documented_flow_resumes_bit_by_bit():
    model = net()
    expected = train(model, Optimizer(model, *chain()), 10)
    model = net()
    opt = Optimizer(model, *chain())
    train(model, opt, 4)
    checkpoint = through_file({"model": model.state_dict(), "opt": opt.state_dict()})
    model = net()
    opt = Optimizer(model, *chain())
    model.load_state_dict(checkpoint["model"])
    opt.load_state_dict(checkpoint["opt"])
    assert all(torch.equal(a, b) for a, b in zip(train(model, opt, 6), expected, strict=True))
    assert opt.current_step == 10


def test_saved_state_is_plain_data_without_parameters():
    model = net()
    opt = Optimizer(model, *chain())
    train(model, opt, 2)
    saved = opt.state_dict()
    assert saved["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "1.Adam/exp_avg" in saved["state"]["0.weight"]
    assert saved["made_with"]["threads"] == torch.get_num_threads()

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for item in value.values():
                yield from tensors(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from tensors(item)
        else:
            assert isinstance(value, bool | int | float | str | type(None))

    memory = {p.data_ptr() for p in model.parameters()}
    assert not any(t.data_ptr() in memory for t in tensors(saved))


@pytest.mark.parametrize("torchs", [False, True])
def test_loading_packs_the_live_optimizer_at_most_once(torchs, tmp_path, monkeypatch):
    model = net()
    opt = Optimizer(model, m.Adam(), m.LR(0.1))
    train(model, opt, 1)
    mo.save(tmp_path / "file", model, optimizer=opt)
    calls, pack = [], _saved.pack
    monkeypatch.setattr(_saved, "pack", lambda optimizer: calls.append(optimizer) or pack(optimizer))
    if torchs:
        opt.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
        assert calls == []
    else:
        mo.load(tmp_path / "file", model, optimizer=opt)
        assert calls == [opt]  # one copy, to restore the optimizer if loading fails


def test_schedulers_continue_after_loading():
    model = net()
    opt = Optimizer(model, m.Adam(), m.LR(0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    train(model, opt, 1)
    scheduler.step()
    state = through_file([opt.state_dict(), scheduler.state_dict()])
    other = net()
    opt = Optimizer(other, m.Adam(), m.LR(0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    opt.load_state_dict(state[0])
    scheduler.load_state_dict(state[1])
    assert opt.link("LR").settings[other[0].weight]["lr"] == 0.05
    train(other, opt, 1)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.025
    train(other, opt, 1)
    assert opt.link("LR").settings[other[0].weight]["lr"] == 0.025


def test_reordered_parameters_take_their_own_state():
    model, other = net(), net()
    opt = Optimizer(model, *chain())
    train(model, opt, 3)
    other.load_state_dict(model.state_dict())
    turned = Optimizer(list(reversed(list(other.named_parameters()))), *chain())
    turned.load_state_dict(through_file(opt.state_dict()))
    here, there = turned.link("Vector"), opt.link("Vector")
    (a,), (b,) = ([row for row in link.state.values() if row] for link in (here, there))
    sizes = [p.numel() for p in model.parameters()]
    pieces = torch.arange(sum(sizes)).split(sizes)
    index = torch.cat(list(reversed(pieces)))
    assert torch.equal(a["buffer"], b["buffer"][index])
    assert torch.equal(a["outer"], b["outer"][index][:, index])
    adam = turned.link("Adam").state[other[0].weight]["exp_avg"]
    assert torch.equal(adam, opt.link("Adam").state[model[0].weight]["exp_avg"])


def test_loading_into_more_parameters_starts_new_ones_fresh_and_reports_missing_ones():
    a, b = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    opt = Optimizer([("a", a), ("b", b)], Momentum(), Vector(), m.LR(0.1))
    opt.step(mo.closure(lambda: (a * b).sum()))
    state = through_file(opt.state_dict())
    c = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    bigger = Optimizer([("a", a), ("b", b), ("c", c)], Momentum(), Vector(), m.LR(0.1))
    with pytest.warns(UserWarning, match="1.Vector would start afresh"):
        bigger.load_state_dict(state, strict=False)
    assert torch.equal(bigger.link("Momentum").state[a]["buffer"], opt.link("Momentum").state[a]["buffer"])
    assert not bigger.link("Vector").state[a]
    bigger.step(mo.closure(lambda: (a * b).sum() * c.sum()))
    smaller = Optimizer([("a", a)], Momentum(), m.LR(0.1))
    old = Optimizer([("a", a), ("b", b)], Momentum(), m.LR(0.1))
    old.step(mo.closure(lambda: (a * b).sum()))
    with pytest.warns(UserWarning, match="saved state of b has no parameter here"):
        smaller.load_state_dict(old.state_dict(), strict=False)


class Branch(Module):
    """A link that runs its child on all parameters but the first."""

    def __init__(self, inner):
        super().__init__()
        self.set_child("inner", inner)

    def apply(self, objective):
        part = objective.clone(clone_updates=False)
        part.params, part.grads = objective.params[1:], objective.get_grads()[1:]
        part.updates = [u.clone() for u in objective.get_updates()[1:]]
        out = self.children["inner"].step(part)
        objective.updates = [objective.get_updates()[0], *out.get_updates()]
        return objective


def test_a_vector_inside_a_branch_resumes_and_outlives_growth_elsewhere():
    def make():
        torch.manual_seed(0)
        return [(n, torch.nn.Parameter(torch.randn(2, dtype=torch.float64))) for n in "abc"]

    def run(named, opt, steps):
        for _ in range(steps):
            opt.step(mo.closure(lambda: sum((p**2).sum() for _, p in named)))
        return [p.detach().clone() for _, p in named]

    named = make()
    opt = Optimizer(named, Branch(Vector()), m.LR(0.001))
    run(named, opt, 3)
    other = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in named]
    resumed = Optimizer(other, Branch(Vector()), m.LR(0.001))
    resumed.load_state_dict(through_file(opt.state_dict()))
    turned_params = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in named]
    turned = Optimizer([turned_params[i] for i in (0, 2, 1)], Branch(Vector()), m.LR(0.001))
    turned.load_state_dict(through_file(opt.state_dict()))
    expected = run(named, opt, 3)
    assert all(torch.equal(x, y) for x, y in zip(run(other, resumed, 3), expected, strict=True))
    assert all(
        torch.allclose(x, y, rtol=1e-12, atol=1e-14)
        for x, y in zip(run(turned_params, turned, 3), expected, strict=True)
    )


def test_a_state_that_does_not_fit_changes_nothing():
    model = net()
    opt = Optimizer(model, m.Adam(), m.LR(0.1))
    train(model, opt, 2)
    before = copy.deepcopy(opt.state_dict())

    def unchanged():
        now = opt.state_dict()
        assert now["current_step"] == before["current_step"]
        for name, row in before["state"].items():
            for key, value in row.items():
                same = now["state"][name][key]
                assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value

    wrong_shape = copy.deepcopy(before)
    wrong_shape["shapes"]["0.bias"] = (7,)
    with pytest.raises(ValueError, match=r"parameter '0.bias' has shape \(4,\)"):
        opt.load_state_dict(wrong_shape)
    unchanged()
    with pytest.raises(ValueError, match="the chains differ: the saved one has 0.Momentum"):
        opt.load_state_dict(Optimizer(net(), Momentum(), m.LR(0.1)).state_dict())
    with pytest.raises(ValueError, match="torch's SGD, which has no 0.Adam"):
        opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=1.0).state_dict())
    with pytest.raises(ValueError, match="format 99"):
        opt.load_state_dict({**before, "format": 99})
    unknown = copy.deepcopy(before)
    unknown["param_groups"][0]["nonsense"] = 1.0
    with pytest.raises(ValueError, match="'nonsense'"):
        opt.load_state_dict(unknown)
    unchanged()


def test_links_that_agree_are_taken_over_when_not_strict():
    model = net()
    opt = Optimizer(model, Momentum(), m.LR(0.1))
    train(model, opt, 2)
    other = Optimizer(model, Momentum(), m.Adam(), m.LR(0.3))
    other.load_state_dict(opt.state_dict(), strict=False)
    assert torch.equal(
        other.link("Momentum").state[model[0].bias]["buffer"], opt.link("Momentum").state[model[0].bias]["buffer"]
    )
    plain = Optimizer(model, m.LR(0.3))
    plain.load_state_dict(opt.state_dict(), strict=False)  # its group sets momentum, which no link here has
    assert "momentum" not in plain.param_groups[0]


def test_states_of_generators_are_saved():
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = Optimizer([w], Noise(seed=1))
    w.grad = torch.zeros_like(w)
    opt.step()
    state = through_file(opt.state_dict())
    opt.step()
    v = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    other = Optimizer([v], Noise(seed=1))
    other.load_state_dict(state)
    v.data.copy_(w.data)
    w.data.zero_()
    v.data.zero_()
    v.grad = torch.zeros_like(v)
    other.step()
    opt.load_state_dict(state)
    opt.step()
    assert torch.equal(v, w)


def test_state_that_cannot_be_saved_is_named():
    class Odd(Half):
        def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
            state["thing"] = object()

    w = torch.nn.Parameter(torch.ones(1))
    opt = Optimizer([w], Odd())
    opt.step(mo.closure(lambda: w.sum()))
    with pytest.raises(TypeError, match=r"0.Odd: state 'thing' is a object"):
        opt.state_dict()


def test_every_kind_of_plain_data_survives():
    from collections import deque

    class Keeps(Half):
        def _extra_pack(self):
            return {"note": self.note}

        def _extra_unpack(self, extra):
            self.note = extra["note"]

        note = "before"

    w = torch.nn.Parameter(torch.ones(1))
    opt = Optimizer([w], Keeps())
    link = opt.modules[0]
    link.note = "after"
    link.global_state.update(
        {
            "deque": deque([torch.ones(1), 2], maxlen=3),
            "nested": {"a": [1, (2.5, None)], "size": torch.Size([1, 2])},
            "complex": 1 + 2j,
            "keys": {(1, 2): 3, 4: float("inf")},
            "tags": [{"$deque": 1}, {"__kind__": "deque"}, {"$deque": 1, "b": 2}],
            "others": [{1, 2}, b"ab", torch.float16, torch.device("cpu"), 2**70],
            "$own": 1,
        }
    )
    expected = copy.deepcopy(link.global_state)
    link.state[w]["a/b"] = 5
    other = Optimizer([w.detach().clone().requires_grad_()], Keeps())
    other.load_state_dict(through_file(opt.state_dict()))
    assert next(iter(other.modules[0].state.values())) == {"a/b": 5}
    assert other.modules[0].global_state == expected
    assert type(other.modules[0].global_state["nested"]["size"]) is torch.Size
    loaded = other.modules[0].global_state
    assert loaded["deque"] == deque([torch.ones(1), 2], maxlen=3)
    assert loaded["deque"].maxlen == 3
    assert loaded["nested"] == {"a": [1, (2.5, None)], "size": (1, 2)}
    assert loaded["complex"] == 1 + 2j
    assert other.modules[0].note == "after"
    link.global_state["bad"] = {w: 3}
    with pytest.raises(TypeError, match="0.Keeps: global state.bad has a tensor as a key"):
        opt.state_dict()
    link.global_state["bad"] = link.global_state
    with pytest.raises(TypeError, match="contains itself"):
        opt.state_dict()


@pytest.mark.parametrize("bad", ["unknown kind", "extra"])
def test_a_state_that_cannot_be_read_changes_nothing(bad):
    class Refuses(Half):
        def _extra_pack(self):
            return {"note": self.note}

        def _extra_unpack(self, extra):
            self.note = extra["note"] + 0

        note = 1

    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = Optimizer([w], m.Adam(), Noise(seed=1), Refuses(), m.LR(0.1))
    opt.step(mo.closure(lambda: (w**2).sum()))
    before = copy.deepcopy(opt.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"]["0"]["0.Adam/exp_avg"] += 1
    if bad == "unknown kind":
        wrong["links"]["2.Refuses"]["global"]["a"] = {"$nothing": 1}
    else:
        wrong["links"]["2.Refuses"]["extra"] = {"note": "no number"}
    with pytest.raises((ValueError, TypeError)):
        opt.load_state_dict(wrong)
    after = opt.state_dict()
    assert opt.link("Refuses").note == 1
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    (_, now), (_, then) = (
        state["links"]["1.Noise"]["global"]["generator/cpu/1"]["$generator"] for state in (after, before)
    )
    assert torch.equal(now, then)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"]
)
def test_copies_under_a_scheduler_are_independent(how):
    model = net()
    opt = Optimizer(model, *chain())
    torch.optim.lr_scheduler.StepLR(opt, 1)  # the scheduler wraps opt.step
    train(model, opt, 2)
    model2, opt2 = how((model, opt))
    expected = train(model2, opt2, 2)
    before = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(train(model2, opt2, 0), expected, strict=True))
    trained = train(model, opt, 2)
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, trained, strict=True))
    opt2.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(1, dtype=torch.float64)))]})
    assert "differentiable" not in opt2.param_groups[-1]


def test_a_link_without_optimizer_saves_and_copies():
    w = torch.nn.Parameter(torch.ones(2))
    opt = Optimizer([w], m.Adam(), Backtrack())
    opt.step(mo.closure(lambda: (w**2).sum()))
    alone = opt.modules[0].state_dict()
    assert sorted(alone["state"]["0"]) == ["exp_avg", "exp_avg_sq", "step"]
    twin = pickle.loads(pickle.dumps(opt.modules[0]))
    assert twin.defaults == opt.modules[0].defaults
    twin.defaults["beta1"] = 0.5
    assert opt.modules[0].defaults["beta1"] == 0.9
    assert next(iter(twin.settings._resolved), None) is None
    assert twin.settings[torch.ones(1)]["beta1"] == 0.5  # it reads its own defaults, not those of the original
