"""The transpose, without conjugation, of a complex operator."""

from typing import final

from torch import Tensor

from ._operator import LinearOperator


@final
class Transpose(LinearOperator):
    """Aᵀ x = conj(Aᴴ conj(x)). Made by `A.T` where A is complex; for a real A the adjoint is the transpose.

    Args:
        operator: A, of any kind.

    Example:
        >>> import torch
        >>> from moduli.linalg import FunctionOperator
        >>> A = FunctionOperator(lambda x: 1j * x, 2, rmatvec=lambda y: -1j * y, dtype=torch.complex64)
        >>> (A.T @ torch.ones(2, dtype=torch.complex64)).imag
        tensor([1., 1.])
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
        return self._operator._rmatmat(X.conj()).conj()

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._operator._matmat(Y.conj()).conj()

    def _to_dense(self) -> Tensor:
        return self._operator._to_dense().mT

    def _diagonal(self) -> Tensor:
        return self._operator._diagonal()

    def _transpose(self) -> LinearOperator:
        return self._operator
