"""Updates whose entries never exceed a limit, and which stay smooth: the softsign function."""

from dataclasses import field
from typing import Any

from torch import Tensor

from moduli import m, optim
from moduli.optim import ranges as check


class SoftSign(optim.UpdateTransform):
    """Bound each entry of the update smoothly: u -> limit u / (limit + |u|).

    Args:
        limit: The bound, positive.

    Example:
        >>> import torch
        >>> import moduli as mo
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = mo.Optimizer([w], SoftSign(1.0), mo.m.LR(1.0))
        >>> w.grad = torch.tensor([1.0])
        >>> opt.step()
        >>> w.data
        tensor([2.5000])
    """

    elementwise = True
    ranges = {check.positive: ("limit",)}

    limit: Any = field(default=1.0, kw_only=False)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        """Return the bounded update."""
        return tensor * setting["limit"] / (tensor.abs() + setting["limit"])


def soft_descent(lr: float = 0.01, limit: float = 1.0) -> optim.Chain:
    """Descend along bounded gradients with momentum: a whole chain by one name, as presets are."""
    return optim.Chain(SoftSign(limit), m.HeavyBall(0.9), m.LR(lr))
