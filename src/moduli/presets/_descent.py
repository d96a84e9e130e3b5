"""Descent and its momenta."""

from __future__ import annotations

from typing import Any

from ..m import LR, NAG, HeavyBall, WeightDecay
from ..optim import Module
from ..optim.schedules import After


def _decay(weight_decay: Any, after: int = 0) -> list[Module]:
    """Weight decay, if any, after some steps without."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return []
    return [WeightDecay(After(after, weight_decay) if after else weight_decay)]


def sgd(lr: Any = 1e-2, *, weight_decay: Any = 0.0) -> list[Module]:
    """Gradient descent.

    Args:
        lr: The step size.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import presets
        >>> presets.sgd(0.1)
        [LR(lr=0.1)]
    """
    return [*_decay(weight_decay), LR(lr)]


def momentum(lr: Any = 1e-2, *, momentum: Any = 0.9, dampening: Any = 0.0, weight_decay: Any = 0.0) -> list[Module]:
    """Descent with Polyak's momentum, the same as `torch.optim.SGD(momentum=...)`.

    Args:
        lr: The step size.
        momentum: How much of the last step is kept.
        dampening: The part of each gradient that is left out.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.momentum(0.1))
        Chain(HeavyBall, LR)
    """
    return [*_decay(weight_decay), HeavyBall(momentum, dampening=dampening), LR(lr)]


def nesterov(lr: Any = 1e-2, *, momentum: Any = 0.9, weight_decay: Any = 0.0) -> list[Module]:
    """Descent with Nesterov's momentum, the same as `torch.optim.SGD(nesterov=True)`.

    Args:
        lr: The step size.
        momentum: How much of the last step is kept.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.nesterov(0.1))
        Chain(NAG, LR)
    """
    return [*_decay(weight_decay), NAG(momentum), LR(lr)]
