"""What the last two axes of a tensor say when they are a matrix: the label logic that linear algebra rests on.

A matrix that acts on one space (an operator) has the same labels on its rows and on its columns; only then do its
eigenvalues, its determinant or its exponential mean anything. Their *order* may differ, so the columns are brought to
the order of the rows first. Only labels count here: the names of the two axes are different by necessity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._torch import has_dispatch_mode, in_transform
from ._axes import Axes, Pair, cache_by_axes, intern_pairs
from ._pairing import Gather, describe_difference, index_of
from ._tensor import Tensor, as_tensor, finish

NEVER = ", which stands for any size and is never expanded into rows or columns"
_LOW = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class MatrixAxes(NamedTuple):
    """What becomes of the axes of a matrix; k is a new positional axis."""

    order: Gather | None
    """What brings the columns of an operator to the order of its rows."""
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
    """The plan for a matrix, or an error that says why it is none, or not that of an operator."""
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
    """Refuse what has fewer than two axes."""
    if axes.ndim < 2:
        raise ValueError(f"{what} works on the last two axes, but the tensor has {axes.ndim}: {axes.listing()}")


def order_of(axes: Axes, at0: int, at1: int, what: str) -> Gather | None:
    """How the labels of the second of two axes get the order of the first; None if they have it."""
    left, right = axes.spaces[at0], axes.spaces[at1]
    if left is None or right is None or left._labels == right._labels:
        return None
    if not right.has_labels_of(left):
        what = f"{what} the same labels on both axes ({axes.listing()}), in any order, but they have"
        raise ValueError(describe_difference(left, right, what))
    return Gather(right.locate(left))


# -- on data -----------------------------------------------------------------------------------------------------------


def check_square(data: torch.Tensor, axes: Axes, what: str) -> None:
    """Refuse a matrix that is not square, where the labels could not tell."""
    if data.shape[-2] != data.shape[-1]:
        row, column = axes.dims(data.shape)[-2:]
        raise ValueError(
            f"{what} needs a square matrix, but the rows are {row!r} of size {len(row)} "
            f"and the columns {column!r} of size {len(column)}"
        )


def _check_hermitian(data: torch.Tensor, axes: Axes, what: str) -> None:
    """Refuse a matrix that differs from its adjoint beyond rounding, where its numbers can be looked at."""
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
    """The results of a function of torch.linalg, each with the axes of its role in `MatrixAxes`.

    The matrix of an operator is square, and has its columns in the order of its rows unless ``align`` is False.
    """
    t = as_tensor(t)
    data, plan = t._data, plan_matrix(t._axes, what, operator, name)
    if operator:
        check_square(data, t._axes, what)
    if align and plan.order is not None:
        data = data.index_select(-1, index_of(plan.order, data))
    if check:
        _check_hermitian(data, t._axes, what)
    found = (function or getattr(torch.linalg, what))(as_floating(data), **options)
    parts = [found] if isinstance(found, torch.Tensor) else found
    return [finish(round_to(part, data.dtype), getattr(plan, role)) for part, role in zip(parts, roles, strict=True)]


def as_floating(data: torch.Tensor) -> torch.Tensor:
    """The data in a dtype that decompositions exist for: at least single precision, and no integers."""
    if data.dtype in _LOW:
        return data.to(_LOW[data.dtype])
    return data if data.is_floating_point() or data.is_complex() else data.to(torch.get_default_dtype())


def round_to(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A result that was computed for low precision data, in that precision again."""
    if dtype not in _LOW:
        return result
    if result.is_complex():
        return result.to(dtype) if dtype.is_complex else result
    return result.to(torch.float16 if dtype.is_complex else dtype)
