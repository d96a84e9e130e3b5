"""Descent and its momenta, and optimizers without a step size or a schedule to tune."""

from __future__ import annotations

from typing import Any, Literal

from .. import m
from ..optim import Module
from ..optim.schedules import After

Decays = Literal["all", "matrices"]
"""Which parameters decay: all, or without biases and scales of normalisations."""


def _decay(weight_decay: Any, decay: Decays = "all", after: int = 0) -> list[Module]:
    """Return the link for weight decay, which begins after some steps; no link for a decay of 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return []
    return [m.WeightDecay(After(after, weight_decay) if after else weight_decay, only=decay)]


def sgd(lr: Any = 1e-2, *, weight_decay: Any = 0.0, decay: Decays = "all") -> list[Module]:
    """Gradient descent.

    Args:
        lr: The step size.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import presets
        >>> presets.sgd(0.1)
        [LR(lr=0.1)]
    """
    return [*_decay(weight_decay, decay), m.LR(lr)]


def momentum(
    lr: Any = 1e-2, *, momentum: Any = 0.9, dampening: Any = 0.0, weight_decay: Any = 0.0, decay: Decays = "all"
) -> list[Module]:
    """Descent with Polyak's momentum, the same as `torch.optim.SGD(momentum=...)`.

    Args:
        lr: The step size.
        momentum: The factor of the last step in the next one.
        dampening: The part of each gradient that is left out.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.momentum(0.1))
        Chain(HeavyBall, LR)
    """
    return [*_decay(weight_decay, decay), m.HeavyBall(momentum, dampening=dampening), m.LR(lr)]


def nesterov(lr: Any = 1e-2, *, momentum: Any = 0.9, weight_decay: Any = 0.0, decay: Decays = "all") -> list[Module]:
    """Descent with Nesterov's momentum, the same as `torch.optim.SGD(nesterov=True)`.

    Args:
        lr: The step size.
        momentum: The factor of the last step in the next one.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.nesterov(0.1))
        Chain(NAG, LR)
    """
    return [*_decay(weight_decay, decay), m.NAG(momentum), m.LR(lr)]


def schedule_free(
    lr: Any = 2.5e-3,
    *,
    momentum: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    warmup: int = 0,
) -> list[Module]:
    """Schedule-free AdamW: averaging in place of momentum and of a schedule.

    The result of training is the average: `with opt.modules[-1].averaged(net.parameters()): ...` to evaluate or save.

    Args:
        lr: The step size.
        momentum: The gradient is evaluated at `momentum` times the average plus `1 - momentum` times the steps' point.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        warmup: Steps over which the step size rises; the average weighs them by the square of it.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.schedule_free())
        Chain(Adam, LR, ScheduleFree)

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024.
    """
    links = [m.Adam(beta1=0.0, beta2=beta2, eps=eps), *_decay(weight_decay, decay), m.LR(lr)]
    return [*links, m.ScheduleFree(momentum, warmup=warmup)]


def schedule_free_sgd(
    lr: Any = 1.0, *, momentum: Any = 0.9, weight_decay: Any = 0.0, decay: Decays = "all", warmup: int = 0
) -> list[Module]:
    """Schedule-free descent: averaging in place of momentum and of a schedule.

    The result of training is the average: `with opt.modules[-1].averaged(net.parameters()): ...` to evaluate or save.

    Args:
        lr: The step size; ten to fifty times that of descent with a schedule.
        momentum: The gradient is evaluated at `momentum` times the average plus `1 - momentum` times the steps' point.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        warmup: Steps over which the step size rises; the average weighs them by the square of it.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.schedule_free_sgd())
        Chain(LR, ScheduleFree)

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024.
    """
    return [*_decay(weight_decay, decay), m.LR(lr), m.ScheduleFree(momentum, warmup=warmup)]


def prodigy(
    lr: Any = 1.0,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    d0: float = 1e-6,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Prodigy: Adam that estimates its step size.

    Args:
        lr: A factor of the estimate; 1, or a schedule that ends at 0.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        d0: The first estimate.
        weight_decay: The fraction of the weights that each step subtracts, times `lr` and the estimate (decoupled).
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.prodigy())
        Chain(Prodigy, LR)
    """
    return [m.Prodigy(beta1=beta1, beta2=beta2, d0=d0, weight_decay=weight_decay, only=decay), m.LR(lr)]


def dadapt(
    lr: Any = 1.0,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    d0: float = 1e-6,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """D-Adaptation for Adam: a step size from a lower bound of the distance to the solution.

    Args:
        lr: A factor of the steps that is part of the estimate; 1, or a schedule that ends at 0. What a scheduler of torch
            changes is a second factor, which the estimate does not include.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        d0: The first bound.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.dadapt())
        Chain(DAdaptAdam, LR)
    """
    return [*_decay(weight_decay, decay), m.DAdaptAdam(beta1=beta1, beta2=beta2, d0=d0, gamma=lr), m.LR(1.0)]
