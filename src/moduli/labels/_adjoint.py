"""The adjoint of matrices on the last two axes: rows and columns exchanged under their names."""

from __future__ import annotations

from ._axes import Axes, cache_by_axes, intern_pairs
from ._matrix import check_matrix
from ._tensor import Tensor, method, wrap


@method
def adjoint(t: Tensor) -> Tensor:
    """Return the adjoint operator, also ``t.mH``: rows and columns exchanged under their names, every element conjugated.

    Where `h` moves the names along with the axes, so that the result pairs with ``t`` entry by entry, here the names
    stay: entry (a, b) is the conjugate of entry (b, a). That needs rows and columns with the same labels, in any order.
    Without names it is the conjugate transpose of any matrix.

    Args:
        t: Matrices on the last two axes.

    Raises:
        ValueError: If named rows and columns have different labels or sizes.

    Example:
        >>> import moduli as mo
        >>> hop = mo.tensor([[0.0, 1.0], [3.0, 0.0]], orb=["a", "b"], bra=["a", "b"])
        >>> ((hop + hop.mH) / 2).data.tolist()
        [[0.0, 2.0], [2.0, 0.0]]
    """
    exchanged = transpose_labels(t)
    return wrap(exchanged._data.conj(), exchanged._axes)


def transpose_labels(t: Tensor) -> Tensor:
    """Return `adjoint` without the conjugation, which is ``t.mT``."""
    axes, data = _adjoin_axes(t._axes), t._data
    if data.shape[-1] != data.shape[-2] and axes.names[-2:] != (None, None):
        raise ValueError(_rectangular(t._axes, f"sizes {data.shape[-2]} and {data.shape[-1]}"))
    return wrap(data.transpose(-2, -1), axes)


@cache_by_axes
def _adjoin_axes(axes: Axes) -> Axes:
    check_matrix(axes, "adjoint")
    *lead, (row_name, row), (column_name, column) = axes.pairs()
    if row_name is None and column_name is None:
        return intern_pairs([*lead, (None, column), (None, row)])
    if row is not None and column is not None and not row.has_labels_of(column):
        raise ValueError(_rectangular(axes, f"the labels {row!r} and {column!r}"))
    return intern_pairs([*lead, (row_name, column), (column_name, row)])


def _rectangular(axes: Axes, what: str) -> str:
    return (
        f"the adjoint swaps the labels of {axes.describe(axes.ndim - 2)} and {axes.describe(axes.ndim - 1)} and keeps their "
        f"names, but they have {what}; to exchange the axes with their names, use t.h() or t.T"
    )


Tensor.mH = property(adjoint)  # type: ignore[assignment, method-assign]
Tensor.mT = property(transpose_labels)  # type: ignore[assignment, method-assign]
