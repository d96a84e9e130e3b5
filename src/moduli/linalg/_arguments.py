"""What the solvers ask of their arguments, and the few numbers they share."""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from . import _checks
from ._dense import Dense
from ._operator import LinearOperator

Callback: TypeAlias = Callable[[int, Tensor, float], bool | None]
"""Called with (iteration, iterate, residual norm) after each iteration; a true result ends the iteration."""


def prepare(A: LinearOperator | Tensor, b: Tensor, name: str, solver: str) -> tuple[LinearOperator, int]:
    """A as a single symmetric operator and its size, after a look at the right-hand side."""
    operator = symmetric_operator(A, solver)
    n = operator.shape[-1]
    finite(operator, b, n, name)
    return operator, n


def symmetric_operator(A: LinearOperator | Tensor, solver: str) -> LinearOperator:
    """A as a single symmetric operator; a matrix given to a solver of symmetric systems is taken to be symmetric."""
    operator = Dense(A, symmetric=True) if isinstance(A, Tensor) else A
    if not isinstance(operator, LinearOperator):
        raise TypeError(f"{solver} needs a LinearOperator or a matrix, not {type(A).__name__}; see FunctionOperator")
    if not operator.is_symmetric:
        raise TypeError(
            f"{solver} needs a symmetric operator, and {operator} is not declared so; declare it, or use lsqr"
        )
    return single(operator, solver)


def single(operator: LinearOperator, solver: str) -> LinearOperator:
    """The operator, unless it is a batch of them."""
    if operator.batch_shape:
        raise ValueError(f"{solver} solves one system at a time, and {operator} is a batch; call it once per member")
    return operator


def finite(operator: LinearOperator, value: Tensor, length: int, name: str) -> Tensor:
    """A right-hand side: one vector of finite numbers."""
    tensor = _checks.vector(operator, value, length, name)
    if tensor.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the solvers take one vector of {length}")
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} has {int(bad.sum())} non-finite of {length} entries, the first at {first}: {tensor[first].item()}"
        )
    return tensor


def finite_number(value: float, operator: LinearOperator, solver: str, iteration: int) -> float:
    """A number that a product gave, or an error that blames the operator."""
    if not math.isfinite(value):
        raise ValueError(f"{solver}: {operator} gave non-finite numbers in iteration {iteration}, from a finite vector")
    return value


def tolerance(dtype: torch.dtype, size: float, rtol: float | None, atol: float) -> float:
    """max(rtol · size, atol); rtol is eps^(2/3) if not given: 4e-11 in double and 2e-5 in single precision."""
    if rtol is None:
        rtol = torch.finfo(dtype).eps ** (2 / 3)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is a tolerance, a finite number that is not negative, not {value}")
    return max(rtol * size, atol)


def limit(maxiter: int | None, default: int) -> int:
    """The limit on iterations."""
    if maxiter is None:
        return max(default, 1)
    if isinstance(maxiter, bool) or not isinstance(maxiter, int):
        raise TypeError(f"maxiter is an integer or None, not {maxiter!r}")
    if maxiter < 0:
        raise ValueError(f"maxiter is a number of iterations and cannot be {maxiter}")
    return maxiter


def inner(a: Tensor, b: Tensor) -> float:
    """The real part of aᴴ b, as a number."""
    product = torch.vdot(a, b)
    return float(product.real if product.is_complex() else product)


def norm(a: Tensor) -> float:
    """The Euclidean norm, as a number, also where the squares would overflow or vanish."""
    value = float(torch.linalg.vector_norm(a))
    if 1e-15 < value < 1e15 or a.numel() == 0:
        return value
    largest = float(a.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(a / largest))
