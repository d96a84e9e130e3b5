"""Adaptive optimizers, pointwise or with a step size for each layer."""

from __future__ import annotations

from typing import Any

from .. import m
from ..optim import Module
from ._descent import Decays, _decay


def adam(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    amsgrad: bool = False,
) -> list[Module]:
    """Adam, the same as `torch.optim.Adam`.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: An L2 penalty (see `adamw` for the decoupled one).
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        amsgrad: Use the largest second moment so far.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adam(1e-3))
        Chain(Adam, LR)
    """
    return [*_decay(weight_decay, decay), m.Adam(beta1=beta1, beta2=beta2, eps=eps, amsgrad=amsgrad), m.LR(lr)]


def adamw(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.01,
    amsgrad: bool = False,
    decay: Decays = "all",
) -> list[Module]:
    """Adam with decoupled weight decay, the same as `torch.optim.AdamW`.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        amsgrad: Use the largest second moment so far.
        decay: Which parameters decay: "all", or "matrices", without biases and scales of normalisations (see `m.WeightDecay`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adamw(1e-3, weight_decay=0.1))
        Chain(Adam, WeightDecay, LR)
    """
    adam = m.Adam(beta1=beta1, beta2=beta2, eps=eps, amsgrad=amsgrad)
    return [adam, m.WeightDecay(weight_decay, only=decay), m.LR(lr)]


def lion(
    lr: Any = 1e-4, *, beta1: Any = 0.9, beta2: Any = 0.99, weight_decay: Any = 0.0, decay: Decays = "all"
) -> list[Module]:
    """Lion, with decoupled weight decay.

    Args:
        lr: The step size; three to ten times smaller than Adam's.
        beta1: The weight of the running mean in the step.
        beta2: Decay rate of the running mean.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.lion(1e-4, weight_decay=0.1))
        Chain(Lion, WeightDecay, LR)
    """
    return [m.Lion(beta1=beta1, beta2=beta2), *_decay(weight_decay, decay), m.LR(lr)]


def rmsprop(
    lr: Any = 1e-2,
    *,
    smoothing: Any = 0.99,
    eps: Any = 1e-8,
    centered: bool = False,
    momentum: Any = 0.0,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """RMSprop, the same as `torch.optim.RMSprop`.

    Args:
        lr: The step size.
        smoothing: Decay rate of the running mean square.
        eps: Added to the denominator.
        centered: Divide by a standard deviation.
        momentum: Momentum of the scaled steps.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.rmsprop(1e-2, momentum=0.9))
        Chain(RMSprop, HeavyBall, LR)
    """
    still = isinstance(momentum, int | float) and momentum == 0
    ball = [] if still else [m.HeavyBall(momentum)]
    return [*_decay(weight_decay, decay), m.RMSprop(smoothing=smoothing, eps=eps, centered=centered), *ball, m.LR(lr)]


def adagrad(
    lr: Any = 1e-2,
    *,
    lr_decay: Any = 0.0,
    initial_accumulator_value: Any = 0.0,
    eps: Any = 1e-10,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Adagrad, the same as `torch.optim.Adagrad`.

    Args:
        lr: The step size.
        lr_decay: Decay of the step size.
        initial_accumulator_value: The sum of squares at the start.
        eps: Added to the denominator.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adagrad(1e-2))
        Chain(Adagrad, LR)
    """
    link = m.Adagrad(lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value, eps=eps)
    return [*_decay(weight_decay, decay), link, m.LR(lr)]


def adan(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.98,
    beta2: Any = 0.92,
    beta3: Any = 0.99,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Adan, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean of differences.
        beta3: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adan(1e-3))
        Chain(Adan, LR)
    """
    return [m.Adan(beta1=beta1, beta2=beta2, beta3=beta3, eps=eps), *_decay(weight_decay, decay), m.LR(lr)]


def rprop(lr: Any = 1e-2, *, nplus: Any = 1.2, nminus: Any = 0.5, lb: Any = 1e-6, ub: Any = 50.0) -> list[Module]:
    """Rprop for full batches, the same as `torch.optim.Rprop`.

    Args:
        lr: The first step of each weight.
        nplus: The growth of a step while the sign repeats.
        nminus: The shrinkage when it flips.
        lb: The smallest step.
        ub: The largest step.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.rprop())
        Chain(Rprop)
    """
    return [m.Rprop(alpha=lr, nplus=nplus, nminus=nminus, lb=lb, ub=ub, backtrack=False)]


def mars(
    lr: Any = 3e-3,
    *,
    beta1: float = 0.95,
    beta2: float = 0.99,
    scaling: float = 0.025,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """MARS-AdamW: Adam on gradients corrected by their change.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        scaling: The factor of the correction.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.mars())
        Chain(MARSCorrection, Adam, LR)
    """
    links = [m.MARSCorrection(beta=beta1, scaling=scaling), m.Adam(beta1=beta1, beta2=beta2, eps=eps)]
    return [*links, *_decay(weight_decay, decay), m.LR(lr)]


def sam(
    lr: Any = 1e-2, *, rho: Any = 0.05, momentum: Any = 0.9, weight_decay: Any = 0.0, decay: Decays = "all"
) -> list[Module]:
    """Sharpness-aware descent with momentum. A step needs a closure.

    Args:
        lr: The step size.
        rho: The radius within which the worst point is looked for.
        momentum: The factor of the last step in the next one.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.sam())
        Chain(SAM, HeavyBall, LR)
    """
    return [m.SAM(rho=rho), *_decay(weight_decay, decay), m.HeavyBall(momentum), m.LR(lr)]


def lamb(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """LAMB: Adam with decoupled weight decay, each layer's step a fraction of the layer's norm.

    Args:
        lr: The norm of each layer's step as a fraction of the layer's norm.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: The factor of the weights that is added to each update.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.lamb(weight_decay=0.01))
        Chain(Adam, WeightDecay, TrustRatio, LR)

    References:
        Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, Algorithm 2.
    """
    return [m.Adam(beta1=beta1, beta2=beta2, eps=eps), *_decay(weight_decay, decay), m.TrustRatio(), m.LR(lr)]


def lars(
    lr: Any = 1.0,
    *,
    momentum: Any = 0.9,
    trust: Any = 1e-3,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    eps: Any = 1e-8,
) -> list[Module]:
    """LARS: momentum of gradients that are a fraction of each layer's norm.

    Args:
        lr: The step size.
        momentum: The factor of the last step in the next one.
        trust: The norm of each layer's update as a fraction of the layer's norm.
        weight_decay: An L2 penalty, included in the ratio of norms.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        eps: Added to the norm of the gradient.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.lars())
        Chain(TrustRatio, HeavyBall, LR)

    References:
        Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017, Algorithm 1.
    """
    return [m.TrustRatio(trust=trust, weight_decay=weight_decay, only=decay, eps=eps), m.HeavyBall(momentum), m.LR(lr)]
