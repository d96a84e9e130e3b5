"""The operator that multiplies each coordinate by its own number."""

from typing import final

from torch import Tensor

from . import _checks
from ._factor import refuse_zero
from ._operator import LinearOperator


@final
class Diagonal(LinearOperator):
    """A diagonal matrix, stored as its diagonal. Everything costs O(n).

    Args:
        diag: (*batch, n), real or complex.
        positive_semidefinite: Declared: no entry is negative.

    Raises:
        TypeError: If the diagonal is no real or complex tensor.
        ValueError: If it has no axis.

    Example:
        >>> import torch
        >>> from moduli.linalg import Diagonal
        >>> D = Diagonal(torch.tensor([1.0, 4.0]))
        >>> D @ torch.ones(2), D.solve(torch.ones(2)), D.solve_plus_diag(torch.ones(2), 1.0)
        (tensor([1., 4.]), tensor([1.0000, 0.2500]), tensor([0.5000, 0.2000]))
    """

    def __init__(self, diag: Tensor, *, positive_semidefinite: bool = False) -> None:
        self._diag = _checks.check_floating(diag, "diag", 1)
        n = diag.shape[-1]
        super().__init__(
            (*diag.shape, n),
            diag.dtype,
            diag.device,
            symmetric=not diag.dtype.is_complex,
            positive_semidefinite=positive_semidefinite,
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._diag.unsqueeze(-1) * X

    def _matvec(self, x: Tensor) -> Tensor:
        return self._diag * x

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._diag.conj().unsqueeze(-1) * Y

    def _solve(self, B: Tensor) -> Tensor:
        refuse_zero(self._diag, self, "entries")
        return B / self._diag.unsqueeze(-1)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        shifted = self._diag + d
        refuse_zero(shifted, f"{self} plus the diagonal", "entries")
        return B / shifted.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        return self._diag

    def _to_dense(self) -> Tensor:
        return self._diag.diag_embed()

    def _adjoint(self) -> LinearOperator:
        return Diagonal(self._diag.conj())

    def _transpose(self) -> LinearOperator:
        return self

    def _scale(self, factor: Tensor) -> LinearOperator:
        positive = self.is_positive_semidefinite and not factor.dtype.is_complex and bool((factor >= 0).all())
        return Diagonal(factor.unsqueeze(-1) * self._diag, positive_semidefinite=positive)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        from ._identity import ScaledIdentity

        if not isinstance(other, Diagonal | ScaledIdentity):
            return None
        positive = self.is_positive_semidefinite and other.is_positive_semidefinite
        return Diagonal(self._diag + other.diagonal(), positive_semidefinite=positive)
