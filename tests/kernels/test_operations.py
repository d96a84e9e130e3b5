"""Each operation equals torch's in every form, for every dtype and for special values."""

import itertools

import pytest
import torch

from kernels.operations import BINARY, TERNARY, UNARY
from kernels.values import DIVIDING, EXACT, EXACT_2, SPECIAL, SUBNORMAL
from moduli import kernels

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def values(count, dtype):
    """Return columns with all pairs of special values, and some random ones."""
    special = SPECIAL + SUBNORMAL if count == 1 else SPECIAL
    grid = torch.tensor(list(itertools.product(special, repeat=min(count, 2))), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(999, grid.shape[1], generator=generator, dtype=torch.float64) * 3
    table = torch.cat([grid, ordinary]).to(dtype)
    columns = [column.contiguous() for column in table.unbind(1)]
    return columns if count <= 2 else [*columns, columns[0].flip(0).contiguous()]


def expected(fn, args, dtype):
    if dtype in (torch.float16, torch.bfloat16):  # computed in float32, rounded once
        return tuple(value.to(dtype) for value in fn(*(arg.float() for arg in args)))
    return fn(*args)


def compare(table, count, dtype):
    names = list(table)

    def every(*args):
        return tuple(table[name](*args) for name in names)

    by_count = {1: lambda x: every(x), 2: lambda x, y: every(x, y), 3: lambda x, y, z: every(x, y, z)}
    args = values(count, dtype)
    got = kernels.fuse(by_count[count])(*([arg] for arg in args))
    want = expected(every, args, dtype)
    for name, ours, theirs in zip(names, got, want, strict=True):
        mine = ours[0]
        if name in DIVIDING:  # torch's vectorised fmod gives NaN where the quotient has more digits than a float32
            close = (args[0].double() / args[1].double()).abs() < 1e7
            mine, theirs = mine[close], theirs[close]
        rtol, tiny = TOLERANCE[dtype], torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(
            mine, theirs, rtol=rtol, atol=tiny, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("table", "count"), [(UNARY, 1), (BINARY, 2), (TERNARY, 3)], ids=["unary", "binary", "ternary"]
)
def test_every_operation_is_torchs(backend, table, count, dtype):
    compare(table, count, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_operations_that_round_once_agree_to_the_bit(backend, dtype):
    x, y = values(2, dtype)

    def every(a, b):
        return tuple([UNARY[name](a) for name in EXACT] + [BINARY[name](a, b) for name in EXACT_2])

    for ours, theirs in zip(kernels.fuse(every)([x], [y]), every(x, y), strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=0, atol=0, equal_nan=True)


def test_zeros_keep_their_sign(backend):
    x = torch.tensor([0.0, -0.0] * 20)
    for fn in (torch.neg, torch.abs, torch.floor, torch.round, lambda a: a * 2.0, lambda a: a / -3.0):
        assert torch.equal(kernels.fuse(lambda a: fn(a))([x])[0].signbit(), fn(x).signbit())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_round_trip_and_round_to_nearest_even(backend, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    same = kernels.fuse(lambda x: x * 1.0)([every])[0]
    assert torch.equal(same.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])
    assert torch.equal(same.isnan(), every.isnan())
    wide = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.randint(
        -9, 6, (100_000,), generator=torch.Generator().manual_seed(2)
    )
    ties = (every.float() + every.float().roll(1)) / 2
    wide = torch.cat([wide, ties])
    out = [torch.empty(wide.numel(), dtype=dtype)]
    kernels.fuse(lambda x: x + 0.0)([wide], out=out)
    torch.testing.assert_close(out[0], wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_an_explicit_narrowing_rounds(backend):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))

    def fn(a):
        return a.half().float() + a.bfloat16().float()

    assert torch.equal(kernels.fuse(fn)([x])[0], fn(x))


def test_masks_are_arguments_and_results(backend):
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    mask = x > 0
    assert torch.equal(kernels.fuse(lambda a, m: torch.where(m, a, -a))([x], [mask])[0], x.abs())
    positive = kernels.fuse(lambda a: a > 0)([x])[0]
    assert positive.dtype is torch.bool
    assert torch.equal(positive, mask)
    both = kernels.fuse(lambda m, n: (m & ~n) | (m ^ n) | (m * n) | (m + n))([mask], [~mask])[0]
    assert both.all()


def test_an_operation_without_a_c_form_runs_in_torch(backend):
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    gelu = kernels.fuse(lambda a: torch.nn.functional.gelu(a) * 2)
    torch.testing.assert_close(gelu([x])[0], torch.nn.functional.gelu(x) * 2)
    assert gelu.explain([x]).form != "c"
