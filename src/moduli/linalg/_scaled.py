"""A multiple of an operator."""

from typing import final

from torch import Tensor

from . import _checks
from ._errors import SingularError
from ._operator import LinearOperator


@final
class Scaled(LinearOperator):
    """c A, made by `c * A`, `A / c` and `-A`.

    Args:
        operator: A, of any kind.
        factor: c: a number, or a tensor with one number per member.

    Example:
        >>> import torch
        >>> from moduli.linalg import AtA, Scaled
        >>> G = Scaled(AtA(torch.tensor([[1.0, 2.0]])), 0.5)
        >>> G @ torch.ones(2), G.diagonal()
        (tensor([1.5000, 3.0000]), tensor([0.5000, 2.0000]))
    """

    def __init__(self, operator: LinearOperator, factor: float | complex | Tensor) -> None:
        self._operator = operator
        self._by = by = _checks.factor(operator, factor)
        real = not by.dtype.is_complex or bool((by.imag == 0).all())
        super().__init__(
            tuple(operator.shape),
            operator.dtype,
            operator.device,
            symmetric=operator.is_symmetric and real,
            positive_semidefinite=operator.is_positive_semidefinite and real and bool((by.real >= 0).all()),
            matrix_free=operator.is_matrix_free,
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._by[..., None, None] * self._operator._matmat(X)

    def _matvec(self, x: Tensor) -> Tensor:
        return self._by.unsqueeze(-1) * self._operator._matvec(x)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._by.conj()[..., None, None] * self._operator._rmatmat(Y)

    def _solve(self, B: Tensor) -> Tensor:
        self._refuse_zero()
        return self._operator._solve(B) / self._by[..., None, None]

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        # (c A + D) x = b is (A + D / c) x = b / c, unless the factor has taken the operator away.
        if bool((self._by == 0).any()):
            return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
        by = self._by.unsqueeze(-1)
        return self._operator._solve_plus_diag(B / by.unsqueeze(-1), d / by)

    def _diagonal(self) -> Tensor:
        return self._by.unsqueeze(-1) * self._operator._diagonal()

    def _trace(self) -> Tensor:
        return self._by * self._operator._trace()

    def _to_dense(self) -> Tensor:
        return self._by[..., None, None] * self._operator._to_dense()

    def _adjoint(self) -> LinearOperator:
        return Scaled(self._operator.adjoint(), self._by.conj())

    def _transpose(self) -> LinearOperator:
        return Scaled(self._operator.transpose(), self._by)

    def _scale(self, factor: Tensor) -> LinearOperator:
        return Scaled(self._operator, factor * self._by)

    def _refuse_zero(self) -> None:
        if self.shape[-1] and bool((self._by == 0).any()):
            raise SingularError(f"{self} is singular: its factor is zero; solve_plus_diag adds a shift")
