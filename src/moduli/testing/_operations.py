"""Every operation that a compiled kernel knows, as a Python function of tensors, and values worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Operations = dict[str, Callable[..., Tensor]]

UNARY: Operations = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 1.5),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "threshold": lambda x: F.threshold(x, 0.5, -2.0),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "frac": torch.frac,
    "sinc": torch.sinc,
    "rad2deg": torch.rad2deg,
    "deg2rad": torch.deg2rad,
    "logit": lambda x: torch.logit(x, eps=0.01),
    "nan_to_num": torch.nan_to_num,
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
    "signbit": lambda x: torch.where(torch.signbit(x), x, -1.0),
    "logical_not": lambda x: torch.logical_not(x).to(x.dtype),
    "heaviside": lambda x: torch.heaviside(x, torch.full_like(x, 0.5)),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "ones_like": lambda x: torch.ones_like(x) - x,
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.25),
    "number_minus": lambda x: 1.5 - x,
    "number_over": lambda x: 1.5 / x,
    "clone": lambda x: x.clone() + x.detach(),
    "wrapped_number": lambda x: x * torch.tensor(0.5),
    "through_double": lambda x: (x.double() * 3.0).to(x.dtype),
}

BINARY: Operations = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.75),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=0.5),
    "floor_divide": torch.floor_divide,
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "pow": lambda x, y: torch.pow(x.abs(), y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "nextafter": lambda x, y: torch.nextafter(x.float(), y.float()).to(x.dtype),
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
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

TERNARY: Operations = {
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=-0.5),
    "lerp_tensor": torch.lerp,
    "clamp_both": lambda x, y, z: x.clamp(torch.minimum(y, z), torch.maximum(y, z)),
    "choose": lambda x, y, z: torch.where(x > 0, y, z),
}

# Each of these rounds once, in C as in torch: results must agree to the last bit.
# (Not sqrt: torch's own is not correctly rounded in float32.)
EXACT = ["neg", "abs", "sign", "square", "reciprocal", "relu", "floor", "ceil", "trunc", "round", "clamp", "isfinite"]
EXACT += ["nan_to_num_given", "masked_fill", "number_minus", "number_over", "threshold", "clamp_low", "ones_like"]
EXACT_2 = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "copysign",
    "where",
    "lt",
    "ge",
    "logical_and",
    "fmax",
    "le",
]

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-3, 20.0, -20.0, 100.0, -100.0, 0.25, math.pi, 7.0]
SPECIAL += [math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, 65519.0, 6e-8]
# torch's vectorised fmod gives NaN for these, so they are tried with functions of one argument.
SUBNORMAL = [1e-40, -3e-42, 1e-310]
# 1 + erf(x) and 1 + tanh(x) cancel in their tails, in torch as here.
CANCELLING = {"gelu", "gelu_tanh"}
DIVIDING = {"fmod", "remainder", "floor_divide"}
