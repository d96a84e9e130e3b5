"""Every operation that kernels compile, as a Python function of tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from moduli.testing._gpu import ONE, TWO

UNARY: dict[str, Callable[..., Tensor]] = {
    **{function.__name__: function for function in ONE},
    "nan_to_num_given": lambda x: torch.nan_to_num(x, nan=2.0, posinf=3.0, neginf=-4.0),
    "pow3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "pow_minus": lambda x: x**-1,
    "pow_minus_2": lambda x: x**-2,
    "pow_minus_half": lambda x: x**-0.5,
    "pow_one": lambda x: x**1,
    "pow_number": lambda x: x**2.5,
    "number_pow": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(-0.5, 1.5),
    "clamp_low": lambda x: x.clamp(min=0.25),
    "clamp_high": lambda x: x.clamp(max=0.25),
    "isnan": lambda x: torch.isnan(x).to(x.dtype),
    "isinf": lambda x: torch.isinf(x).to(x.dtype),
    "isposinf": lambda x: torch.where(torch.isposinf(x), 1.0, x),
    "isneginf": lambda x: torch.where(torch.isneginf(x), 1.0, x),
    "isfinite": lambda x: torch.where(torch.isfinite(x), x, 0.0),
    "logical_not": lambda x: torch.logical_not(x).to(x.dtype),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "ones_like": lambda x: torch.ones_like(x) - x,
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.25),
    "number_minus": lambda x: 1.5 - x,
    "number_over": lambda x: 1.5 / x,
    "clone": lambda x: x.clone() + x.detach(),
    "wrapped_number": lambda x: x * torch.tensor(0.5),
    "through_double": lambda x: (x.double() * 3.0).to(x.dtype),
}

BINARY: dict[str, Callable[..., Tensor]] = {
    **{function.__name__: function for function in TWO},
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.75),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=0.5),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "pow": lambda x, y: torch.pow(x.abs(), y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "eq": lambda x, y: torch.where(x == y, x, 1.0),
    "ne": lambda x, y: torch.where(x != y, x, 1.0),
    "lt": lambda x, y: (x < y) * x,
    "le": lambda x, y: (x <= y) * y,
    "ge": lambda x, y: torch.where(x >= y, x, y),
    "logical_and": lambda x, y: torch.logical_and(x, y).to(x.dtype),
    "logical_or": lambda x, y: ((x > 0) | (y > 0)).to(x.dtype),
    "logical_xor": lambda x, y: ((x > 0) ^ (y > 0)).to(x.dtype),
    "bitwise_not": lambda x, y: torch.where(~(x > y), x, y),
    "clamp_tensor": lambda x, y: x.clamp(min=y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp_high": lambda x, y: torch.lerp(x, y, 0.8),
}

TERNARY: dict[str, Callable[..., Tensor]] = {
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=-0.5),
    "lerp_tensor": torch.lerp,
    "clamp_both": lambda x, y, z: x.clamp(torch.minimum(y, z), torch.maximum(y, z)),
    "choose": lambda x, y, z: torch.where(x > 0, y, z),
}
