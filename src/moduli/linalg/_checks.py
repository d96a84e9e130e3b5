"""Checks of the arguments of public methods and solvers, and numbers that solvers share."""

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
    """Return the shape that several shapes broadcast to."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def is_real(value: Tensor) -> bool:
    """Whether all imaginary parts are zero."""
    return not value.dtype.is_complex or not bool((value.imag != 0).any())


def number(operator: "LinearOperator", value: object, name: str) -> Tensor:
    """Return a number as a 0-d tensor with the operator's dtype and device.

    Args:
        operator: The operator.
        value: The number.
        name: Its name in errors.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"{name} of {operator} is a number or a torch.Tensor, not {type(value).__name__}")
    if isinstance(value, complex) and not operator.dtype.is_complex:
        raise TypeError(f"{name} is {value!r}, but {operator} is real")
    return torch.tensor(value, dtype=operator.dtype, device=operator.device)


def check_floating(value: Tensor, what: str, dims: int) -> Tensor:
    """Return a tensor if it is floating or complex and has enough axes; otherwise raise.

    Args:
        value: The tensor.
        what: Its name in errors.
        dims: The smallest number of axes.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is a torch.Tensor, not {type(value).__name__}; write torch.as_tensor(...)")
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        raise TypeError(f"{what} has dtype {value.dtype}, and linear algebra needs real or complex; convert it")
    if value.ndim < dims:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; it needs at least {dims} axes")
    return value


def operand(operator: "LinearOperator", value: object, length: int, name: str, axis: int = -1) -> Tensor:
    """Return an operand if it is a vector or matrix of the right size, or a batch of them; otherwise raise.

    Args:
        operator: The operator.
        value: The operand.
        length: The length of vectors, or the number of rows of matrices.
        name: Its name in errors.
        axis: -1 for vectors, -2 for matrices.
    """
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
    """Return the shift of solve_plus_diag as a tensor whose last axis has length 1 (a multiple of I) or n."""
    if not isinstance(diag, Tensor):
        return number(operator, diag, "diag").reshape(1)
    if operator.dtype.is_complex:
        diag = diag.to(operator.dtype)
    if diag.ndim == 0:
        diag = diag.reshape(1)
    return operand(operator, diag, 1 if diag.shape[-1] == 1 else operator.shape[-1], "diag")


def factor(operator: "LinearOperator", factor: object) -> Tensor:
    """Return a factor as a tensor of the operator's dtype that broadcasts with its batch shape."""
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
    """Check the arguments of a solver.

    Args:
        A: The operator, or a matrix.
        b: The right-hand side.
        name: The name of the right-hand side in errors.
        solver: The solver, for errors.
        rtol: The relative tolerance; None for the default.
        atol: The absolute tolerance.
        maxiter: The limit of iterations; None for ten times the size.
        symmetric: Whether A must be symmetric.

    Returns:
        The operator, its number of columns, the norm of b, the tolerance max(rtol · norm, atol), and the limit.
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
    """Return the default relative tolerance, eps^(2/3): 4e-11 in double and 2e-5 in single precision."""
    return float(torch.finfo(dtype).eps ** (2 / 3))


def take_operator(A: "LinearOperator | Tensor", solver: str, symmetric: bool = True) -> "LinearOperator":
    """Return A as an operator; raise for batches and other objects.

    Args:
        A: The operator, or a matrix, which counts as symmetric if that is required.
        solver: The solver, for errors.
        symmetric: Whether A must be symmetric.
    """
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
    """Return a right-hand side if it is one vector of finite numbers; otherwise raise.

    Args:
        operator: The operator.
        value: The right-hand side.
        length: Its length.
        name: Its name in errors.
    """
    if operand(operator, value, length, name).ndim != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; the solvers take one vector of {length}")
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{name} has {bad} non-finite of {length} entries")
    return value


def finite_number(value: float, operator: "LinearOperator", solver: str, iteration: int) -> float:
    """Return a number computed from a product if it is finite; otherwise raise an error about the operator.

    Args:
        value: The number.
        operator: The operator.
        solver: The solver, for the error.
        iteration: The iteration, for the error.
    """
    if not math.isfinite(value):
        raise ValueError(f"{solver}: {operator} gave non-finite numbers in iteration {iteration}, from a finite vector")
    return value


def inner(a: Tensor, b: Tensor) -> float:
    """Return the real part of aᴴ b, as a number."""
    product = torch.vdot(a, b)
    return float(product.real if product.is_complex() else product)


def norm(a: Tensor) -> float:
    """Return the Euclidean norm, as a number, without overflow or underflow of squares."""
    value = float(torch.linalg.vector_norm(a))
    if 1e-15 < value < 1e15 or a.numel() == 0:
        return value
    largest = float(a.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(a / largest))
