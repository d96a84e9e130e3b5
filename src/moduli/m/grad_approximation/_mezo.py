"""Memory-efficient zeroth order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Objective, sample_like
from ._randomized import RandomizedFDM


class MeZO(RandomizedFDM):
    r"""Randomised differences that keep a seed in place of the directions, and draw them again when needed.

    Args:
        h: The length of the differences.
        n_samples: How many directions.
        formula: As for `FDM`.
        distribution: "rademacher", "normal", "uniform" or "sphere".
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> _ = torch.manual_seed(0)
        >>> opt = mo.Optimizer([w], m.MeZO(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        S. Malladi et al., "Fine-tuning language models with just forward passes", NeurIPS 2023.
    """

    replays = True

    def __init__(
        self,
        *,
        h: Any = 1e-3,
        n_samples: int = 1,
        formula: str = "central2",
        distribution: str = "rademacher",
        seed: int | None = None,
        modules: Chainable | None = None,
    ) -> None:
        super().__init__(
            h=h,
            n_samples=n_samples,
            formula=formula,
            distribution=distribution,
            pre_generate=True,
            seed=seed,
            modules=modules,
        )

    def pre_step(self, objective: Objective) -> None:
        """Draws the seeds of this step."""
        generator = self.get_generator("cpu", self.seed)
        count = self.settings[objective.params[0]]["n_samples"]
        self.global_state["seeds"] = torch.randint(0, 2**62, (count,), generator=generator).tolist()

    def direction(self, params: list[Tensor], k: int, setting: Any) -> list[Tensor]:
        """The k-th direction, drawn again from its seed."""
        generator = torch.Generator(params[0].device).manual_seed(self.global_state["seeds"][k])
        return sample_like(params, setting["distribution"], generator=generator)
