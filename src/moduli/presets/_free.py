"""Optimizers without a step size or a schedule to tune."""

from __future__ import annotations

from typing import Any

from ..m import LR, Adam, DAdaptAdam, Prodigy, ScheduleFree
from ..optim import Module
from ._descent import _decay


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
        warmup: Steps over which the step size rises; the average weighs them by the square of it.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.schedule_free())
        Chain(Adam, LR, ScheduleFree)

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024.
    """
    links = [Adam(beta1=0.0, beta2=beta2, eps=eps), *_decay(weight_decay), LR(lr)]
    return [*links, ScheduleFree(momentum, warmup=warmup)]


def schedule_free_sgd(lr: Any = 1.0, *, momentum: Any = 0.9, weight_decay: Any = 0.0, warmup: int = 0) -> list[Module]:
    """Schedule-free descent: averaging in place of momentum and of a schedule.

    The result of training is the average: `with opt.modules[-1].averaged(net.parameters()): ...` to evaluate or save.

    Args:
        lr: The step size; ten to fifty times that of descent with a schedule.
        momentum: Where between the steps and their average the gradient is taken.
        weight_decay: An L2 penalty.
        warmup: Steps over which the step size rises; the average weighs them by the square of it.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.schedule_free_sgd())
        Chain(LR, ScheduleFree)

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024.
    """
    return [*_decay(weight_decay), LR(lr), ScheduleFree(momentum, warmup=warmup)]


def prodigy(
    lr: Any = 1.0, *, beta1: float = 0.9, beta2: float = 0.999, d0: float = 1e-6, weight_decay: Any = 0.0
) -> list[Module]:
    """Prodigy: Adam that estimates its step size.

    Args:
        lr: A factor of the estimate; 1, or a schedule that ends at 0.
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        d0: The first estimate.
        weight_decay: How much of the weights each step takes away, times `lr` and the estimate (decoupled).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.prodigy())
        Chain(Prodigy, LR)
    """
    return [Prodigy(beta1=beta1, beta2=beta2, d0=d0, weight_decay=weight_decay), LR(lr)]


def dadapt(
    lr: Any = 1.0, *, beta1: float = 0.9, beta2: float = 0.999, d0: float = 1e-6, weight_decay: Any = 0.0
) -> list[Module]:
    """D-Adaptation for Adam: a step size from a lower bound of the distance to the solution.

    Args:
        lr: A factor of the steps that is part of the estimate; 1, or a schedule that ends at 0. What a scheduler of torch
            changes is a second factor, of which the estimate does not know.
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        d0: The first bound.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.dadapt())
        Chain(DAdaptAdam, LR)
    """
    return [*_decay(weight_decay), DAdaptAdam(beta1=beta1, beta2=beta2, d0=d0, gamma=lr), LR(1.0)]
