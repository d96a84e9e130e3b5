"""Diagonal matrices, and multiples of the identity."""

from typing import ClassVar, final

import torch
from torch import Tensor

from . import _checks
from ._factor import refuse_zero
from ._operator import LinearOperator


class DiagonalKind(LinearOperator):
    """A diagonal matrix: `_entries` are (..., n), or (..., 1) where all of them are equal."""

    _entries: Tensor
    _noun: ClassVar[str] = "entries"

    def _matmat(self, X: Tensor) -> Tensor:
        return self._entries.unsqueeze(-1) * X

    def _matvec(self, x: Tensor) -> Tensor:
        return self._entries * x

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._entries.conj().unsqueeze(-1) * Y

    def _solve(self, B: Tensor) -> Tensor:
        if self.shape[-1]:
            refuse_zero(self._entries, self, self._noun)
        return B / self._entries.unsqueeze(-1)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        shifted = self._entries + d
        if self.shape[-1]:
            refuse_zero(shifted, f"{self} plus the diagonal", "entries")
        return B / shifted.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        return self._entries.expand(self.shape[:-1])

    def _to_dense(self) -> Tensor:
        return self._diagonal().diag_embed()

    def _transpose(self) -> LinearOperator:
        return self


@final
class Diagonal(DiagonalKind):
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
        self._entries = _checks.check_floating(diag, "diag", 1)
        n = diag.shape[-1]
        super().__init__(
            (*diag.shape, n),
            diag.dtype,
            diag.device,
            symmetric=not diag.dtype.is_complex,
            positive_semidefinite=positive_semidefinite,
        )

    def _adjoint(self) -> LinearOperator:
        return Diagonal(self._entries.conj())

    def _scale(self, factor: Tensor) -> LinearOperator:
        positive = self.is_positive_semidefinite and not factor.dtype.is_complex and bool((factor >= 0).all())
        return Diagonal(factor.unsqueeze(-1) * self._entries, positive_semidefinite=positive)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        if not isinstance(other, DiagonalKind):
            return None
        positive = self.is_positive_semidefinite and other.is_positive_semidefinite
        return Diagonal(self._entries + other.diagonal(), positive_semidefinite=positive)


@final
class ScaledIdentity(DiagonalKind):
    """A multiple of the identity: the curvature model of gradient descent with one step size.

    Args:
        n: How many coordinates.
        scale: The multiple: a number, or a tensor with one number per member (its shape is the batch shape).
        dtype: The dtype, if `scale` is a number; torch's default dtype if not given.
        device: The device, if `scale` is a number.

    Raises:
        TypeError: If the scale is no real or complex number or tensor.
        ValueError: If `n` is negative, or a dtype or device is given beside a tensor that has another.

    Example:
        >>> import torch
        >>> from moduli.linalg import ScaledIdentity
        >>> A = ScaledIdentity(3, 2.0)
        >>> A @ torch.ones(3), A.solve_plus_diag(torch.ones(3), 2.0), A.trace()
        (tensor([2., 2., 2.]), tensor([0.2500, 0.2500, 0.2500]), tensor(6.))
    """

    _noun = "scales"

    def __init__(
        self,
        n: int,
        scale: float | complex | Tensor = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n is the number of coordinates, an integer, not {n!r}")
        if n < 0:
            raise ValueError(f"n is the number of coordinates and cannot be {n}")
        if isinstance(scale, Tensor):
            value = scale
            if dtype not in (None, value.dtype) or (device is not None and torch.device(device) != value.device):
                raise ValueError("scale is a tensor, which has its own dtype and device; do not give others beside it")
        else:
            if dtype is None and not isinstance(scale, complex):
                dtype = torch.get_default_dtype()
            value = torch.as_tensor(scale, dtype=dtype, device=device)
        if not (value.dtype.is_floating_point or value.dtype.is_complex):
            raise TypeError(f"scale has dtype {value.dtype}, and linear algebra needs real or complex")
        self._entries = value.unsqueeze(-1)
        real = not value.dtype.is_complex
        super().__init__(
            (*value.shape, n, n),
            value.dtype,
            value.device,
            symmetric=real,
            positive_semidefinite=real and bool((value >= 0).all()),
        )

    def _trace(self) -> Tensor:
        return self._entries[..., 0] * self.shape[-1]

    def _adjoint(self) -> LinearOperator:
        return ScaledIdentity(self.shape[-1], self._entries[..., 0].conj())

    def _scale(self, factor: Tensor) -> LinearOperator:
        return ScaledIdentity(self.shape[-1], factor * self._entries[..., 0])

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        if not isinstance(other, ScaledIdentity):
            return None
        return ScaledIdentity(self.shape[-1], (self._entries + other._entries)[..., 0])
