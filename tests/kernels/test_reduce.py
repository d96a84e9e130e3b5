"""Reductions over lists: accurate under cancellation, reproducible to the bit, special values as in torch."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moduli import kernels

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def cut(x, *lengths):
    return list(x.split([*lengths, x.numel() - sum(lengths)]))


@pytest.fixture(scope="module")
def cancelling():
    """Return ten million numbers whose sum is about 1e-12 of the sum of their absolute values."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(5_000_000, generator=generator, dtype=torch.float64) * 1e6
    rest = torch.randn(5_000_000, generator=generator, dtype=torch.float64) * 1e-6
    x = torch.cat([half, rest - half])
    return x[torch.randperm(x.numel(), generator=generator)].contiguous()


def test_sums_are_accurate_under_cancellation(backend, cancelling):
    want = math.fsum(cancelling.tolist())
    got = float(kernels.sum(cut(cancelling, 3_000_001, 17, 0, 5_000_000)))
    assert abs(got - want) <= 1e-12 * abs(want)


def test_dot_products_are_accurate_under_cancellation(backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator, dtype=torch.float64) * 1e5
    y = torch.randn(20_000, generator=generator, dtype=torch.float64)
    a, b = torch.cat([x, x, y * 1e-6]), torch.cat([y, -y, y])
    order = torch.randperm(a.numel(), generator=generator)
    a, b = a[order].contiguous(), b[order].contiguous()
    want = sum(Fraction(u) * Fraction(v) for u, v in zip(a.tolist(), b.tolist(), strict=True))
    got = float(kernels.dot(cut(a, 1000, 1), cut(b, 1000, 1)))
    assert abs(got - float(want)) <= 1e-12 * abs(float(want))


def test_norms_of_ten_million(backend, cancelling):
    want = math.sqrt(math.fsum((cancelling * cancelling).tolist()))
    assert abs(float(kernels.norm(cut(cancelling, 12_345))) - want) <= 1e-12 * want
    assert float(kernels.norm([cancelling], ord=math.inf)) == float(cancelling.abs().max())


@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_on_every_run(backend, threads):
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    parts = cut(x, 7, 400_000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        runs = [
            tuple(float(f(parts)) for f in (kernels.sum, kernels.norm, kernels.amax))
            + (float(kernels.dot(parts, parts)),)
            for _ in range(3)
        ]
    finally:
        torch.set_num_threads(before)
    assert runs[0] == runs[1] == runs[2]


@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.sampled_from([0, 1, 15, 16, 17, 255, 257, 16_384, 16_385, 40_000]), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
)
def check_plain(seed, sizes, dtype):
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for n in sizes]
    ys = [torch.randn(n, generator=generator, dtype=torch.float64).to(torch.float32) for n in sizes]
    x, y = torch.cat(xs).double(), torch.cat(ys).double()
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(kernels.sum(xs), x.sum(), **close)
    torch.testing.assert_close(kernels.dot(xs, ys), (x * y).sum(), **close)
    torch.testing.assert_close(kernels.norm(xs), x.norm(), **close)
    torch.testing.assert_close(kernels.norm(xs, ord=1), x.abs().sum(), **close)
    if x.numel():
        assert kernels.amax(xs) == x.max()
        assert kernels.norm(xs, ord=math.inf) == x.abs().max()


def test_reductions_are_torchs(backend):
    check_plain()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_special_values_come_through(backend, bad):
    x = torch.ones(1000, dtype=torch.float64)
    x[500] = bad
    for ours, torchs in [
        (kernels.sum([x]), x.sum()),
        (kernels.dot([x], [x]), x.dot(x)),
        (kernels.norm([x]), x.norm()),
        (kernels.norm([x], ord=1), x.norm(p=1)),
        (kernels.norm([x], ord=math.inf), x.abs().amax()),
        (kernels.amax([x]), x.amax()),
    ]:
        torch.testing.assert_close(ours, torchs, equal_nan=True)
    x[600] = -bad
    torch.testing.assert_close(kernels.sum([x]), x.sum(), equal_nan=True)


@pytest.mark.parametrize("size", [1e200, 1e-200, 5e-324, 1.7e308])
def test_norms_neither_overflow_nor_vanish(backend, size):
    x = (
        torch.tensor([0.6 * size, 0.8 * size], dtype=torch.float64)
        if size != 5e-324
        else torch.tensor([size], dtype=torch.float64)
    )
    torch.testing.assert_close(float(kernels.norm([x])), size, rtol=1e-12, atol=0.0)


