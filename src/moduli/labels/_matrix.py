"""The label logic of linear algebra, for tensors whose last two axes are matrices.

An operator, a matrix from a space to the same space, has the same labels on its rows and on its columns; only operators have
eigenvalues, determinants or exponentials. The order of labels may differ, so columns are permuted to the order of the rows
first. Only labels are compared: the names of two axes of a tensor always differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._torch import has_dispatch_mode, in_transform
from ._axes import Axes, Pair, cache_by_axes, intern_pairs
from ._gather import Gather, index_of
from ._pairing import describe_difference
from ._tensor import Tensor, as_tensor, finish

NEVER = ", which stands for any size and is never expanded into rows or columns"
_LOW = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class MatrixAxes(NamedTuple):
    """The axes of a matrix and of results of its decompositions; k is a new positional axis."""

    order: Gather | None
    """The permutation of the columns of an operator to the order of its rows."""
    aligned: Axes
    """(..., row, column), the columns of an operator in the order of its rows."""
    exchanged: Axes
    """(..., column, row)."""
    batch: Axes
    """(...)."""
    values: Axes
    """(..., k)."""
    left: Axes
    """(..., row, k)."""
    right: Axes
    """(..., k, column)."""


@cache_by_axes
def plan_matrix(axes: Axes, what: str, operator: bool, name: str | None) -> MatrixAxes:
    """Return the axes of a matrix and of results of its decompositions.

    Args:
        axes: The axes of the tensor.
        what: The name of the function in errors.
        operator: Whether rows and columns must have the same labels.
        name: The name of the axis k.

    Raises:
        ValueError: If it is not a matrix, or not an operator.
    """
    check_matrix(axes, what)
    *lead, row, column = axes.pairs()
    order, aligned = None, column
    if operator:
        axes.refuse_broadcast((axes.ndim - 2, axes.ndim - 1), f"{what} needs a matrix, but ", NEVER)
        order = order_of(axes, -2, -1, f"{what} needs")
        aligned = column if order is None else (column[0], row[1])
    k: Pair = (name if axes.named and name not in axes.names else None, None)
    tails: tuple[list[Pair], ...] = ([row, aligned], [column, row], [], [k], [row, k], [k, column])
    return MatrixAxes(order, *(intern_pairs([*lead, *tail]) for tail in tails))


def check_matrix(axes: Axes, what: str) -> None:
    """Raise ValueError if there are fewer than two axes."""
    if axes.ndim < 2:
        raise ValueError(f"{what} works on the last two axes, but the tensor has {axes.ndim}: {axes.listing()}")


def order_of(axes: Axes, at0: int, at1: int, what: str) -> Gather | None:
    """Return the permutation of the second axis to the order of labels of the first; None if they have the same order.

    Args:
        axes: The axes of a tensor.
        at0: The first axis.
        at1: The second axis.
        what: The start of the error if labels differ.
    """
    left, right = axes.spaces[at0], axes.spaces[at1]
    if left is None or right is None or left._labels == right._labels:
        return None
    if not right.has_labels_of(left):
        what = f"{what} the same labels on both axes ({axes.listing()}), in any order, but they have"
        raise ValueError(describe_difference(left, right, what))
    return Gather(right.locate(left))


# -- on data -----------------------------------------------------------------------------------------------------------


def check_square(data: torch.Tensor, axes: Axes, what: str) -> None:
    """Raise ValueError if a matrix is not square.

    Args:
        data: The matrix.
        axes: Its axes.
        what: The name of the function in the error.
    """
    if data.shape[-2] != data.shape[-1]:
        row, column = axes.dims(data.shape)[-2:]
        raise ValueError(
            f"{what} needs a square matrix, but the rows are {row!r} of size {len(row)} "
            f"and the columns {column!r} of size {len(column)}"
        )


def _check_hermitian(data: torch.Tensor, axes: Axes, what: str) -> None:
    """Raise ValueError if a matrix differs from its adjoint beyond rounding; skipped if values can't be read."""
    if torch.compiler.is_compiling() or not data.is_cpu or in_transform() or has_dispatch_mode() or not data.numel():
        return
    with torch.no_grad():
        values = as_floating(data)
        largest = values.abs().amax((-2, -1))
        apart = (values - values.mH).abs().amax((-2, -1))
        # The rounding of a product of such matrices grows with their size, by the square root on average.
        precision = data.dtype if data.dtype in _LOW else values.dtype
        allowed = 100 * torch.finfo(precision).eps * data.shape[-1] ** 0.5
        if bool((apart > allowed * largest).any()):
            row, column = axes.describe(axes.ndim - 2), axes.describe(axes.ndim - 1)
            raise ValueError(
                f"{what} reads one triangle of a Hermitian matrix, but this one (rows: {row}, columns: {column}) differs "
                f"from its adjoint by {float(apart.max()):.3g} with entries up to {float(largest.max()):.3g}. Symmetrise it "
                f"with (t + t.mH) / 2, use eig for other matrices, or say {what}(t, check=False) to have one triangle read"
            )


def decompose(
    t: Tensor,
    what: str,
    *roles: str,
    function: Callable[..., Any] | None = None,
    operator: bool = True,
    align: bool = True,
    check: bool = False,
    name: str | None = "spectrum",
    **options: Any,
) -> list[Tensor]:
    """Return the results of a function of torch.linalg, each with the axes of its role in `MatrixAxes`.

    The matrix of an operator is square, and has its columns in the order of its rows unless ``align`` is False.

    Args:
        t: The tensor.
        what: The name of the function in torch.linalg, and in errors.
        roles: The field of `MatrixAxes` for each result.
        function: Another function of the data.
        operator: Whether rows and columns must have the same labels.
        align: Whether to permute the columns to the order of the rows.
        check: Whether to raise for matrices that are not Hermitian.
        name: The name of the axis k.
        options: Keyword arguments of the function.
    """
    t = as_tensor(t)
    data, plan = t._data, plan_matrix(t._axes, what, operator, name)
    if operator:
        check_square(data, t._axes, what)
    if align and plan.order is not None:
        data = data.index_select(-1, index_of(plan.order, data))
    if check:
        _check_hermitian(data, t._axes, what)
    results = (function or getattr(torch.linalg, what))(as_floating(data), **options)
    parts = [results] if isinstance(results, torch.Tensor) else results
    return [finish(round_to(part, data.dtype), getattr(plan, role)) for part, role in zip(parts, roles, strict=True)]


def as_floating(data: torch.Tensor) -> torch.Tensor:
    """Return the data in a dtype that decompositions exist for: at least single precision, and no integers."""
    if data.dtype in _LOW:
        return data.to(_LOW[data.dtype])
    return data if data.is_floating_point() or data.is_complex() else data.to(torch.get_default_dtype())


def round_to(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a result of low-precision data in that precision again."""
    if dtype not in _LOW:
        return result
    if result.is_complex():
        return result.to(dtype) if dtype.is_complex else result
    return result.to(torch.float16 if dtype.is_complex else dtype)
