"""Guards see every change and nothing else; sums equal torch's, wherever their operands lie."""

import gc
import weakref

import pytest
import torch
from torch import nn

from moduli.kernels import live
from moduli.kernels._live import native


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.delenv("MODULI_KERNELS", raising=False)
    if native() is None:
        pytest.skip("no compiled guards here: the short way compares in Python")


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.Identity()))


def guard_of(module):
    return live.guard(module, list(module.modules()), list(module.parameters()))


class Other(nn.Linear):
    pass


CHANGES = {
    "an attribute of the root": lambda m: setattr(m, "note", 1),
    "an attribute below": lambda m: setattr(m[2][0], "note", 1),
    "the mode": lambda m: m.eval(),
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.data)),
    "another shape": lambda m: setattr(m[0].weight, "data", m[0].weight.data.view(3, 4)),
    "other values elsewhere": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "another dtype": lambda m: m[0].double(),
    "other strides": lambda m: setattr(m[0].weight, "data", torch.ones(3, 4).t()),
    "no gradients": lambda m: m[2][0].bias.requires_grad_(False),
    "a child": lambda m: m[2].append(nn.Identity()),
    "another child": lambda m: m.__setitem__(0, nn.Linear(3, 4)),
    "a missing child": lambda m: m[2].__delitem__(1),
    "a buffer": lambda m: m[1].register_buffer("b", torch.ones(1)),
    "a transient name": lambda m: m[1]._non_persistent_buffers_set.add("b"),
    "another class": lambda m: setattr(m[0], "__class__", Other),
    "another dict": lambda m: setattr(m[0], "__dict__", dict(m[0].__dict__)),
    "a dict in place of another": lambda m: m[0].__dict__.update(_parameters=dict(m[0]._parameters)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_guard_notices(change):
    module = net()
    guard = guard_of(module)
    assert guard.same(module.__dict__)
    CHANGES[change](module)
    assert not guard.same(module.__dict__)
    if change in ("other strides", "a transient name"):
        assert guard_of(module) is None
    else:
        assert guard_of(module).same(module.__dict__)


def test_a_guard_does_not_mind_use():
    module = net()
    guard = guard_of(module)
    module(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    module.state_dict(), list(module.named_modules()), repr(module), module[0].weight
    module.load_state_dict(net().state_dict())
    assert guard.same(module.__dict__)


def test_gradients_may_be_left_out():
    module = net()
    guard = guard_of(module)
    module[0].weight.requires_grad_(False)
    assert guard.same(module.__dict__, flags=False)
    assert not guard.same(module.__dict__)


def test_a_guard_holds_everything_but_the_root():
    module = net()
    guard = guard_of(module)
    root = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert root() is None
    finally:
        gc.enable()
    del guard


def test_a_guard_survives_changes_of_the_list_it_was_given():
    module = net()
    tensors = list(module.parameters())
    guard = live.guard(module, list(module.modules()), tensors)
    tensors.clear()
    assert guard.same(module.__dict__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("s", "t"), [(1.0, 1.0), (1.0, -1.0), (1.0, 0.3), (0.7, 1.0), (0.7, -0.3), (2.0, 0.5)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sum_equals_that_of_torch(dtype, s, t, threads):
    a, b = nn.Linear(70, 801).to(dtype), nn.Linear(70, 801).to(dtype)
    x, y = (torch.cat([p.detach().reshape(-1) for p in each.parameters()]) for each in (a, b))
    expected = s * x + t * y
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for left in (guard_of(a), None):
            for right in (guard_of(b), None):
                total = live.Sum.of([70 * 801, 801], dtype, left, right)
                out = torch.empty_like(x)
                total(x.data_ptr(), y.data_ptr(), s, t, out)
                assert torch.equal(out, expected)
                out.zero_()
                assert total.guarded(a.__dict__, b.__dict__, x.data_ptr(), y.data_ptr(), s, t, out)
                assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(before)


def test_a_multiple_is_a_sum_without_a_second_operand():
    a = nn.Linear(3, 2)
    with torch.no_grad():
        a.bias[0] = float("inf")
    out = torch.empty(8)
    live.Sum.of([6, 2], torch.float32, guard_of(a), None)(0, 0, -2.0, 0.0, out)
    assert torch.equal(out, torch.cat([-2 * a.weight.detach().reshape(-1), -2 * a.bias.detach()]))


def test_nothing_is_written_when_a_model_changed():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    total = live.Sum.of([6, 2], torch.float32, x := guard_of(a), y := guard_of(b))
    assert total.fits(x, y)
    out = torch.zeros(8)
    b.weight = nn.Parameter(torch.ones(2, 3))
    assert not total.guarded(a.__dict__, b.__dict__, 0, 0, 1.0, 1.0, out)
    assert not out.any()


def test_a_sum_does_not_hold_the_models():
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    x, y = guard_of(a), guard_of(b)
    total = live.Sum.of([6, 2], torch.float32, x, y)
    weight = weakref.ref(b.weight)
    del b, y
    assert weight() is None
    assert not total.fits(x, guard_of(nn.Linear(3, 2)))


def test_there_are_none_where_nothing_is_to_be_compiled(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "eager")
    assert guard_of(net()) is None
    assert live.Sum.of([1], torch.float32, None, None) is None


def test_other_dtypes_have_no_sum():
    assert live.Sum.of([1], torch.float16, None, None) is None
