"""The operator that multiplies every coordinate by the same number."""

from typing import final

import torch
from torch import Tensor

from ._factor import refuse_zero
from ._operator import LinearOperator


@final
class ScaledIdentity(LinearOperator):
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
        self._value = value
        real = not value.dtype.is_complex
        super().__init__(
            (*value.shape, n, n),
            value.dtype,
            value.device,
            symmetric=real,
            positive_semidefinite=real and bool((value >= 0).all()),
        )

    def _matmat(self, X: Tensor) -> Tensor:
        return self._value[..., None, None] * X

    def _matvec(self, x: Tensor) -> Tensor:
        return self._value.unsqueeze(-1) * x

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._value.conj()[..., None, None] * Y

    def _solve(self, B: Tensor) -> Tensor:
        if self.shape[-1]:
            refuse_zero(self._value, self, "scales")
        return B / self._value[..., None, None]

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        shifted = self._value.unsqueeze(-1) + d
        if self.shape[-1]:
            refuse_zero(shifted, f"{self} plus the diagonal", "entries")
        return B / shifted.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        return self._value.unsqueeze(-1).expand(self.shape[:-1])

    def _trace(self) -> Tensor:
        return self._value * self.shape[-1]

    def _to_dense(self) -> Tensor:
        return self._diagonal().diag_embed()

    def _adjoint(self) -> LinearOperator:
        return ScaledIdentity(self.shape[-1], self._value.conj())

    def _transpose(self) -> LinearOperator:
        return self

    def _scale(self, factor: Tensor) -> LinearOperator:
        return ScaledIdentity(self.shape[-1], factor * self._value)

    def _plus(self, other: LinearOperator) -> LinearOperator | None:
        return ScaledIdentity(self.shape[-1], self._value + other._value) if isinstance(other, ScaledIdentity) else None
