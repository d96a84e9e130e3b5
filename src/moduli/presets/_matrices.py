"""Optimizers that precondition matrices as matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import layout, m
from ..axes import ModelAxes
from ..optim import Module
from ._descent import Decays, _decay

_EMBEDDINGS_AND_HEADS = "*embed* *wte* *wpe* *head* *classifier*"


class _IsHidden:
    """A filter for matrices of hidden layers: no embeddings, no heads, no axis of size one.

    With the axes of the model the role of the parameter decides, without them its type, name and shape.
    """

    def __init__(self, adam: str | None, axes: ModelAxes | None = None) -> None:
        usual = _EMBEDDINGS_AND_HEADS if axes is None else ""
        self.patterns = (usual if adam is None else adam).lower().split()
        self.is_default = adam is None or adam == _EMBEDDINGS_AND_HEADS
        self.axes = axes

    def check_names(self, names: Sequence[str]) -> None:
        """Raise UnknownNameError if a pattern that the user gave matches no parameter; the usual names need not occur."""
        for pattern in () if self.is_default else self.patterns:
            layout.check_pattern(pattern, [name.lower() for name in names])

    def __call__(self, param: Tensor, name: str | None, owner: torch.nn.Module | None) -> bool:
        if self.axes is not None and name is not None:
            return self.axes.of(name).role == "hidden" and not layout.match_name(name.lower(), self.patterns)
        if param.dim() < 2 or not param.numel() or min(param.shape[0], param[0].numel()) < 2:
            return False
        if isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag):
            return False
        return name is None or not layout.match_name(name.lower(), self.patterns)


def _muon(
    matrices: Sequence[Module],
    rest: Module,
    adam: str | None,
    weight_decay: Any,
    lr: Any,
    axes: ModelAxes | None = None,
    decay: Decays = "all",
) -> list[Module]:
    return [m.Split(_IsHidden(adam, axes), list(matrices), rest), *_decay(weight_decay, decay), m.LR(lr)]


def muon(
    lr: Any = 1e-3,
    *,
    momentum: Any = 0.95,
    steps: int = 5,
    method: str = "polar_express",
    dtype: str | None = None,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    adam: str | None = None,
    axes: ModelAxes | None = None,
    batch: str | tuple[str, ...] | None = None,
) -> list[Module]:
    """Muon: Nesterov momentum, orthogonalised, for the matrices of hidden layers, and Adam for everything else.

    Everything else: vectors, matrices with an axis of size one, `nn.Embedding` weights, and parameters whose names match
    `adam`. Types and names are known to an optimizer that was given a module. Kernels of convolutions are matrices
    (out, in * height * width). Orthogonalised updates are scaled to the size of Adam's, so that one step size and one
    weight decay serve both.

    Args:
        lr: The step size, as for Adam.
        momentum: Momentum of the matrices.
        steps: Iterations of the orthogonalisation.
        method: The method of orthogonalisation: "polar_express" (nearer for as many products), "newtonschulz" or "svd".
        dtype: "bfloat16" orthogonalises in bfloat16, as other implementations do: faster on a GPU (see `m.Orthogonalize`).
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        beta1: Decay rate of Adam's running mean.
        beta2: Decay rate of Adam's running mean square.
        eps: Added to Adam's denominator.
        adam: Patterns of names that Adam takes, separated by spaces; by default names of embeddings and heads, or none with axes.
        axes: The axes of the model (`mo.axes.trace`): hidden matrices are then those from units to units, whatever their names.
        batch: Axes whose entries are matrices by themselves ("head"), see `m.Orthogonalize`.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.muon(1e-3, weight_decay=0.1))
        Chain(Split, WeightDecay, LR)

    References:
        K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
        J. Liu et al., "Muon is scalable for LLM training", 2025.
        N. Amsel, D. Persson, C. Musco, R. M. Gower, "The Polar Express", 2025.
    """
    orthogonal = m.Orthogonalize(steps=steps, method=method, dtype=dtype, adjust_lr=True, batch=batch)  # type: ignore[arg-type]
    matrices = [m.NAG(momentum, lerp=True), orthogonal]
    return _muon(matrices, m.Adam(beta1=beta1, beta2=beta2, eps=eps), adam, weight_decay, lr, axes, decay)


def normuon(
    lr: Any = 1e-3,
    *,
    momentum: Any = 0.95,
    row_beta: Any = 0.95,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    adam: str = _EMBEDDINGS_AND_HEADS,
) -> list[Module]:
    """NorMuon: Muon whose neurons take steps of one size; Adam for everything else, as in `muon`.

    Args:
        lr: The step size, as for Adam.
        momentum: Momentum of the matrices.
        row_beta: Decay rate of the running mean square of each neuron's update.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        beta1: Decay rate of Adam's running mean.
        beta2: Decay rate of Adam's running mean square.
        adam: Patterns of names that Adam takes, separated by spaces.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.normuon())
        Chain(Split, LR)

    References:
        Z. Li et al., "NorMuon: making Muon more efficient and scalable", 2025, Algorithm 1.
    """
    matrices = [m.EMA(momentum), m.Orthogonalize(), m.NeuronNormalize(beta=row_beta)]
    return _muon(matrices, m.Adam(beta1=beta1, beta2=beta2), adam, weight_decay, lr, decay=decay)


def muonclip(
    lr: Any = 1e-3,
    *,
    pairs: Sequence[tuple[Tensor, Tensor]],
    logits: Callable[[], Sequence[Tensor]],
    tau: Any = 100.0,
    momentum: Any = 0.95,
    weight_decay: Any = 0.1,
    decay: Decays = "all",
    adam: str = _EMBEDDINGS_AND_HEADS,
) -> list[Module]:
    """MuonClip: Muon, and query and key weights scaled where attention logits exceeded a bound.

    Args:
        lr: The step size, as for Adam.
        pairs: The weights (query, key) of each attention layer.
        logits: A function that returns, for each pair, the largest logit of each head in the last forward pass.
        tau: The bound of the logits.
        momentum: Momentum of the matrices.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        adam: Patterns of names that Adam takes, separated by spaces.

    Example:
        >>> import torch
        >>> from moduli import optim, presets
        >>> q, k = torch.zeros(4, 4), torch.zeros(4, 4)
        >>> optim.Chain(presets.muonclip(pairs=[(q, k)], logits=lambda: [torch.ones(2)]))
        Chain(Split, WeightDecay, LR, QKClip)

    References:
        Kimi Team, "Kimi K2: open agentic intelligence", 2025, Algorithm 1.
    """
    links = muon(lr, momentum=momentum, weight_decay=weight_decay, decay=decay, adam=adam)
    return [*links, m.QKClip(pairs, logits, tau=tau)]


def dion(
    lr: Any = 1e-2,
    *,
    momentum: Any = 0.95,
    rank: int | float = 0.25,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    adam: str = _EMBEDDINGS_AND_HEADS,
    seed: int | None = None,
) -> list[Module]:
    """Dion for the matrices of hidden layers, and Adam, of a tenth of the step size, for everything else.

    Args:
        lr: The step size of the matrices.
        momentum: The part of the followed directions that stays in the buffer.
        rank: The number of directions; a fraction is taken of the shorter side.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        adam: Patterns of names that Adam takes, separated by spaces.
        seed: The seed of the random generator, which is saved; None for torch's default generator.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.dion())
        Chain(Split, LR)

    References:
        K. Ahn et al., "Dion: distributed orthonormalized updates", 2025, Algorithm 1.
    """
    return _muon(
        [m.Dion(momentum=momentum, rank=rank, seed=seed)], m.Adam(alpha=0.1), adam, weight_decay, lr, decay=decay
    )


def scion(
    lr: Any = 1e-3,
    *,
    momentum: Any = 0.9,
    radius: Any = 50.0,
    head_radius: Any = 3000.0,
    constrained: bool = True,
    adam: str = _EMBEDDINGS_AND_HEADS,
) -> list[Module]:
    """Scion: steps to the boundary of norm balls, spectral for hidden matrices and of the largest entry for the rest.

    Args:
        lr: The step size; constrained, the part of the way to the boundary that a step goes.
        momentum: Decay rate of the running mean of gradients.
        radius: The radius of hidden layers' balls.
        head_radius: The radius for embeddings, heads and vectors.
        constrained: Keep the weights within the balls, which is weight decay of one; False only bounds the steps.
        adam: Patterns of names that take the second ball.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.scion())
        Chain(EMA, Split, WeightDecay, LR)

    References:
        T. Pethick et al., "Training deep learning models with norm-constrained LMOs", ICML 2025, Algorithms 1 and 2.
    """
    balls = m.Split(_IsHidden(adam), m.LMO("spectral", radius=radius), m.LMO("sign", radius=head_radius))
    return [m.EMA(momentum), balls, *([m.WeightDecay(1.0)] if constrained else []), m.LR(lr)]


def splus(
    lr: Any = 0.1,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    precond_freq: int = 100,
    weight_decay: Any = 0.01,
    decay: Decays = "all",
) -> list[Module]:
    """SPlus: signs in the eigenbasis of Shampoo, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the momentum.
        beta2: Decay rate of the covariances.
        precond_freq: Steps between two eigendecompositions.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`. The authors also multiply it by the
            factor 2 / (m + n) of the step of an m x n matrix, so that their decay of matrices is much weaker.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.splus())
        Chain(SPlus, WeightDecay, LR)
    """
    return [m.SPlus(beta1=beta1, beta2=beta2, precond_freq=precond_freq), *_decay(weight_decay, decay), m.LR(lr)]


def kl_shampoo(
    lr: Any = 3e-3,
    *,
    momentum: Any = 0.9,
    beta: Any = 0.95,
    precond_freq: int = 10,
    weight_decay: Any = 0.01,
    decay: Decays = "all",
) -> list[Module]:
    """KL-Shampoo of a momentum, with decoupled weight decay.

    Args:
        lr: The step size.
        momentum: Decay rate of the running mean of scaled updates.
        beta: Decay rate of the factors.
        precond_freq: Steps between two eigendecompositions.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.kl_shampoo())
        Chain(KLShampoo, EMA, WeightDecay, LR)
    """
    return [m.KLShampoo(beta=beta, precond_freq=precond_freq), m.EMA(momentum), *_decay(weight_decay, decay), m.LR(lr)]


def soap(
    lr: Any = 3e-3,
    *,
    beta1: float = 0.95,
    beta2: float = 0.95,
    precond_freq: int = 10,
    precondition_1d: bool = False,
    weight_decay: Any = 0.01,
    decay: Decays = "all",
) -> list[Module]:
    """SOAP: Adam in the eigenbasis of Shampoo, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square, and of the covariances.
        precond_freq: The basis follows at every n-th step.
        precondition_1d: Whether vectors are rotated, too; by default they are left to Adam, as in the authors' code.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`; the first step only computes the basis.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.soap(1e-3))
        Chain(SOAP, WeightDecay, LR)
    """
    link = m.SOAP(
        beta1=beta1, beta2=beta2, shampoo_beta=beta2, precond_freq=precond_freq, precondition_1d=precondition_1d
    )
    # The authors' code skips its first step, weight decay and all.
    return [link, *_decay(weight_decay, decay, after=1), m.LR(lr)]


def shampoo(
    lr: Any = 0.1, *, momentum: Any = 0.9, precond_freq: int = 10, weight_decay: Any = 0.0, decay: Decays = "all"
) -> list[Module]:
    """Shampoo, with momentum and an L2 penalty.

    Args:
        lr: The step size.
        momentum: Momentum of the preconditioned steps.
        precond_freq: The roots are computed at every n-th step.
        weight_decay: An L2 penalty.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.shampoo())
        Chain(Shampoo, HeavyBall, LR)
    """
    return [*_decay(weight_decay, decay), m.Shampoo(precond_freq=precond_freq), m.HeavyBall(momentum), m.LR(lr)]


def psgd(
    lr: Any = 1e-3, *, momentum: Any = 0.9, weight_decay: Any = 0.0, decay: Decays = "all", seed: int | None = None
) -> list[Module]:
    """PSGD with Kronecker factors that whiten the gradient, applied to its momentum; decoupled weight decay.

    Args:
        lr: The step size, as for Adam.
        momentum: Momentum of the gradient, before it is preconditioned.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        seed: Seed of the fit's noise.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.psgd(1e-3))
        Chain(PSGDKronWhiten, LR)
    """
    return [m.PSGDKronWhiten(inner=m.EMA(momentum, debias=True), seed=seed), *_decay(weight_decay, decay), m.LR(lr)]
