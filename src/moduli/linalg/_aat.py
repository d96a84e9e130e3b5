"""The outer Gram operator: a factor times its own adjoint, from the outside."""

from typing import final

from torch import Tensor

from ._dense import Dense
from ._gram import gram_solve, gram_solve_plus_diag
from ._operator import LinearOperator

__all__ = ["AAT"]


@final
class AAT(LinearOperator):
    """A Aᴴ for a factor A of n rows and k columns, never formed for a product.

    With one gradient per column it is the empirical Fisher matrix. Systems are solved as in `AtA`, for the adjoint
    factor: by QR, and in O(n k²) with a shift and fewer columns than rows.

    Args:
        factor: A: an operator, or a matrix (*batch, n, k).

    Raises:
        TypeError: If the factor is neither an operator nor a real or complex tensor.

    Example:
        >>> import torch
        >>> from moduli.linalg import AAT
        >>> F = AAT(torch.tensor([[1.0], [2.0]]))
        >>> F.to_dense(), F.solve_plus_diag(torch.tensor([1.0, 2.0]), 5.0)
        (tensor([[1., 2.],
                [2., 4.]]), tensor([0.1000, 0.2000]))
    """

    def __init__(self, factor: LinearOperator | Tensor) -> None:
        self._factor = A = factor if isinstance(factor, LinearOperator) else Dense(factor)
        *batch, n, _ = A.shape
        super().__init__((*batch, n, n), A.dtype, A.device, positive_semidefinite=True, matrix_free=A.is_matrix_free)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._factor._matmat(self._factor._rmatmat(X))

    def _matvec(self, x: Tensor) -> Tensor:
        return self._factor._matvec(self._factor._rmatvec(x))

    def _solve(self, B: Tensor) -> Tensor:
        return gram_solve(self._explicit("solve").mH, B, self)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        return gram_solve_plus_diag(self._explicit("solve_plus_diag").mH, B, d, f"{self} plus the diagonal")

    def _diagonal(self) -> Tensor:
        A = self._factor._to_dense()
        return (A * A.conj()).sum(-1)

    def _to_dense(self) -> Tensor:
        A = self._factor._to_dense()
        return A @ A.mH

    def _explicit(self, ability: str) -> Tensor:
        return self._factor._to_dense() if not self.is_matrix_free else self._dense_for(ability)._to_dense()