def test_other_kinds_of_tensors(backend):
    z = torch.tensor([1 + 2j, 3 - 1j])
    w = torch.tensor([2 - 1j, 1j])
    torch.testing.assert_close(kernels.sum([z, w]), (z.sum() + w.sum()).to(torch.complex128))
    torch.testing.assert_close(kernels.dot([z], [w]), torch.vdot(z, w).to(torch.complex128))
    torch.testing.assert_close(kernels.norm([z]), z.norm().double(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(kernels.norm([z], ord=1), z.abs().sum().double(), rtol=1e-6, atol=0.0)
    strided = torch.arange(10.0)[::2]
    assert kernels.sum([strided, torch.arange(3)]) == 23
    assert kernels.sum([torch.eye(3).to_sparse()]) == 3
    assert kernels.amax([torch.ones(4, 3).t(), torch.tensor(7)]) == 7
    assert kernels.sum([]) == kernels.norm([]) == kernels.dot([], []) == 0
    assert kernels.sum(iter([torch.ones(2)])) == 2
    assert kernels.dot([torch.ones(2, 3)], [torch.ones(6)]) == 6


@pytest.mark.parametrize("grad", [True, False])
def test_mistakes_are_named(backend, grad):
    """Errors also follow a valid call with lists of the same length, whose plan compiled code compares with."""
    one, two = [torch.ones(2)], [torch.ones(2), torch.ones(3)]
    for error, words, call in [
        (TypeError, r"sum\(\[x\]\)", lambda: kernels.sum(one[0])),
        (TypeError, "element 0 is a float", lambda: kernels.sum([1.0])),
        (ValueError, "1 and 2", lambda: kernels.dot(one, two)),
        (ValueError, "shapes", lambda: kernels.dot(one, [torch.ones(3)])),
        (ValueError, "no elements", lambda: kernels.amax([torch.ones(0)])),
        (TypeError, "no order", lambda: kernels.amax([torch.ones(1, dtype=torch.complex64)])),
        (TypeError, "some are not", lambda: kernels.norm([torch.ones(1, dtype=torch.complex64), torch.ones(1)])),
        (ValueError, "1, 2 or", lambda: kernels.norm(one, ord=3)),
    ]:
        with torch.set_grad_enabled(grad), pytest.raises(error, match=words):
            assert [float(reduce(one)) for reduce in (kernels.sum, kernels.norm, kernels.amax)] == [2.0, 2.0**0.5, 1.0]
            assert kernels.dot(one, one) == 2
            call()


@torch.no_grad()
def test_lists_of_other_kinds_after_a_compiled_call(backend):
    plain = [torch.arange(1.0, 4.0), torch.ones(2)]
    others = {
        "complex": [torch.tensor([3j, 4, 0]), torch.zeros(2, dtype=torch.complex64)],
        "strided": [torch.tensor([3.0, 9, 4, 9, 0, 9])[::2], torch.zeros(2)],
        "integers": [torch.tensor([3, 4, 0]), torch.zeros(2)],
        "double and half": [torch.tensor([3.0, 4, 0], dtype=torch.float64), torch.zeros(2, dtype=torch.float16)],
        "sparse": [torch.tensor([3.0, 4, 0]).to_sparse(), torch.zeros(2)],
        "resized": [torch.tensor([3.0, 4]), torch.zeros(3)],
        "parameters": [torch.nn.Parameter(torch.tensor([3.0, 4, 0])), torch.zeros(2)],
    }
    for tensors in others.values():
        torch.testing.assert_close(kernels.norm(plain), torch.tensor(4.0, dtype=torch.float64))
        torch.testing.assert_close(kernels.norm(tensors), torch.tensor(5.0, dtype=torch.float64))
        torch.testing.assert_close(kernels.dot(tensors, tensors).abs(), torch.tensor(25.0, dtype=torch.float64))


def test_compiled_reductions_have_the_same_bits_for_any_number_of_threads(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=generator) for n in (400_001, 0, 7, 100_000, 16_384, 3)]
    before, results = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            reductions = (kernels.sum, kernels.norm, kernels.amax)
            results.add((*(float(reduce(parts)) for reduce in reductions), float(kernels.dot(parts, parts))))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1
