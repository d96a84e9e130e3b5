"""The product of operators."""

from itertools import pairwise
from typing import final

from torch import Tensor

from ._operator import LinearOperator
from ._sum import check_alike


@final
class OperatorProduct(LinearOperator):
    """A B ..., made by `A @ B`: the last factor acts first.

    A product of square factors is solved factor by factor. One of rectangular factors that is square as a whole is
    solved through its matrix, unless a factor is matrix-free.

    Args:
        factors: One or more operators, each with as many columns as the next has rows.
        symmetric: Declared: the product equals its adjoint.
        positive_semidefinite: Declared: the product is symmetric and has no negative eigenvalue.

    Raises:
        TypeError: If the factors differ in dtype, or are no operators.
        ValueError: If there are none, or rows and columns do not meet.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense, Diagonal, OperatorProduct
        >>> A = OperatorProduct(Dense(torch.tensor([[1.0, 1.0]])), Diagonal(torch.tensor([2.0, 3.0])))
        >>> A @ torch.ones(2), A.H @ torch.ones(1)
        (tensor([5.]), tensor([2., 3.]))
    """

    def __init__(self, *factors: LinearOperator, symmetric: bool = False, positive_semidefinite: bool = False) -> None:
        shape = check_alike("OperatorProduct", factors)
        for left, right in pairwise(factors):
            if left.shape[-1] != right.shape[-2]:
                raise ValueError(f"{left} @ {right}: the first takes {left.shape[-1]} numbers, the second gives others")
        self._factors: tuple[LinearOperator, ...] = tuple(
            g for f in factors for g in (f._factors if isinstance(f, OperatorProduct) else (f,))
        )
        super().__init__(
            (*shape[:-1], factors[-1].shape[-1]),
            factors[0].dtype,
            factors[0].device,
            symmetric=symmetric,
            positive_semidefinite=positive_semidefinite,
            matrix_free=any(factor.is_matrix_free for factor in factors),
        )

    def _matmat(self, X: Tensor) -> Tensor:
        for factor in reversed(self._factors):
            X = factor._matmat(X)
        return X

    def _matvec(self, x: Tensor) -> Tensor:
        for factor in reversed(self._factors):
            x = factor._matvec(x)
        return x

    def _rmatmat(self, Y: Tensor) -> Tensor:
        for factor in self._factors:
            Y = factor._rmatmat(Y)
        return Y

    def _solve(self, B: Tensor) -> Tensor:
        if any(factor.shape[-1] != factor.shape[-2] for factor in self._factors):
            return self._dense_for("solve")._solve(B)
        for factor in self._factors:
            B = factor._solve(B)
        return B

    def _to_dense(self) -> Tensor:
        return self._factors[0]._matmat(self._tail()) if len(self._factors) > 1 else self._factors[0]._to_dense()

    def _tail(self) -> Tensor:
        tail = self._factors[-1]._to_dense()
        for factor in reversed(self._factors[1:-1]):
            tail = factor._matmat(tail)
        return tail

    def _adjoint(self) -> LinearOperator:
        return OperatorProduct(*(factor.adjoint() for factor in reversed(self._factors)))

    def _transpose(self) -> LinearOperator:
        return OperatorProduct(*(factor.transpose() for factor in reversed(self._factors)))
