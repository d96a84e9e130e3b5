"""Every operation of the kernels table, in Triton's interpreter as in torch."""

import pytest
import torch

from kernels.operations import BINARY, TERNARY, UNARY
from kernels.values import DIVIDING, SPECIAL
from moduli import kernels

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def values(dtype, dividing=False):
    special = [x for x in SPECIAL if not (dividing and (x != x or abs(x) in (float("inf"), 1e30, 1e-30, 6e-8)))]
    generator = torch.Generator().manual_seed(3)
    return torch.cat([torch.tensor(special, dtype=torch.float64), torch.randn(200, generator=generator).double()]).to(
        dtype
    )


def check(function, args, dtype):
    # float16 and bfloat16 are computed in float32 and rounded once.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    with torch.no_grad():
        expected = function(*(x.to(wide) for x in args)).to(dtype)
    fused = kernels.fuse(
        [lambda x: function(x), lambda x, y: function(x, y), lambda x, y, z: function(x, y, z)][len(args) - 1]
    )
    assert fused.explain(*([x] for x in args)).form == "triton", fused.explain(*([x] for x in args))
    got = fused(*([x] for x in args))[0]
    torch.testing.assert_close(
        got,
        expected,
        rtol=TOLERANCE[dtype],
        atol=1e-30 if dtype is torch.float64 else 1e-7,
        equal_nan=True,
    )


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    if name == "through_double" and dtype in (torch.float16, torch.bfloat16):
        return  # it converts back to its own dtype, which rounds twice in the wide form it is compared with
    if name == "nan_to_num" and dtype is torch.bfloat16:
        return  # the interpreter cuts float32 to bfloat16 where devices round, and the largest number is cut to another
    check(UNARY[name], [values(dtype)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, dtype):
    x = values(dtype, name in DIVIDING or name.startswith("div"))
    y = x.roll(7)
    if name in DIVIDING or name.startswith("div"):
        y = torch.where(y == 0, torch.ones_like(y), y)
    check(BINARY[name], [x, y], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TERNARY)
def test_ternary(name, dtype):
    x = values(dtype)
    check(TERNARY[name], [x, x.roll(5), x.roll(11)], dtype)
