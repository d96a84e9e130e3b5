"""Buffers in arithmetic: policies, buffers that operations apply to, and dtypes that must not change."""

import operator

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles as P
from moduli.particles import StructureError, adopt


def normed(mean, policy="operate"):
    """Return a batch norm whose running mean is `mean`, and whose running statistics have the policy."""
    net = adopt(nn.BatchNorm1d(2))
    net.running_mean.fill_(mean)
    return net if policy is None else P.buffer_policy(net, policy, "running_*")


def test_buffers_with_the_policy_operate_are_computed_like_parameters():
    a = normed(2.0)
    b = a.clone()
    b.running_mean.fill_(4.0)
    clone = a.clone()
    assert clone.running_mean is not a.running_mean
    assert torch.equal(clone.running_mean, a.running_mean)
    for result, mean in (
        (a + b, 6.0),
        (2 * a, 4.0),
        (1 - a, -1.0),
        (P.lerp(a, b, 0.5), 3.0),
        ((a.product() + b.product()).module(), 6.0),
        ((0.5 * a.product()).module(), 1.0),
        (a.product().lerp(b.product(), 0.5).module(), 3.0),
        (P.sqrt(b), 2.0),
        (P.zeros_like(a), 0.0),
    ):
        assert result.running_mean.tolist() == [mean, mean]
        assert result.num_batches_tracked.item() == 0  # integers are never averaged
        assert result.num_batches_tracked is not a.num_batches_tracked
    a += b
    assert a.running_mean.tolist() == [6, 6]
    P.lerp_(a, b, 0.5)
    assert a.running_mean.tolist() == [5, 5]
    P.axpy_(a, 2.0, b)
    assert a.running_mean.tolist() == [13, 13]
    a *= 2
    assert a.running_mean.tolist() == [26, 26]
    a.product_(0 * a.product())
    assert a.running_mean.tolist() == [0, 0]
    a.product().lerp_(clone.product(), 1.0)
    assert a.running_mean.tolist() == [2, 2]
    assert b.running_mean.tolist() == [4, 4]


def test_operations_raise_where_only_one_side_has_the_policy_operate():
    a, b = normed(2.0), normed(4.0, policy=None)
    for act in (
        lambda: a + b,
        lambda: b + a,
        lambda: a.__iadd__(b),
        lambda: P.lerp(a, b, 0.5),
        lambda: P.lerp_(a, b, 0.5),
    ):
        with pytest.raises(StructureError, match=r"the buffer 'running_mean' has the policy"):
            act()
    assert a.running_mean.tolist() == [2, 2]
    related = a.clone()
    P.buffer_policy(related, "copy", "*")
    with pytest.raises(StructureError, match="has the policy"):
        a.product() + related.product()


def test_only_selects_buffers_too():
    a, b = normed(2.0), normed(4.0)
    assert (P.only(a, "weight") * 2).running_mean.tolist() == [2, 2]
    assert (P.only(a, "weight") + b).running_mean.tolist() == [2, 2]
    result = P.only(a, "running_mean") * 3
    assert result.running_mean.tolist() == [6, 6]
    assert torch.equal(result.weight, a.weight)
    assert torch.equal(result.running_var, a.running_var)


def test_copied_buffers_come_from_the_leftmost_operand():
    a, b = normed(2.0, policy=None), normed(4.0, policy=None)
    assert (a + b).running_mean.tolist() == [2, 2]
    assert (b + a).running_mean.tolist() == [4, 4]
    assert (1 - 2 * b).running_mean.tolist() == [4, 4]
    assert (0.5 * b + a).running_mean.tolist() == [4, 4]


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.floordiv, operator.mod]


