"""Linear systems and functions of matrices: solve, inverses, determinants, trace, orthonormal columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._assign import diagonal
from ._axes import Axes, cache_by_axes, intern_pairs
from ._gather import gather, index_of
from ._join import policy
from ._matrix import NEVER, as_floating, check_matrix, check_square, decompose, plan_matrix, round_to
from ._pairing import Check, Moves, PairingPlan, align_all, check_sizes, pair, pair_labels
from ._tensor import Tensor, _in_transform, as_tensor, finish, method, wrap


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
    """Return the solution x of a x = b.

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
    moves, checks, batch, axes = _plan_solution(a._axes, b._axes, vector, policy.how, policy.fill)
    check_square(x, a._axes, "solve")
    check_sizes(checks, (x, y))
    dtype = torch.promote_types(x.dtype, y.dtype)
    for axis, move in moves:
        y = gather(y, axis, move, 0.0)
    if vector:
        y = y.unsqueeze(-1)
    x, y = align_all(batch, (as_floating(x.to(dtype)), as_floating(y.to(dtype))))
    # With fewer axes than a, torch could take b for a batch of vectors, so it is expanded to the same number of axes.
    solution = torch.linalg.solve(x, y.expand(*(1,) * (x.ndim - y.ndim), *y.shape))
    return finish(round_to(solution.squeeze(-1) if vector else solution, dtype), axes)


@cache_by_axes
def _plan_solution(
    axes: Axes, other: Axes, vector: bool, how: str, fill: complex | None
) -> tuple[Moves, tuple[Check, ...], PairingPlan, Axes]:
    """Return the moves of the rows of b to those of a, sizes to check, the pairing of batch axes, and the axes of x."""
    check_matrix(axes, "solve")
    row, b_row = axes.ndim - 2, other.ndim - (1 if vector else 2)
    if b_row < 0:
        raise ValueError(f"solve(a, b) needs at least one axis in b, but {other.listing()}")
    axes.refuse_broadcast((row, row + 1), "solve(a, b) needs a matrix a, but its ", NEVER)
    other.refuse_broadcast([b_row], "solve(a, b) needs right hand sides b of the size of a, but their ", NEVER)
    name = axes.names[row]
    if name is not None and name in other.names and other.names.index(name) != b_row:
        kind = "a vector, as it has one axis fewer than a" if vector else "a matrix"
        raise ValueError(
            f"solve(a, b) takes b for {kind}, so that the rows of a meet {other.describe(b_row)} of b, "
            f"but b has an axis {name!r}, the name of a's rows, elsewhere; {other.listing()}. "
            "Permute b, or give it a column axis with b.unsqueeze(-1)"
        )
    _, moves, checks = pair_labels((axes, other), [(name or "rows", [(0, row), (1, b_row)])], "exact")
    batch = pair(axes.take(range(row)), (other.take(range(b_row)),), how, fill)
    result = [*batch.axes.pairs(), axes.pairs()[-1], *other.pairs()[b_row + 1 :]]
    return moves[1], checks, batch, intern_pairs(result)


@method
def inv(t: Tensor) -> Tensor:
    """Return the inverse of each matrix on the last two axes.

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
    # A permutation of the columns permutes the rows of the inverse, which the labels of the result show: no alignment.
    return decompose(t, "inv", "exchanged", align=False)[0]


@method
def pinv(t: Tensor, *, atol: float | None = None, rtol: float | None = None) -> Tensor:
    """Return the Moore-Penrose pseudo-inverse of each matrix on the last two axes.

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
    return decompose(t, "pinv", "exchanged", operator=False, atol=atol, rtol=rtol)[0]


@method
def det(t: Tensor) -> Tensor:
    """Return the determinant of each matrix on the last two axes.

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
    return decompose(t, "det", "batch")[0]


@method
def slogdet(t: Tensor) -> Slogdet:
    """Return the sign and the logarithm of the absolute value of each determinant: ``det = sign * exp(logabsdet)``.

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
    return Slogdet(*decompose(t, "slogdet", "batch", "batch"))


@method
def matrix_exp(t: Tensor) -> Tensor:
    """Return the exponential of each matrix on the last two axes, ``1 + t + t t / 2 + t t t / 6 + ...``.

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
    return decompose(t, "matrix_exp", "aligned")[0]


@method
def trace(t: Tensor) -> Tensor:
    """Return the sum of the entries of each matrix whose row and column have the same label.

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
    plan_matrix(t._axes, "trace", True, None)
    check_square(t._data, t._axes, "trace")
    return diagonal(t).sum(-1)


