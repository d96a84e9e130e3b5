"""Decompositions of the matrices on the last two axes, batched over the leading ones, with their labels.

Where a matrix acts on one space (`eigh`, `eig`, `cholesky`), its column labels must be its row labels, and columns are
brought to the order of the rows first. What a decomposition numbers (eigenvalues, singular values) is a new positional
axis, named ``"spectrum"`` or ``"singular"`` where all axes of the input have names and none has that one. Low precision
is computed in single precision and rounded back, and integers in the default dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._elementwise import register
from ._matrix import decompose
from ._solve import det, inv, matrix_exp, pinv, slogdet, solve, trace
from ._tensor import RULES, Tensor, method


class Eigen(NamedTuple):
    """Eigenvalues and eigenvectors.

    Example:
        >>> import moduli as mo
        >>> mo.eigh(mo.tensor([[2.0, 0.0], [0.0, 1.0]], "row column")).values
        Tensor(spectrum: [1., 2.])
    """

    values: Tensor
    """The eigenvalues, with axes (..., spectrum)."""
    vectors: Tensor
    """The eigenvectors as columns, with axes (..., row, spectrum)."""

    @property
    def eigenvalues(self) -> Tensor:
        """The same as ``values``: torch's name for them.

        Example:
            >>> import torch, moduli as mo
            >>> torch.linalg.eigh(mo.tensor([[2.0, 0.0], [0.0, 1.0]])).eigenvalues
            Tensor([1., 2.])
        """
        return self.values

    @property
    def eigenvectors(self) -> Tensor:
        """The same as ``vectors``: torch's name for them.

        Example:
            >>> import torch, moduli as mo
            >>> torch.linalg.eigh(mo.tensor([[2.0]], "row column")).eigenvectors.names
            ('row', 'spectrum')
        """
        return self.vectors


class SVD(NamedTuple):
    """The factors of a singular value decomposition.

    Example:
        >>> import moduli as mo
        >>> mo.svd(mo.tensor([[0.0, 2.0], [1.0, 0.0]], "row column")).S
        Tensor(singular: [2., 1.])
    """

    U: Tensor
    """The left singular vectors as columns, with axes (..., row, singular)."""
    S: Tensor
    """The singular values, largest first, with axes (..., singular)."""
    Vh: Tensor
    """The right singular vectors, conjugated, as rows, with axes (..., singular, column)."""


class QR(NamedTuple):
    """The factors of an orthogonal-triangular decomposition.

    Example:
        >>> import moduli as mo
        >>> mo.qr(mo.tensor([[1.0], [0.0]], "row column")).R.shape
        torch.Size([1, 1])
    """

    Q: Tensor
    """Orthonormal columns, with axes (..., row, k)."""
    R: Tensor
    """Upper triangular, with axes (..., k, column)."""


@method
def eigh(t: Tensor, UPLO: str = "L", *, check: bool = True) -> Eigen:
    """Return the eigenvalues and orthonormal eigenvectors of Hermitian matrices: ``t v = λ v``, λ real and ascending.

    Args:
        t: Hermitian matrices on the last two axes, whose column labels are the row labels, in any order.
        UPLO: Which triangle is read once columns follow the rows: ``"L"`` or ``"U"``.
        check: Refuse a matrix that is not Hermitian beyond rounding; only on the CPU and outside of compiled code, as the
            numbers must be looked at.

    Returns:
        (values, vectors) with axes (..., spectrum) and (..., row, spectrum).

    Raises:
        ValueError: If a matrix is not square or not Hermitian, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[0.0, 2.0], [1.0, 0.0]], row=["a", "b"], column=["b", "a"])
        >>> values, vectors = mo.eigh(t)
        >>> values, vectors.names
        (Tensor(spectrum: [1., 2.]), ('row', 'spectrum'))
    """
    return Eigen(*decompose(t, "eigh", "values", "left", check=check, UPLO=UPLO))


@method
def eigvalsh(t: Tensor, UPLO: str = "L", *, check: bool = True) -> Tensor:
    """Return the eigenvalues of Hermitian matrices, ascending.

    Args:
        t: Hermitian matrices on the last two axes, whose column labels are the row labels, in any order.
        UPLO: Which triangle is read once columns follow the rows: ``"L"`` or ``"U"``.
        check: Refuse a matrix that is not Hermitian beyond rounding, as `eigh` does.

    Returns:
        The eigenvalues, with axes (..., spectrum).

    Raises:
        ValueError: If a matrix is not square or not Hermitian, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> mo.eigvalsh(mo.tensor([[0.0, 2.0], [1.0, 0.0]], row=["a", "b"], column=["b", "a"]))
        Tensor(spectrum: [1., 2.])
    """
    return decompose(t, "eigvalsh", "values", check=check, UPLO=UPLO)[0]


@method
def eig(t: Tensor) -> Eigen:
    """Return the eigenvalues and eigenvectors of square matrices: ``t v = λ v``, λ complex, ordered by (real, imaginary) part.

    Args:
        t: Square matrices on the last two axes, whose column labels are the row labels, in any order.

    Returns:
        (values, vectors) with axes (..., spectrum) and (..., row, spectrum), both complex.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> mo.eig(mo.tensor([[0.0, -1.0], [1.0, 0.0]], "row column")).values.data.tolist()
        [-1j, 1j]
    """
    return Eigen(*decompose(t, "eig", "values", "left", function=_sort_eigen))


@method
def eigvals(t: Tensor) -> Tensor:
    """Return the eigenvalues of square matrices, complex, ordered by (real, imaginary) part.

    Args:
        t: Square matrices on the last two axes, whose column labels are the row labels, in any order.

    Returns:
        The eigenvalues, with axes (..., spectrum).

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.

    Example:
        >>> import moduli as mo
        >>> mo.eigvals(mo.tensor([[2.0, 0.0], [0.0, 1.0]])).data.tolist()
        [(1+0j), (2+0j)]
    """
    return decompose(t, "eigvals", "values", function=_sort_eigenvalues)[0]


def _sort_eigen(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eig(data)
    order = _sort_by_parts(values)
    return values.gather(-1, order), vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))


def _sort_eigenvalues(data: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = torch.linalg.eigvals(data)
    return values.gather(-1, _sort_by_parts(values))


def _sort_by_parts(values: torch.Tensor) -> torch.Tensor:
    """Return the order by real part, ties by imaginary part: a stable sort by the imaginary, then by the real part."""
    by_imaginary = torch.argsort(values.imag, dim=-1, stable=True)
    return by_imaginary.gather(-1, torch.argsort(values.real.gather(-1, by_imaginary), dim=-1, stable=True))


@method
def svd(t: Tensor, full_matrices: bool = False) -> SVD:
    """Return the singular value decomposition ``t = U diag(S) Vh`` of each matrix on the last two axes.

    Args:
        t: Matrices on the last two axes; rows and columns may be any spaces.
        full_matrices: Complete U and Vh to square matrices, so that only the first columns of U and rows of Vh belong
            to singular values.

    Returns:
        (U, S, Vh) with axes (..., row, singular), (..., singular) and (..., singular, column).

    Raises:
        ValueError: If the tensor has fewer than two axes.

    Example:
        >>> import moduli as mo
        >>> U, S, Vh = mo.svd(mo.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]], "row column"))
        >>> S, U.names, Vh.names
        (Tensor(singular: [4., 3.]), ('row', 'singular'), ('singular', 'column'))
    """
    roles = ("left", "values", "right")
    return SVD(*decompose(t, "svd", *roles, operator=False, name="singular", full_matrices=full_matrices))


@method
def svdvals(t: Tensor) -> Tensor:
    """Return the singular values of each matrix on the last two axes, largest first.

    Args:
        t: Matrices on the last two axes; rows and columns may be any spaces.

    Returns:
        The singular values, with axes (..., singular).

    Raises:
        ValueError: If the tensor has fewer than two axes.

    Example:
        >>> import moduli as mo
        >>> mo.svdvals(mo.tensor([[3.0, 0.0], [0.0, -4.0]]))
        Tensor([4., 3.])
    """
    return decompose(t, "svdvals", "values", operator=False, name="singular")[0]


@method
def qr(t: Tensor) -> QR:
    """Return the reduced decomposition ``t = Q R`` into orthonormal columns and an upper triangle.

    The triangle refers to the order in which the columns are listed. The new axis between Q and R has no name.

    Args:
        t: Matrices on the last two axes; rows and columns may be any spaces.

    Returns:
        (Q, R) with axes (..., row, k) and (..., k, column), where k is the smaller of the two sizes.

    Raises:
        ValueError: If the tensor has fewer than two axes.

    Example:
        >>> import moduli as mo
        >>> Q, R = mo.qr(mo.tensor([[3.0], [4.0]], "row column"))
        >>> Q.shape, R.names
        (torch.Size([2, 1]), (None, 'column'))
    """
    return QR(*decompose(t, "qr", "left", "right", operator=False, name=None, mode="reduced"))


@method
def cholesky(t: Tensor, *, upper: bool = False) -> Tensor:
    """Return the lower triangular L with ``t = L Lh`` of each Hermitian positive definite matrix.

    The triangle refers to the order in which the rows are listed.

    Args:
        t: Positive definite matrices on the last two axes, whose column labels are the row labels, in any order.
        upper: Give Lh, for which ``t = Uh U``, instead.

    Returns:
        The factor with the axes of ``t``, the columns in the order of the rows.

    Raises:
        ValueError: If a matrix is not square, or rows and columns have different labels.
        RuntimeError: If a matrix is not positive definite (``torch.linalg.LinAlgError``).

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[0.0, 4.0], [9.0, 0.0]], row=["a", "b"], column=["b", "a"])
        >>> mo.cholesky(t).data.tolist()
        [[2.0, 0.0], [0.0, 3.0]]
    """
    return decompose(t, "cholesky", "aligned", upper=upper)[0]


# -- rules for torch's own functions -----------------------------------------------------------------------------------


def _rule(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """Call ours with torch's arguments; an option may be given where it says what ours does anyway."""

    def rule(*args: Any, **options: Any) -> Any:
        for name in ("A", "input", "B"):
            if name in options:
                args = (*args, options.pop(name))
        for name, value in fixed.items():
            if options.pop(name, value) != value:
                raise TypeError(
                    f"{function.__name__} of labelled tensors knows only {name}={value!r}; take t.data for others"
                )
        return function(*args, **options)

    return rule


for _function in (eigh, eigvalsh, eig, eigvals, cholesky, inv, det, slogdet, matrix_exp):
    RULES[getattr(torch.linalg, _function.__name__)] = _rule(_function)
RULES[torch.linalg.svdvals] = _rule(svdvals, driver=None)
RULES[torch.linalg.svd] = _rule(lambda t, full_matrices=True: svd(t, full_matrices), driver=None)
RULES[torch.linalg.qr] = _rule(qr, mode="reduced")
RULES[torch.linalg.solve] = _rule(solve, left=True)
RULES[torch.linalg.pinv] = _rule(pinv, hermitian=False)
for _function in (det, slogdet, matrix_exp, trace):
    register(getattr(torch, _function.__name__), _rule(_function))
register(torch.inverse, _rule(inv))
