"""Operators made of one other: its adjoint, transpose, inverse and multiples."""

from typing import final

from torch import Tensor

from . import _checks
from ._errors import SingularError
from ._operator import LinearOperator


class DerivedOperator(LinearOperator):
    """An operator made of one other, of whose properties it has those that are not denied.

    Args:
        operator: The other.
        flipped: Whether rows and columns change places.
        symmetric: Whether symmetry is kept.
        positive_semidefinite: Whether semidefiniteness is kept.
    """

    def __init__(
        self,
        operator: LinearOperator,
        *,
        flipped: bool = False,
        symmetric: bool = True,
        positive_semidefinite: bool = True,
    ) -> None:
        self._operator = operator
        *batch, m, n = operator.shape
        super().__init__(
            (*batch, n, m) if flipped else (*batch, m, n),
            operator.dtype,
            operator.device,
            symmetric=operator.is_symmetric and symmetric,
            positive_semidefinite=operator.is_positive_semidefinite and positive_semidefinite,
            matrix_free=operator.is_matrix_free,
        )


@final
class Adjoint(DerivedOperator):
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
        super().__init__(operator, flipped=True)

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


@final
class Transpose(DerivedOperator):
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
        super().__init__(operator, flipped=True)

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


@final
class Inverse(DerivedOperator):
    """A⁻¹: its products are solutions of A, and its solutions products with A. Made by `A.inverse()`.

    A shift goes through A too. With y = D x, (A⁻¹ + D) x = b becomes (A + D⁻¹) y = A b, so a curvature model that is
    kept by its inverse can still be damped, without ever being inverted.

    Args:
        operator: A, square.

    Raises:
        MissingAbilityError: If A is not square.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense
        >>> H = Dense(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), symmetric=True).inverse()
        >>> H @ torch.ones(2), H.solve(torch.ones(2))
        (tensor([0.5000, 0.2500]), tensor([2., 4.]))
    """

    def __init__(self, operator: LinearOperator) -> None:
        operator._need_square("be inverted")
        super().__init__(operator)

    def _matmat(self, X: Tensor) -> Tensor:
        return self._operator._solve(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._operator.adjoint()._solve(Y)

    def _solve(self, B: Tensor) -> Tensor:
        return self._operator._matmat(B)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        if bool((d == 0).any()):
            # There is no D⁻¹; a shift of zero is no shift, anything between needs the matrix.
            if bool((d == 0).all()):
                return self._operator._matmat(B)
            return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)
        return self._operator._solve_plus_diag(self._operator._matmat(B), 1 / d) / d.unsqueeze(-1)

    def _adjoint(self) -> LinearOperator:
        return Inverse(self._operator.adjoint())

    def _inverse(self) -> LinearOperator:
        return self._operator


@final
class Scaled(DerivedOperator):
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
        self._by = by = _checks.factor(operator, factor)
        real = _checks.is_real(by)
        super().__init__(operator, symmetric=real, positive_semidefinite=real and bool((by.real >= 0).all()))

    def _matmat(self, X: Tensor) -> Tensor:
        return self._by[..., None, None] * self._operator._matmat(X)

    def _matvec(self, x: Tensor) -> Tensor:
        return self._by.unsqueeze(-1) * self._operator._matvec(x)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._by.conj()[..., None, None] * self._operator._rmatmat(Y)

    def _solve(self, B: Tensor) -> Tensor:
        if self.shape[-1] and bool((self._by == 0).any()):
            raise SingularError(f"{self} is singular: its factor is zero; solve_plus_diag adds a shift")
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
