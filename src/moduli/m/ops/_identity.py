"""The link that does nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...linalg import LinearOperator, ScaledIdentity
from ...optim import Objective
from .._flat import size
from .._transforms import UpdateTransform


class Identity(UpdateTransform):
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

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The identity over all parameters concatenated."""
        return make_scaled_identity(objective, 1.0)


def make_scaled_identity(objective: Objective, alpha: float) -> LinearOperator:
    """The Hessian for which the Newton step is this step size."""
    first = objective.params[0]
    dtype = first.dtype.to_real() if first.is_complex() else first.dtype
    return ScaledIdentity(size(objective.params), 1 / alpha, dtype=dtype, device=first.device)


Noop = Identity
"""Another name of `Identity`."""
