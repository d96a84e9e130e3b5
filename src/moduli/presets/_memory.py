"""Optimizers whose state is small."""

from __future__ import annotations

from typing import Any

from .. import m
from ..optim import Module
from ._descent import Decays, _decay


def adafactor(lr: Any = None, *, decay: Any = 0.8, clip: float | None = 1.0, weight_decay: Any = 0.0) -> list[Module]:
    """Adafactor; without a step size, steps relative to the size of the parameters, by the schedule of the paper.

    Args:
        lr: The step size; None for relative steps.
        decay: The power of the memory of the second moment.
        clip: The largest root mean square of a scaled update.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adafactor(1e-2))
        Chain(Adafactor, LR)
    """
    link = m.Adafactor(decay=decay, clip=clip, relative_step=lr is None)
    return [link, *_decay(weight_decay), m.LR(1.0 if lr is None else lr)]


def came(
    lr: Any = 2e-4,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    beta3: Any = 0.9999,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """CAME, with decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the second moment.
        beta3: Decay rate of the instability.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.came())
        Chain(CAME, LR)
    """
    return [m.CAME(beta1=beta1, beta2=beta2, beta3=beta3), *_decay(weight_decay, decay), m.LR(lr)]


def adam8bit(
    lr: Any = 1e-3,
    *,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Adam with moments in eight bits, and decoupled weight decay.

    Args:
        lr: The step size.
        beta1: Decay rate of the running mean.
        beta2: Decay rate of the running mean square.
        eps: Added to the denominator.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.adam8bit())
        Chain(Quantized, LR)
    """
    return [m.Quantized(m.Adam(beta1=beta1, beta2=beta2, eps=eps)), *_decay(weight_decay, decay), m.LR(lr)]


def galore(
    lr: Any = 1e-2,
    *,
    rank: int = 128,
    update_gap: int = 200,
    scale: Any = 0.25,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """GaLore: Adam on projections of the gradients to their leading singular vectors.

    Args:
        lr: The step size.
        rank: The number of directions.
        update_gap: Steps between two decompositions.
        scale: A factor of projected updates.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.galore())
        Chain(GaLore, LR)
    """
    return [m.GaLore(m.Adam(), rank=rank, update_gap=update_gap, scale=scale), *_decay(weight_decay, decay), m.LR(lr)]


def fira(
    lr: Any = 1e-2,
    *,
    rank: int = 128,
    update_gap: int = 200,
    scale: Any = 0.25,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
) -> list[Module]:
    """Fira: GaLore that also follows the rest of the gradients.

    Args:
        lr: The step size.
        rank: The number of directions.
        update_gap: Steps between two decompositions.
        scale: A factor of updates.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.fira())
        Chain(Fira, LR)
    """
    return [m.Fira(m.Adam(), rank=rank, update_gap=update_gap, scale=scale), *_decay(weight_decay, decay), m.LR(lr)]


def apollo(
    lr: Any = 1e-2,
    *,
    rank: int = 256,
    update_gap: int = 200,
    mini: bool = False,
    weight_decay: Any = 0.0,
    decay: Decays = "all",
    seed: int | None = None,
) -> list[Module]:
    """APOLLO: gradients scaled as Adam scales a random projection of them.

    Args:
        lr: The step size.
        rank: The number of random directions.
        update_gap: Steps between two draws.
        mini: APOLLO-Mini: one direction and one ratio for each matrix.
        weight_decay: The fraction of the weights that each step subtracts, times `lr`.
        decay: Which parameters decay: "all", or "matrices" (see `adamw`).
        seed: The seed of the random generator, which is saved; None for torch's default generator.

    Example:
        >>> from moduli import optim, presets
        >>> optim.Chain(presets.apollo(mini=True))
        Chain(APOLLO, LR)
    """
    link = (
        m.APOLLO(m.Adam(), rank=1, update_gap=update_gap, scale=128**0.5, tensorwise=True, seed=seed)
        if mini
        else m.APOLLO(m.Adam(), rank=rank, update_gap=update_gap, seed=seed)
    )
    return [link, *_decay(weight_decay, decay), m.LR(lr)]
