"""What the last two axes of a tensor say when they are a matrix: the label logic that linear algebra rests on.

A matrix that acts on one space (an operator) has the same labels on its rows and on its columns; only then do its
eigenvalues, its determinant or its exponential mean anything. Their *order* may differ, so the columns are brought to
the order of the rows first. Only labels count here: the names of the two axes are different by necessity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._torch import has_dispatch_mode, in_transform
from ._axes import Axes, cache_by_axes, intern_pairs
from ._gather import Gather, index_of
from ._pairing import PairingPlan, pair
from ._space import Space, show_labels

_NEVER = ", which stands for any size and is never expanded into rows or columns"
_LOW = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class Operator(NamedTuple):
    """What becomes of the axes of an operator; ``order`` brings its columns to the order of its rows."""

    order: Gather | None
    aligned: Axes
    """(..., row, column), the columns in the order of the rows."""
    exchanged: Axes
    """(..., column, row)."""
    batch: Axes
    """(...)."""
    values: Axes
    """(..., spectrum)."""
    vectors: Axes
    """(..., row, spectrum)."""


@cache_by_axes
def operator(axes: Axes, what: str) -> Operator:
    """The plan for an operator, or an error that says why the matrix is none."""
    check_matrix(axes, what)
    row, column = axes.spaces[-2:]
    axes.refuse_broadcast(
        (axes.ndim - 2, axes.ndim - 1), f"{what} needs a matrix, but ", f"{_NEVER}; {_describe_both(axes)}"
    )
    order = order_of(row, column, f"{what} needs the same labels on rows and columns, in any order, but those of", axes)
    pairs = axes.pairs()
    if order is not None:
        pairs[-1] = (axes.names[-1], row)
    lead = pairs[:-2]
    spectrum = (new_name(axes, "spectrum"), None)
    return Operator(
        order,
        intern_pairs(pairs),
        intern_pairs([*lead, axes.pairs()[-1], axes.pairs()[-2]]),
        intern_pairs(lead),
        intern_pairs([*lead, spectrum]),
        intern_pairs([*lead, pairs[-2], spectrum]),
    )


@cache_by_axes
def factors(axes: Axes, what: str, name: str | None) -> tuple[Axes, Axes, Axes, Axes]:
    """The axes of (..., row, k), (..., k), (..., k, column) and (..., column, row) for a new positional axis k."""
    check_matrix(axes, what)
    *lead, row, column = axes.pairs()
    k = (new_name(axes, name), None)
    return (
        intern_pairs([*lead, row, k]),
        intern_pairs([*lead, k]),
        intern_pairs([*lead, k, column]),
        intern_pairs([*lead, column, row]),
    )


def check_matrix(axes: Axes, what: str) -> None:
    """Refuse what has fewer than two axes."""
    if axes.ndim < 2:
        raise ValueError(f"{what} works on the last two axes, but the tensor has {axes.ndim}: {axes.listing()}")


def new_name(axes: Axes, name: str | None) -> str | None:
    """The name for a new axis: only where all axes have one, and not this one."""
    return name if axes.named and name not in axes.names else None


def order_of(left: Space | None, right: Space | None, sentence: str, axes: Axes) -> Gather | None:
    """For each label of the left its position on the right, where the order differs; both must have the same labels."""
    if left is None or right is None or left.labels == right.labels:
        return None
    if right.has_labels_of(left):
        return Gather(right.locate(left))
    only_left = [label for label in left if label not in right]
    only_right = [label for label in right if label not in left]
    raise ValueError(
        f"{sentence} {left!r} and {right!r} differ; only in the first: {show_labels(only_left)}, "
        f"only in the second: {show_labels(only_right)} ({axes.listing()}). Select the labels you mean first"
    )


def _describe_both(axes: Axes) -> str:
    row, column = (
        f"{axes.describe(at)} is {'positional' if axes.spaces[at] is None else repr(axes.spaces[at])}"
        for at in (axes.ndim - 2, axes.ndim - 1)
    )
    return f"of the last two, {row} and {column}"


# -- on data -----------------------------------------------------------------------------------------------------------


def check_square(data: torch.Tensor, axes: Axes, what: str) -> None:
    """Refuse a matrix that is not square, where the labels could not tell."""
    if data.shape[-2] != data.shape[-1]:
        row, column = axes.dims(data.shape)[-2:]
        raise ValueError(
            f"{what} needs a square matrix, but the rows are {row!r} of size {len(row)} "
            f"and the columns {column!r} of size {len(column)}"
        )


def check_hermitian(data: torch.Tensor, axes: Axes, what: str) -> None:
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


def columns_to_rows(data: torch.Tensor, axes: Axes, what: str) -> tuple[torch.Tensor, Operator]:
    """The operator with its columns in the order of its rows, and the plan for its axes."""
    plan = operator(axes, what)
    check_square(data, axes, what)
    if plan.order is None:
        return data, plan
    return data.index_select(-1, index_of(plan.order, data)), plan


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


# -- two matrices ------------------------------------------------------------------------------------------------------


class Solution(NamedTuple):
    """How ``a x = b`` is brought together: the batch plan, the order of b's rows, and the axes of x."""

    batch: PairingPlan
    order: Gather | None
    axes: Axes


@cache_by_axes
def solution(axes: Axes, other: Axes, vector: bool, how: str, fill: complex) -> Solution:
    """The plan for a solve."""
    check_matrix(axes, "solve")
    tail = 1 if vector else 2
    if other.ndim < tail:
        raise ValueError(f"solve(a, b) needs at least one axis in b, but {other.listing()}")
    row_at = other.ndim - tail
    axes.refuse_broadcast((axes.ndim - 2, axes.ndim - 1), "solve(a, b) needs a matrix a, but its ", _NEVER)
    other.refuse_broadcast([row_at], "solve(a, b) needs right hand sides b of the size of a, but their ", _NEVER)
    row, b_row = axes.spaces[-2], other.spaces[row_at]
    name = axes.names[-2]
    if name is not None and name in other.names and other.names.index(name) != row_at:
        kind = "a vector, as it has one axis fewer than a" if vector else "a matrix"
        raise ValueError(
            f"solve(a, b) takes b for {kind}, so that the rows of a meet {other.describe(row_at)} of b, "
            f"but b has an axis {name!r}, the name of a's rows, elsewhere; {other.listing()}. "
            "Permute b, or give it a column axis with b.unsqueeze(-1)"
        )
    order = order_of(row, b_row, "solve(a, b) needs the same labels on the rows of a and b, in any order, but", axes)
    batch = pair(axes.take(range(axes.ndim - 2)), (other.take(range(row_at)),), how, fill)
    result = [*batch.axes.pairs(), axes.pairs()[-1], *other.pairs()[row_at + 1 :]]
    return Solution(batch, order, intern_pairs(result))