@method
def add_identity(t: Tensor, c: Any) -> Tensor:
    """Add a multiple of the identity on the last two axes: ``t + c 1``.

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
    if isinstance(amount, torch.Tensor) and amount.ndim:
        raise TypeError(f"add_identity adds a number times the identity, but c has shape {tuple(amount.shape)}")
    data = t._data
    plan = plan_matrix(t._axes, "add_identity", True, None)
    check_square(data, t._axes, "add_identity")
    diagonal = torch.eye(data.shape[-1], dtype=torch.bool, device=data.device)
    if plan.order is not None:
        diagonal = diagonal.index_select(0, index_of(plan.order, data))
    # Not data + c * eye: an infinite c must leave the other entries alone.
    return wrap(torch.where(diagonal, data + amount, data), t._axes)


# -- orthonormal columns -----------------------------------------------------------------------------------------------


@method
def lowdin(t: Tensor, tolerance: float | None = None) -> Tensor:
    """Symmetric orthonormalisation: the matrix with orthonormal columns that is nearest to ``t``.

    With the reduced decomposition ``t = U S Vh`` it is ``U Vh = t (th t)^(-1/2)`` (P.-O. Löwdin, J. Chem. Phys. 18,
    365, 1950); a matrix with more columns than rows gets orthonormal rows. Derivatives up to the third order are exact,
    also where singular values coincide.

    Args:
        t: Matrices on the last two axes; rows and columns may be any spaces.
        tolerance: A matrix is rank deficient if its smallest singular value is at most this times its largest. By
            default the larger size times the precision of the dtype.

    Returns:
        The orthonormal matrices, with the axes of ``t``.

    Raises:
        ValueError: If the tensor has fewer than two axes.
        RuntimeError: If a matrix is rank deficient: its direction is then undetermined. Where values can't be looked at
            (inside `torch.compile` or a function transform) its result is NaN instead.

    Example:
        >>> import moduli as mo
        >>> mo.lowdin(mo.tensor([[2.0, 0.0], [0.0, 5.0]], row=["u", "v"], column=["a", "b"])).data.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    t = as_tensor(t)
    check_matrix(t._axes, "lowdin")
    data = as_floating(t._data)
    U, S, Vh = torch.linalg.svd(data.detach(), full_matrices=False)
    result = U @ Vh
    if S.shape[-1]:
        if tolerance is None:
            tolerance = max(data.shape[-2:]) * torch.finfo(S.dtype).eps
        deficient = S[..., -1] <= tolerance * S[..., 0]
        if torch.compiler.is_compiling() or _in_transform() or data.is_meta:
            result = torch.where(deficient[..., None, None], torch.nan, result)
        elif bool(deficient.any()):
            ratio = float((S[..., -1] / S[..., 0]).nan_to_num().min())
            raise RuntimeError(
                f"lowdin can't orthonormalise a rank deficient matrix: the smallest singular value is {ratio:.3g} of "
                f"the largest, the tolerance {tolerance:.3g}"
            )
    if data.requires_grad or _in_transform():
        tall = data.shape[-2] >= data.shape[-1]
        moved = _polar(data, S, Vh) if tall else _polar(data.mH, S, U.mH).mH
        result = result + (moved - moved.detach())
    return wrap(round_to(result, t._data.dtype), t._axes)


def _polar(a: torch.Tensor, S: torch.Tensor, Vh: torch.Tensor) -> torch.Tensor:
    """Return a P^-1 with P = (ah a)^(1/2), differentiable without the gaps between singular values.

    The derivative of the svd divides by differences of singular values, which vanish for the very matrices that are
    orthonormal already. Instead P solves P P = G = ah a by Newton's method from the known root P0 = V S Vh, whose
    linear equation P0 X + X P0 = R divides by sums: k steps have the derivatives up to order k right.
    """
    G = a.mH @ a
    P = Vh.mH @ (S.unsqueeze(-1) * Vh)
    sums = S.unsqueeze(-1) + S.unsqueeze(-2)
    for _ in range(3):
        P = P + Vh.mH @ ((Vh @ (G - P @ P) @ Vh.mH) / sums) @ Vh
    product: torch.Tensor = torch.linalg.solve(P, a, left=False)
    return product
