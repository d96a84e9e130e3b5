"""Adam's relatives."""

from __future__ import annotations

from typing import Any

from .. import m
from ..optim import Module
from ._descent import Decays, _decay


def adopt(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.9999,
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """ADOPT, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: The smallest denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adopt())
        Chain(ADOPT, LR)
    """
    return [m.ADOPT(beta1=beta1, beta2=beta2, eps=eps), *_decay(weight_decay, decay), m.LR(lr)]


def ademamix(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    beta3: float = 0.9999,
    alpha: Any = 5.0,
    warmup: int | None = None,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """AdEMAMix, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the fast mean.
        beta2: Decay rate of the running mean square.
        beta3: Decay rate of the slow mean.
        alpha: The weight of the slow mean in the step.
        warmup: Steps over which `alpha` and `beta3` rise, usually all steps; None for constant values.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.ademamix())
        Chain(AdEMAMix, LR)
    """
    return [
        m.AdEMAMix(beta1=beta1, beta2=beta2, beta3=beta3, alpha=alpha, warmup=warmup),
        *_decay(weight_decay, decay),
        m.LR(lr),
    ]


def nadam(
    lr: Any = 2e-3,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    momentum_decay: float = 4e-3,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """NAdam, the same as `torch.optim.NAdam`.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        momentum_decay: The rate at which the momentum rises.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.nadam())
        Chain(NAdam, LR)
    """
    return [
        *_decay(weight_decay, decay),
        m.NAdam(beta1=beta1, beta2=beta2, eps=eps, momentum_decay=momentum_decay),
        m.LR(lr),
    ]


def radam(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """RAdam, the same as `torch.optim.RAdam`.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.radam())
        Chain(RAdam, LR)
    """
    return [*_decay(weight_decay, decay), m.RAdam(beta1=beta1, beta2=beta2, eps=eps), m.LR(lr)]


def adadelta(
    lr: Any = 1.0, *, rho: Any = 0.9, eps: Any = 1e-6, weight_decay: Any = 0.0, decay: Decays = "all"
) -> list[Module]:
    """Adadelta, the same as `torch.optim.Adadelta`.

    Args:
        lr: A factor of the steps.
        rho: Decay rate of the running mean squares.
        eps: Added to the mean squares.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adadelta())
        Chain(Adadelta, LR)
    """
    return [*_decay(weight_decay, decay), m.Adadelta(rho=rho, eps=eps), m.LR(lr)]


def adamax(
    lr: Any = 2e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Adamax, the same as `torch.optim.Adamax`.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay of the largest magnitude.
        eps: Added to the magnitude.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adamax())
        Chain(Adamax, LR)
    """
    return [*_decay(weight_decay, decay), m.Adamax(beta1=beta1, beta2=beta2, eps=eps), m.LR(lr)]


def adabelief(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-16,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """AdaBelief, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the variance.
        eps: Added to the variance and to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adabelief())
        Chain(AdaBelief, LR)
    """
    return [m.AdaBelief(beta1=beta1, beta2=beta2, eps=eps), *_decay(weight_decay, decay), m.LR(lr)]


def laprop(
    lr: Any = 4e-4,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-15,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """LaProp: gradients are scaled first and averaged then, so that any two decay rates can be combined.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean of scaled gradients.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.laprop())
        Chain(RMSprop, EMA, LR)
    """
    return [
        m.RMSprop(smoothing=beta2, eps=eps, debias=True),
        m.EMA(beta1, debias=True),
        *_decay(weight_decay, decay),
        m.LR(lr),
    ]


def adam_mini(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Adam-mini, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square of each block.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adam_mini())
        Chain(AdamMini, LR)
    """
    return [m.AdamMini(beta1=beta1, beta2=beta2, eps=eps), *_decay(weight_decay, decay), m.LR(lr)]