@pytest.mark.parametrize("fn", BINARY)
def test_every_operator_applies_to_buffers(fn):
    a = normed(2.0)
    b = a.clone()
    b.running_mean.fill_(3.0)
    change = getattr(operator, f"i{fn.__name__}")
    for other in (b, 3, torch.tensor(3.0), torch.tensor([3.0, 4.0])):
        value = other.running_mean if isinstance(other, nn.Module) else other
        expected = fn(a.running_mean, value)
        assert torch.equal(fn(a, other).running_mean, expected)
        assert torch.equal(change(normed(2.0), other).running_mean, expected)
        operand = other.product() if isinstance(other, nn.Module) else other
        assert torch.equal(fn(a.product(), operand).module().running_mean, expected)
        if not isinstance(other, nn.Module):
            assert torch.equal(fn(other, a).running_mean, fn(value, a.running_mean))


def test_functions_of_models_apply_to_buffers():
    a = normed(2.0)
    b = a.clone()
    b.running_mean.fill_(3.0)
    p, q = a.product(), b.product()
    for result, mean in (
        (P.where(False, a, b), 3.0),
        (P.where(b, a, b), 2.0),
        (P.where(False, a, 7.0), 7.0),
        (P.map(torch.maximum, a, b), 3.0),
        (P.map(lambda name, value: 0 * value + len(name), a, named=True), 12.0),
        (P.map(torch.maximum, p, q).module(), 3.0),
        (p.map(lambda value: 5 * value).module(), 10.0),
        (P.clamp(b, max=2.5), 2.5),
        (a + 0.5 * (b - a), 2.5),
        (0.5 * (b - a) + a, 2.5),
        (P.from_vector(a, P.vector(b)), 2.0),  # a vector is of parameters only
        (P.where(torch.zeros(4, dtype=torch.bool), a, b), 2.0),
    ):
        assert result.running_mean.tolist() == [mean, mean]
    drawn = (P.rand(a), p.rand().module(), P.rand(a, scale=0.5))
    assert all(0 <= value < 1 for each in drawn for value in each.running_mean.tolist())
    assert P.vector(a).shape == (4,)


def test_functions_raise_where_only_one_side_has_the_policy_operate():
    a, b = normed(2.0), normed(3.0, "copy")
    bare = adopt(nn.BatchNorm1d(2, track_running_stats=False))
    for x, y in ((a, b), (b, a), (a, bare), (bare, a)):
        for act in (
            lambda x, y: P.map(torch.add, x, y),
            lambda x, y: P.where(True, x, y),
            lambda x, y: P.axpy_(x, 1.0, y),
            lambda x, y: x - y,
        ):
            with pytest.raises(StructureError, match=r"the buffer 'running_mean' (has the policy|is missing)"):
                act(x, y)


def test_operations_that_would_make_a_real_buffer_complex_raise():
    net = mo.Module()
    net.register_buffer("mask", torch.ones(2))
    P.buffer_policy(net, "operate")
    for act in (lambda: net * 1j, lambda: operator.imul(net, 1j), lambda: P.only(net, "mask") * 1j):
        with pytest.raises(TypeError, match="would turn 'mask' from torch.float32"):
            act()
    assert net.mask.tolist() == [1, 1]


@pytest.mark.parametrize(
    "act",
    [
        lambda a, b: P.lerp_(a, b, 0.5),
        lambda a, b: P.axpy_(a, 0.5, b),
        lambda a, b: operator.itruediv(a, b),
        lambda a, b: operator.itruediv(a, 2),
        lambda a, b: operator.iadd(a, torch.tensor([0.5, 0.5])),
    ],
)
def test_in_place_operations_on_integers_raise_before_any_change(act):
    a = mo.Module()
    a.first = nn.Parameter(torch.ones(2))
    a.whole = nn.Parameter(torch.arange(2), requires_grad=False)
    b = a.clone() + 1
    with pytest.raises(TypeError, match="would turn 'whole' from torch.int64"):
        act(a, b)
    assert a.first.tolist() == [1, 1]
    P.axpy_(a, 2, b)
    assert a.whole.tolist() == [2, 5]
