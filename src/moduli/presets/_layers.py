"""Step sizes for each layer: large batches."""

from __future__ import annotations

from typing import Any

from ..m import LR, Adam, HeavyBall, TrustRatio
from ..optim import Module
from ._descent import _decay


def lamb(
    lr: Any = 1e-3, *, beta1: Any = 0.9, beta2: Any = 0.999, eps: Any = 1e-6, weight_decay: Any = 0.0
) -> list[Module]:
    """LAMB: Adam with decoupled weight decay, each layer's step a fraction of the layer's norm.

    Args:
        lr: The fraction.
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the denominator.
        weight_decay: How much of the weights enters each step.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.lamb(weight_decay=0.01))
        Chain(Adam, WeightDecay, TrustRatio, LR)

    References:
        Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, Algorithm 2.
    """
    return [Adam(beta1=beta1, beta2=beta2, eps=eps), *_decay(weight_decay), TrustRatio(), LR(lr)]


def lars(
    lr: Any = 1.0, *, momentum: Any = 0.9, trust: Any = 1e-3, weight_decay: Any = 0.0, eps: Any = 1e-8
) -> list[Module]:
    """LARS: momentum of gradients that are a fraction of each layer's norm.

    Args:
        lr: The step size.
        momentum: How much of the last step is kept.
        trust: The fraction.
        weight_decay: An L2 penalty that takes part in the ratio of norms.
        eps: Added to the norm of the gradient.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.lars())
        Chain(TrustRatio, HeavyBall, LR)

    References:
        Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017, Algorithm 1.
    """
    return [TrustRatio(trust=trust, weight_decay=weight_decay, eps=eps), HeavyBall(momentum), LR(lr)]
