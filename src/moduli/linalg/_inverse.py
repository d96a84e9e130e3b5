"""The inverse of an operator, as an operator."""

from typing import final

from torch import Tensor

from ._operator import LinearOperator


@final
class Inverse(LinearOperator):
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
        self._operator = operator
        super().__init__(
            tuple(operator.shape),
            operator.dtype,
            operator.device,
            symmetric=operator.is_symmetric,
            positive_semidefinite=operator.is_positive_semidefinite,
            matrix_free=operator.is_matrix_free,
        )

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
