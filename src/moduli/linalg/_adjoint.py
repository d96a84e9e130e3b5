"""The conjugate transpose of an operator that has no closer form for it."""

from typing import final

from torch import Tensor

from ._operator import LinearOperator


@final
class Adjoint(LinearOperator):
    """Aᴴ: its products are A's adjoint products, and the other way round. Made by `A.H`, and by `A.T` if A is real.

    Args:
        operator: A, of any kind.

    Example:
        >>> import torch
        >>> from moduli.linalg import Adjoint, Dense
        >>> Adjoint(Dense(torch.tensor([[1.0, 2.0]]))) @ torch.ones(1)
        tensor([1., 2.])
    """

    def __init__(self, operator: LinearOperator) -> None:
        self._operator = operator
        *batch, m, n = operator.shape
        super().__init__(
            (*batch, n, m),
            operator.dtype,
            operator.device,
            symmetric=operator.is_symmetric,
            positive_semidefinite=operator.is_positive_semidefinite,
            matrix_free=operator.is_matrix_free,
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._operator._rmatmat(X)

    def _matvec(self, x: Tensor) -> Tensor:
        return self._operator._rmatvec(x)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._operator._matmat(Y)

    def _rmatvec(self, y: Tensor) -> Tensor:
        return self._operator._matvec(y)

    def _to_dense(self) -> Tensor:
        return self._operator._to_dense().mH

    def _diagonal(self) -> Tensor:
        return self._operator._diagonal().conj()

    def _adjoint(self) -> LinearOperator:
        return self._operator
