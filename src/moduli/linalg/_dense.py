"""The operator that is a matrix."""

from typing import final

from torch import Tensor

from . import _checks
from ._factor import lu_solve, positive_solve
from ._operator import LinearOperator


@final
class Dense(LinearOperator):
    """A matrix, or a batch of them.

    Systems are solved by LU with partial pivoting, or by Cholesky where the matrix is declared positive semidefinite.

    Args:
        matrix: (*batch, m, n), real or complex.
        symmetric: Declared: the matrix equals its conjugate transpose.
        positive_semidefinite: Declared: it is symmetric and has no negative eigenvalue.

    Raises:
        TypeError: If the matrix is no real or complex tensor.
        ValueError: If it has fewer than two axes, or is declared symmetric and not square.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense
        >>> A = Dense(torch.tensor([[4.0, 1.0], [2.0, 3.0]]))
        >>> A.solve(torch.tensor([6.0, 8.0])).round(decimals=3), A.T @ torch.tensor([1.0, 0.0])
        (tensor([1., 2.]), tensor([4., 1.]))
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False, positive_semidefinite: bool = False) -> None:
        self._matrix = _checks.check_floating(matrix, "matrix", 2)
        super().__init__(
            tuple(matrix.shape),
            matrix.dtype,
            matrix.device,
            symmetric=symmetric,
            positive_semidefinite=positive_semidefinite,
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._matrix @ X

    def _matvec(self, x: Tensor) -> Tensor:
        # One vector takes the faster matrix-vector kernel; a batch of vectors must not be read as a matrix.
        return self._matrix @ x if x.ndim == 1 else (self._matrix @ x.unsqueeze(-1)).squeeze(-1)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._matrix.mH @ Y

    def _solve(self, B: Tensor) -> Tensor:
        solve = positive_solve if self.is_positive_semidefinite else lu_solve
        return solve(self._matrix, B, self)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        n = self.shape[-1]
        shifted = self._matrix + (d.expand(*d.shape[:-1], n)).diag_embed()
        # A shift that takes nothing away keeps a positive matrix positive.
        if self.is_positive_semidefinite and not d.dtype.is_complex and bool((d >= 0).all()):
            return positive_solve(shifted, B, f"{self} plus the diagonal")
        return lu_solve(shifted, B, f"{self} plus the diagonal")

    def _to_dense(self) -> Tensor:
        return self._matrix

    def _adjoint(self) -> LinearOperator:
        return Dense(self._matrix.mH)

    def _transpose(self) -> LinearOperator:
        return Dense(self._matrix.mT, symmetric=self.is_symmetric, positive_semidefinite=self.is_positive_semidefinite)

    def _scale(self, factor: Tensor) -> LinearOperator:
        real = _checks.is_real(factor)
        return Dense(
            factor[..., None, None] * self._matrix,
            symmetric=self.is_symmetric and real,
            positive_semidefinite=self.is_positive_semidefinite and real and bool((factor.real >= 0).all()),
        )

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        # A dense matrix absorbs whatever is stored: the sum costs no more than the matrix that is already there.
        if other.is_matrix_free:
            return None
        return Dense(
            self._matrix + other.to_dense(),
            symmetric=self.is_symmetric and other.is_symmetric,
            positive_semidefinite=self.is_positive_semidefinite and other.is_positive_semidefinite,
        )
