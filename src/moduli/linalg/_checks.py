"""The questions that public methods and solvers ask of their arguments, and the few numbers that solvers share."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._operator import LinearOperator

Callback: TypeAlias = Callable[[int, Tensor, float], bool | None]
"""Called with (iteration, iterate, residual norm) after each iteration; a true result ends the iteration."""


def broadcast(*shapes: tuple[int, ...]) -> torch.Size:
    """The shape that several broadcast to."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def is_real(value: Tensor) -> bool:
    """Whether no number has an imaginary part."""
    return not value.dtype.is_complex or not bool((value.imag != 0).any())


def number(operator: "LinearOperator", value: object, name: str) -> Tensor:
    """A number as a 0-d tensor like the operator."""
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"{name} of {operator} is a number or a torch.Tensor, not {type(value).__name__}")
    if isinstance(value, complex) and not operator.dtype.is_complex:
        raise TypeError(f"{name} is {value!r}, but {operator} is real")
    return torch.tensor(value, dtype=operator.dtype, device=operator.device)


def check_floating(value: Tensor, what: str, dims: int) -> Tensor:
    """The tensor itself, if it is floating or complex and has at least `dims` axes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is a torch.Tensor, not {type(value).__name__}; write torch.as_tensor(...)")
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        raise TypeError(f"{what} has dtype {value.dtype}, and linear algebra needs real or complex; convert it")
    if value.ndim < dims:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; it needs at least {dims} axes")
    return value


def operand(operator: "LinearOperator", value: object, length: int, name: str, axis: int = -1) -> Tensor:
    """The value, if it is a vector of that length (axis -1), a matrix of that many rows (axis -2), or a batch of them."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} of {operator} is a torch.Tensor, not {type(value).__name__}")
    if value.dtype != operator.dtype:
        fact = f"{operator} has dtype {operator.dtype}, but {name} has {value.dtype}"
        raise TypeError(f"{fact}; write {name}.to({operator.dtype})")
    if value.ndim < -axis or value.shape[axis] != length:
        wanted = f"vectors of {length}" if axis == -1 else f"matrices of {length} rows (matvec takes vectors)"
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {operator} needs {wanted}")
    lead = value.shape[:axis]
    try:
        broadcast(operator.batch_shape, lead)
    except RuntimeError as error:
        raise ValueError(f"the leading axes {tuple(lead)} of {name} do not broadcast with {operator}") from error
    return value


def diagonal_argument(operator: "LinearOperator", diag: object) -> Tensor:
    """The shift of solve_plus_diag as a tensor whose last axis has length 1 (a multiple of I) or n."""
    if not isinstance(diag, Tensor):
        return number(operator, diag, "diag").reshape(1)
    if operator.dtype.is_complex:
        diag = diag.to(operator.dtype)
    if diag.ndim == 0:
        diag = diag.reshape(1)
    return operand(operator, diag, 1 if diag.shape[-1] == 1 else operator.shape[-1], "diag")


def factor(operator: "LinearOperator", factor: object) -> Tensor:
    """A factor as a tensor of the operator's dtype that broadcasts with its batch shape."""
    if not isinstance(factor, Tensor):
        return number(operator, factor, "the factor")
    if factor.dtype.is_complex and not operator.dtype.is_complex:
        raise TypeError(f"the factor is complex, but {operator} is real")
    if factor.ndim > len(operator.batch_shape):
        raise ValueError(f"the factor has shape {tuple(factor.shape)}; {operator} takes one, or one per member")
    return factor.to(dtype=operator.dtype, device=operator.device)


def prepare(
    A: "LinearOperator | Tensor",
    b: Tensor,
    name: str,
    solver: str,
    rtol: float | None,
    atol: float,
    maxiter: int | None,
    symmetric: bool = True,
) -> tuple["LinearOperator", int, float, float, int]:
    """A as a single operator, its columns, and of the right-hand side the norm, the tolerance and the limit.

    The tolerance is max(rtol · norm, atol), the limit ten times the size if it is not given.
    """
    operator = take_operator(A, solver, symmetric)
    rows, n = operator.shape
    size = norm(finite(operator, b, rows, name))
    for name, value in (("rtol", rtol), ("atol", atol), ("maxiter", maxiter)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} cannot be {value}; give a number that is not negative")
    tol = max((default_rtol(b.dtype) if rtol is None else rtol) * size, atol)
    return operator, n, size, tol, max(10 * rows, 10 * n, 1) if maxiter is None else maxiter


def default_rtol(dtype: torch.dtype) -> float:
    """The relative tolerance if none is given, eps^(2/3): 4e-11 in double and 2e-5 in single precision."""
    return float(torch.finfo(dtype).eps ** (2 / 3))


def take_operator(A: "LinearOperator | Tensor", solver: str, symmetric: bool = True) -> "LinearOperator":
    """A as an operator, unless it is a batch; a matrix given to a solver of symmetric systems is taken to be symmetric."""
    from ._matrices import Dense
    from ._operator import LinearOperator

    operator = Dense(A, symmetric=symmetric) if isinstance(A, Tensor) else A
    if not isinstance(operator, LinearOperator):
        raise TypeError(f"{solver} needs a LinearOperator or a matrix, not {type(A).__name__}; see FunctionOperator")
    if operator.batch_shape:
        raise ValueError(f"{solver} solves one system at a time, and {operator} is a batch; call it once per member")
    if symmetric and not operator.is_symmetric:
        raise TypeError(f"{solver} needs symmetry, and {operator} is not declared so; declare it, or use lsqr")
    return operator


def finite(operator: "LinearOperator", value: Tensor, length: int, name: str) -> Tensor:
    """A right-hand side: one vector of finite numbers."""
    if operand(operator, value, length, name).ndim != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; the solvers take one vector of {length}")
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{name} has {bad} non-finite of {length} entries")
    return value


def finite_number(value: float, operator: "LinearOperator", solver: str, iteration: int) -> float:
    """A number that a product gave, or an error that blames the operator."""
    if not math.isfinite(value):
        raise ValueError(f"{solver}: {operator} gave non-finite numbers in iteration {iteration}, from a finite vector")
    return value


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
