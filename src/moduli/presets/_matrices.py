"""Optimizers that precondition matrices as matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..m import EMA, LR, NAG, SOAP, Adam, HeavyBall, Orthogonalize, PSGDKronWhiten, Shampoo, Split
from ..optim import Module
from ._descent import _decay

__all__ = ["muon", "psgd", "shampoo", "soap"]


def _is_matrix(param: Tensor) -> bool:
    return param.dim() >= 2


def muon(
    lr: Any = 1e-3,
    *,
    momentum: Any = 0.95,
    steps: int = 5,
    weight_decay: Any = 0.0,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
) -> list[Module]:
    """Muon: Nesterov momentum, orthogonalised, for matrices, and Adam for everything else.

    Orthogonalised updates are scaled to the size of Adam's, so that one step size and one weight decay serve both.

    Args:
        lr: The step size, as for Adam.
        momentum: Momentum of the matrices.
        steps: Iterations of the orthogonalisation.
        weight_decay: How much of the weights each step takes away, times `lr`.
        beta1: Memory of Adam's mean.
        beta2: Memory of Adam's mean square.
        eps: Added to Adam's denominator.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.muon(1e-3, weight_decay=0.1))
        Chain(Split, WeightDecay, LR)

    References:
        K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
        J. Liu et al., "Muon is scalable for LLM training", 2025.
    """
    matrices = [NAG(momentum, lerp=True), Orthogonalize(steps=steps, adjust_lr=True)]
    return [Split(_is_matrix, matrices, Adam(beta1=beta1, beta2=beta2, eps=eps)), *_decay(weight_decay), LR(lr)]


def soap(
    lr: Any = 3e-3,
    *,
    beta1: float = 0.95,
    beta2: float = 0.95,
    precond_freq: int = 10,
    weight_decay: Any = 0.01,
) -> list[Module]:
    """SOAP: Adam in the eigenbasis of Shampoo, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Memory of the mean.
        beta2: Memory of the mean square, and of the covariances.
        precond_freq: The basis follows at every n-th step.
        weight_decay: How much of the weights each step takes away, times `lr`.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.soap(1e-3))
        Chain(SOAP, WeightDecay, LR)
    """
    link = SOAP(beta1=beta1, beta2=beta2, shampoo_beta=beta2, precond_freq=precond_freq)
    return [link, *_decay(weight_decay), LR(lr)]


def shampoo(lr: Any = 0.1, *, momentum: Any = 0.9, precond_freq: int = 10, weight_decay: Any = 0.0) -> list[Module]:
    """Shampoo, with momentum and an L2 penalty.

    Args:
        lr: The step size.
        momentum: Momentum of the preconditioned steps.
        precond_freq: The roots are computed at every n-th step.
        weight_decay: An L2 penalty.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.shampoo())
        Chain(Shampoo, HeavyBall, LR)
    """
    return [*_decay(weight_decay), Shampoo(precond_freq=precond_freq), HeavyBall(momentum), LR(lr)]


def psgd(lr: Any = 1e-3, *, momentum: Any = 0.9, weight_decay: Any = 0.0, seed: int | None = None) -> list[Module]:
    """PSGD with Kronecker factors that whiten the gradient, applied to its momentum; decoupled weight decay.

    Args:
        lr: The step size, as for Adam.
        momentum: Momentum of the gradient, before it is preconditioned.
        weight_decay: How much of the weights each step takes away, times `lr`.
        seed: Seed of the fit's noise.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.psgd(1e-3))
        Chain(PSGDKronWhiten, LR)
    """
    return [PSGDKronWhiten(inner=EMA(momentum, debias=True), seed=seed), *_decay(weight_decay), LR(lr)]
