"""Linear systems and the functions of a matrix that have one value: solve, inverses, determinants, trace, the adjoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._axes import Axes, cache_by_axes, intern_pairs
from ._gather import index_of
from ._join import policy
from ._matrix import as_floating, check_matrix, check_square, columns_to_rows, factors, operator, round_to, solution
from ._pairing import align_all
from ._tensor import RULES, Tensor, as_tensor, finish, method, wrap


class Slogdet(NamedTuple):
    """Sign and logarithm of a determinant.

    Example:
        >>> import moduli as mo
        >>> mo.slogdet(mo.tensor([[0.0, 1.0], [1.0, 0.0]])).sign
        Tensor(-1.)
    """

    sign: Tensor
    """A number of absolute value 1, or 0 for a singular matrix."""
    logabsdet: Tensor
    """The logarithm of the absolute value, minus infinity for a singular matrix."""


@method
def solve(a: Tensor, b: Tensor | torch.Tensor) -> Tensor:
    """The solution x of a x = b.

    ``sum_c a[r, c] x[c] = b[r]`` for every row label r: the rows of b are brought to the order of the rows of a by
    label, and x lives on the *columns* of a. Rows and columns of a need not have the same labels: a may be a map from
    one space to another of the same size. Leading axes are batches and pair as in any operation.

    Args:
        a: Square matrices on the last two axes.
        b: A vector on its last axis if it has a single axis or one axis fewer than ``a``; otherwise a matrix, with the
            rows second to last.

    Returns:
        x with axes (batch..., columns of a), followed by the columns of b if it is a matrix.

    Raises:
        ValueError: If a is not square, the rows of a and b have different labels, or batch axes can't be paired.
        RuntimeError: If a matrix is singular (``torch.linalg.LinAlgError``).

    Example:
        >>> import moduli as mo
        >>> a = mo.tensor([[2.0, 0.0], [0.0, 4.0]], row=["u", "v"], column=["a", "b"])
        >>> mo.solve(a, mo.tensor([4.0, 2.0], row=["v", "u"]))
        Tensor(column: a=1., b=1.)
    """
    a, b = as_tensor(a), as_tensor(b)
    x, y = a._data, b._data
    vector = y.ndim == 1 or y.ndim == x.ndim - 1
    plan = solution(a._axes, b._axes, vector, policy.how, policy.fill)
    check_square(x, a._axes, "solve")
    dtype = torch.promote_types(x.dtype, y.dtype)
    row_at = y.ndim - (1 if vector else 2)
    if y.shape[row_at] != x.shape[-2]:
        rows, b_rows = a.dims[-2], b.dims[row_at]
        raise ValueError(
            f"the rows of a, {rows!r} of size {len(rows)}, can't meet those of b, {b_rows!r} of size {len(b_rows)}"
        )
    if plan.order is not None:
        y = y.index_select(row_at, index_of(plan.order, y))
    if vector:
        y = y.unsqueeze(-1)
    x, y = align_all(plan.batch, (as_floating(x.to(dtype)), as_floating(y.to(dtype))))
    found = torch.linalg.solve(x, _full_batch(x, y))
    return finish(round_to(found.squeeze(-1) if vector else found, dtype), plan.axes)


def _full_batch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # torch takes b for a vector where its shape happens to be that of a without the last axis: full rank rules it out.
    return y.expand(*(1,) * (x.ndim - y.ndim), *y.shape) if y.ndim < x.ndim else y


@method
def inv(t: Tensor) -> Tensor:
    """The inverse of each matrix on the last two axes.

    ``sum_c t[r, c] inv(t)[c, s] = (1 if r is s)``, so the axes are exchanged: (..., row, column) becomes
    (..., column, row), each with its own labels in its own order.

    Args:
        t: Square matrices whose column labels are the row labels, in any order. (A map between two different spaces has
            its inverse from `pinv`.)

    Returns:
        The inverses.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.
        RuntimeError: If a matrix is singular (``torch.linalg.LinAlgError``).

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[2.0, 0.0], [0.0, 4.0]], row=["a", "b"], column=["a", "b"])
        >>> mo.inv(t).names, mo.inv(t).data.tolist()
        (('column', 'row'), [[0.5, 0.0], [0.0, 0.25]])
    """
    t = as_tensor(t)
    plan = operator(t._axes, "inv")
    check_square(t._data, t._axes, "inv")
    # A permutation of columns in is one of rows out, which the labels of the result record: nothing to align.
    return wrap(round_to(torch.linalg.inv(as_floating(t._data)), t._data.dtype), plan.exchanged)


@method
def pinv(t: Tensor, *, atol: float | None = None, rtol: float | None = None) -> Tensor:
    """The Moore-Penrose pseudo-inverse of each matrix on the last two axes.

    With the singular value decomposition ``t = U S Vh`` it is ``V S⁺ Uh``, where S⁺ inverts the singular values above
    ``max(atol, rtol * largest)`` and drops the others. The axes are exchanged, as by `inv`; rows and columns may be any
    spaces.

    Args:
        t: Matrices on the last two axes.
        atol: The absolute tolerance, 0 by default.
        rtol: The relative tolerance, the larger size times the precision of the dtype by default.

    Returns:
        The pseudo-inverses, with axes (..., column, row).

    Raises:
        ValueError: If the tensor has fewer than two axes.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[2.0], [0.0]], row=["u", "v"], column=["a"])
        >>> mo.pinv(t).dims, mo.pinv(t).data.tolist()
        ((Space(['a'], name='column'), Space(['u', 'v'], name='row')), [[0.5, 0.0]])
    """
    t = as_tensor(t)
    *_, exchanged = factors(t._axes, "pinv", "singular")
    found = torch.linalg.pinv(as_floating(t._data), atol=atol, rtol=rtol)
    return wrap(round_to(found, t._data.dtype), exchanged)


@method
def det(t: Tensor) -> Tensor:
    """The determinant of each matrix on the last two axes.

    Columns are brought to the order of the rows first, without which the sign would depend on how labels are listed.

    Args:
        t: Square matrices whose column labels are the row labels, in any order.

    Returns:
        The determinants, on the leading axes.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> mo.det(mo.tensor([[0.0, 2.0], [3.0, 0.0]], row=["a", "b"], column=["b", "a"]))
        Tensor(6.)
    """
    t = as_tensor(t)
    data, plan = columns_to_rows(t._data, t._axes, "det")
    return finish(round_to(torch.linalg.det(as_floating(data)), data.dtype), plan.batch)


@method
def slogdet(t: Tensor) -> Slogdet:
    """The sign and the logarithm of the absolute value of each determinant: ``det = sign * exp(logabsdet)``.

    Args:
        t: Square matrices whose column labels are the row labels, in any order.

    Returns:
        (sign, logabsdet), both on the leading axes.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> sign, logabsdet = mo.slogdet(mo.tensor([[1.0, 0.0], [0.0, -1.0]]))
        >>> sign, logabsdet
        (Tensor(-1.), Tensor(0.))
    """
    t = as_tensor(t)
    data, plan = columns_to_rows(t._data, t._axes, "slogdet")
    sign, logabsdet = torch.linalg.slogdet(as_floating(data))
    return Slogdet(finish(round_to(sign, data.dtype), plan.batch), finish(round_to(logabsdet, data.dtype), plan.batch))


@method
def matrix_exp(t: Tensor) -> Tensor:
    """The exponential of each matrix on the last two axes, ``1 + t + t t / 2 + t t t / 6 + ...``.

    Args:
        t: Square matrices whose column labels are the row labels, in any order.

    Returns:
        The exponentials with the axes of ``t``, the columns in the order of the rows.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[0.0, 1.0], [0.0, 0.0]], row=["a", "b"], column=["a", "b"])
        >>> mo.matrix_exp(t).data.tolist()
        [[1.0, 1.0], [0.0, 1.0]]
    """
    t = as_tensor(t)
    data, plan = columns_to_rows(t._data, t._axes, "matrix_exp")
    return wrap(round_to(torch.linalg.matrix_exp(as_floating(data)), data.dtype), plan.aligned)


@method
def trace(t: Tensor) -> Tensor:
    """The sum of the entries of each matrix whose row and column have the same label.

    Args:
        t: Square matrices on the last two axes whose column labels are the row labels, in any order.

    Returns:
        The traces, on the leading axes.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> mo.trace(mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["b", "a"]))
        Tensor(5.)
    """
    t = as_tensor(t)
    data, plan = columns_to_rows(t._data, t._axes, "trace")
    return finish(data.diagonal(dim1=-2, dim2=-1).sum(-1), plan.batch)


@method
def add_identity(t: Tensor, c: Any) -> Tensor:
    """A multiple of the identity added on the last two axes: ``t + c 1``.

    The identity is one where the label of the row *is* the label of the column (positional axes go by position),
    however the two axes list them. A number that is added with ``+`` is added to every element instead.

    Args:
        t: Square matrices whose column labels are the row labels, in any order.
        c: A number, or a tensor without axes.

    Returns:
        The sum, with the axes of ``t``.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.
        TypeError: If c is not a number.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["b", "a"])
        >>> mo.add_identity(t, 10.0).data.tolist()
        [[1.0, 12.0], [13.0, 4.0]]
    """
    t = as_tensor(t)
    amount = c._data if isinstance(c, Tensor) else c
    if isinstance(amount, torch.Tensor):
        if amount.ndim:
            raise TypeError(f"add_identity adds a number times the identity, but c has shape {tuple(amount.shape)}")
    elif not isinstance(amount, (int, float, complex)):
        raise TypeError(f"add_identity adds a number times the identity, but c is a {type(c).__name__}")
    data = t._data
    plan = operator(t._axes, "add_identity")
    check_square(data, t._axes, "add_identity")
    diagonal = torch.eye(data.shape[-1], dtype=torch.bool, device=data.device)
    if plan.order is not None:
        diagonal = diagonal.index_select(0, index_of(plan.order, data))
    # Not data + c * eye: an infinite c must leave the other entries alone.
    return wrap(torch.where(diagonal, data + amount, data), t._axes)


# -- the adjoint ---------------------------------------------------------------------------------------------------------


@method
def adjoint(t: Tensor) -> Tensor:
    """The adjoint operator, also ``t.mH``: rows and columns exchanged under their names, every element conjugated.

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
    """`adjoint` without the conjugation, which is ``t.mT``."""
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

RULES[torch.adjoint] = adjoint
