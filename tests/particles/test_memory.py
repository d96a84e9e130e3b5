"""Large results: each parameter has its own storage and version counter, and factors are applied without copies."""

import io
import operator
import pickle
import weakref

import pytest
import torch
from torch import nn

from moduli.kernels import _memory, allocate_large
from moduli.particles import adopt

OPERATIONS = [operator.add, operator.sub, operator.mul, operator.truediv]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(_memory, "_MANY_ELEMENTS", 1)


def make(dtype=torch.float32):
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False)).to(dtype)
    net.empty = nn.Parameter(torch.zeros(0, 2, dtype=dtype))
    net.scalar = nn.Parameter(torch.tensor(2.0, dtype=dtype))
    net[0].weight.data = net[0].weight.data.t().contiguous().t()
    return adopt(net)


def agrees(result, expected):
    return all(torch.equal(x, y) and x.requires_grad for x, y in zip(result.parameters(), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fn", OPERATIONS)
def test_operations_equal_those_of_each_tensor(fn, dtype):
    a, b = make(dtype), make(dtype)
    with torch.no_grad():
        pairs = list(zip(a.parameters(), b.parameters(), strict=True))
        assert agrees(fn(a, b), [fn(x, y) for x, y in pairs])
        assert agrees(fn(a, 3), [fn(x, 3) for x, _ in pairs])
        assert agrees(fn(0.5, a), [fn(0.5, x) for x, _ in pairs])
        expected = [torch.add(x, y - x, alpha=0.5) for x, y in pairs]
        assert agrees(a + 0.5 * (b - a), expected)
        assert agrees((b - a) * 0.5 + a, expected)


def test_only_floating_results_on_the_cpu_are_allocated_together():
    assert allocate_large([torch.zeros(2)], 2) is not None
    assert allocate_large([torch.zeros(2, dtype=torch.int64)], 2) is None
    assert allocate_large([torch.zeros(2, device="meta")], 2) is None


def test_parameters_of_a_large_result_are_independent():
    result = make() + 1
    assert result[1].weight.untyped_storage().nbytes() == 24
    buffer = io.BytesIO()
    torch.save(result[1].weight, buffer)
    assert buffer.tell() < 5_000
    assert torch.equal(pickle.loads(pickle.dumps(result[1].weight)), result[1].weight)
    loss = (result[0].weight ** 2).sum()
    with torch.no_grad():
        result[1].weight.mul_(2)
    loss.backward()
    assert result[0].weight.grad is not None


def test_a_parameter_outlives_the_rest_of_a_large_result(without_gc):
    result = make() + 1
    weight, reference = result[1].weight, weakref.ref(result[0].weight)
    values = weight.detach().clone()
    del result
    assert reference() is None
    assert torch.equal(weight, values)


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_a_deferred_factor_is_applied_once_and_to_nothing_else(monkeypatch, large):
    monkeypatch.setattr(_memory, "_MANY_ELEMENTS", large)
    a, b, c = (adopt(nn.Linear(3, 2)) for _ in range(3))
    with torch.no_grad():
        x, y, z = (net.weight.clone() for net in (a, b, c))
    difference = b - c
    half = 0.5 * difference
    quarter = half * 0.5
    total = a + half
    other = half - quarter
    difference *= 10  # results derived from it earlier do not change
    assert torch.equal(difference.weight, 10 * (y - z))
    assert torch.equal(half.weight, 0.5 * (y - z))
    with torch.no_grad():
        half.weight.fill_(7.0)
    assert torch.equal(quarter.weight, 0.25 * (y - z))
    torch.testing.assert_close(total.weight, x + 0.5 * (y - z))
    torch.testing.assert_close(other.weight, 0.25 * (y - z))
    torch.testing.assert_close((a + 0.5 * (b - c)).weight, x + 0.5 * (y - z))
    torch.testing.assert_close((2 * (a - b) - 0.5 * (b - c)).weight, 2 * (x - y) - 0.5 * (y - z))
    torch.testing.assert_close((0.5 * (b - c) + a).weight, x + 0.5 * (y - z))
    assert torch.equal(a.weight, x)
    assert torch.equal(b.weight, y)
    assert torch.equal(c.weight, z)


def test_a_deferred_factor_shares_the_memory_of_its_operand():
    a, b = adopt(nn.Linear(3, 2)), adopt(nn.Linear(3, 2))
    difference = a - b
    half = 0.5 * difference
    pending = vars(difference)["_pending"], vars(half)["_pending"]
    assert pending[0].tensors is pending[1].tensors
    address = pending[0].tensors[0].data_ptr()
    del pending
    assert half.weight.data_ptr() != address
