"""The link that does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...linalg import ScaledIdentity
from ...optim import TensorTransform

if TYPE_CHECKING:
    from ...linalg import LinearOperator
    from ...optim import Objective


class Identity(TensorTransform):
    """Passes the update on. Its model of the Hessian is the identity, so that a trust region works on it as on descent.

    Args:
        *args: Anything; ignored, so that it can stand in for any link.
        **kwargs: Anything; ignored.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Identity(), [torch.tensor([3.0, 0.0])])
        [tensor([3., 0.])]
    """

    elementwise = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The identity over all parameters concatenated."""
        count = sum(p.numel() * (2 if p.is_complex() else 1) for p in objective.params)
        first = objective.params[0]
        dtype = first.dtype.to_real() if first.is_complex() else first.dtype
        return ScaledIdentity(count, dtype=dtype, device=first.device)


Noop = Identity
"""Another name of `Identity`."""
