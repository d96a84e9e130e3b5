"""Optimizers without a step size or a schedule to tune."""

from __future__ import annotations

from typing import Any

from ..m import LR, Adam, DAdaptAdam, Prodigy, ScheduleFree, Warmup
from ..optim import Module
from ._descent import _decay

__all__ = ["dadapt", "prodigy", "schedule_free"]


def schedule_free(
    lr: Any = 2.5e-3,
    *,
    momentum: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    warmup: int = 0,
) -> list[Module]:
    """Schedule-free AdamW: averaging in place of momentum and of a schedule.

    The result of training is the average: `with opt.modules[-1].averaged(net.parameters()): ...` to evaluate or save.

    Args:
        lr: The step size.
        momentum: Where between the steps and their average the gradient is taken.
        beta2: Memory of the mean square.
        eps: Added to the denominator.
        weight_decay: How much of the weights each step takes away, times `lr`.
        warmup: Steps over which the step size rises.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.schedule_free())
        Chain(Adam, LR, ScheduleFree)

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024.
    """
    rise = [Warmup(warmup, start_lr=1 / (warmup + 1))] if warmup else []
    return [Adam(beta1=0.0, beta2=beta2, eps=eps), *_decay(weight_decay), *rise, LR(lr), ScheduleFree(momentum)]


def prodigy(
    lr: Any = 1.0, *, beta1: float = 0.9, beta2: float = 0.999, d0: float = 1e-6, weight_decay: Any = 0.0
) -> list[Module]:
    """Prodigy: Adam that estimates its step size.

    Args:
        lr: A factor of the estimate; 1, or a schedule that ends at 0.
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        d0: The first estimate.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.prodigy())
        Chain(Prodigy, LR)
    """
    return [*_decay(weight_decay), Prodigy(beta1=beta1, beta2=beta2, d0=d0), LR(lr)]


def dadapt(
    lr: Any = 1.0, *, beta1: float = 0.9, beta2: float = 0.999, d0: float = 1e-6, weight_decay: Any = 0.0
) -> list[Module]:
    """D-Adaptation for Adam: a step size from a lower bound of the distance to the solution.

    Args:
        lr: A factor of the estimate; 1, or a schedule that ends at 0.
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        d0: The first bound.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.dadapt())
        Chain(DAdaptAdam, LR)
    """
    return [*_decay(weight_decay), DAdaptAdam(beta1=beta1, beta2=beta2, d0=d0), LR(lr)]
