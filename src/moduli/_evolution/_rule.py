"""How a gradient estimate moves the mean when no other link does: plain descent with momentum, or Adam."""

import math

from torch import Tensor

__all__ = ["adam", "descent"]


def descent(mean: Tensor, gradient: Tensor, velocity: Tensor | None, lr: float, momentum: float) -> Tensor | None:
    """V ← momentum v + g, mean ← mean - lr v, in place; returns v (None without momentum)."""
    if momentum:
        velocity = gradient.clone() if velocity is None else velocity.mul_(momentum).add_(gradient)
        mean.sub_(velocity, alpha=lr)
        return velocity
    mean.sub_(gradient, alpha=lr)
    return None


def adam(
    mean: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of Adam in place (Kingma and Ba 2015, algorithm 1); `step` counts from one."""
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    # Both corrections for the start at zero in two numbers instead of two passes.
    late = math.sqrt(1 - betas[1] ** step)
    mean.addcdiv_(first, second.sqrt().add_(eps * late), value=-lr * late / (1 - betas[0] ** step))
