"""Spall's second-order stochastic approximation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import Dense, LinearOperator
from ...optim import Chainable, Need, Objective, sample_like
from .._checks import collect_settings
from .._flat import flat
from .._vector_link import HessianLink
from ..second_order._solve import shortest


class SG2(HessianLink):
    r"""Learns the Hessian from differences of gradients along random signs $\Delta$, and solves with it.

    $\hat H = \tfrac12 (A + A^T),\ A = \Delta^{-1}\,(g(x + h\Delta) - g(x - h\Delta))^T / 2h$, averaged over all steps
    (or exponentially). In the first steps the update is divided by the mean of the diagonal instead. Behind `SPSA` the
    gradients are made of values, which is the method called 2SPSA.

    Args:
        n_samples: Directions per step.
        n_first_step_samples: Directions in the first step.
        start_step: The step from which systems are solved.
        beta: Memory of an exponential mean; None for the mean of all.
        damping: Added to the diagonal.
        h: The length of the differences.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        update_freq: Learn at every n-th step only.
        inner: Links between learning and the solution.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SG2(seed=0), m.Backtracking())
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. C. Spall, "Adaptive stochastic approximation by the simultaneous perturbation method", IEEE Trans. Automatic
        Control 45 (2000).
    """

    needs = frozenset({Need.GRADIENT, Need.CLOSURE})
    real_only = True
    learnt = "H"

    def __init__(
        self,
        *,
        n_samples: int = 1,
        n_first_step_samples: int = 10,
        start_step: int = 10,
        beta: float | None = None,
        damping: float = 1e-4,
        h: float = 1e-2,
        seed: int | None = None,
        update_freq: int = 1,
        inner: Chainable | None = None,
    ) -> None:
        if n_samples < 1 or n_first_step_samples < 1 or not h > 0:
            raise ValueError("SG2: n_samples, n_first_step_samples and h are positive")
        settings = collect_settings(locals(), "seed", "update_freq", "inner")
        super().__init__(settings, update_freq=update_freq, inner=inner)
        self.seed = seed

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Takes in differences of gradients."""
        objective.get_updates()
        like = flat(objective.params)
        k, h = state.get("step", 0), setting["h"]
        count = setting["n_first_step_samples"] if k == 0 else setting["n_samples"]
        total = torch.zeros(like.numel(), like.numel(), dtype=like.dtype, device=like.device)
        generator = self.get_generator(like.device, self.seed)
        for _ in range(count):
            signs = sample_like(objective.params, "rademacher", generator=generator)
            difference = self._gradient(objective, signs, h) - self._gradient(objective, signs, -h)
            total += torch.outer(1 / flat(signs), difference / (2 * h))
        H = 0.5 * (total + total.T) / count
        held: Tensor | None = state.get("H")
        if held is None or held.shape != H.shape:
            state["H"], state["step"] = H, 1
            return
        beta = setting["beta"]
        weight = 1 / (k + 1) if beta is None else 1 - beta
        state["H"] = torch.lerp(held, H, weight)
        state["step"] = k + 1

    def _gradient(self, objective: Objective, signs: list[Tensor], h: float) -> Tensor:
        with objective.moved() as start:
            objective.move_to([x + h * z for x, z in zip(start, signs, strict=True)])
            return flat(objective.get_loss_grads(at_x0=False)[1]).clone()

    def _damp(self, state: Any, setting: Any) -> Tensor:
        H: Tensor = state["H"].clone()
        H.diagonal().add_(setting["damping"])
        return H

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        """Solves with the mean Hessian."""
        H = self._damp(state, setting)
        if state["step"] > setting["start_step"]:
            return shortest(H, u)
        mean = float(H.diagonal().abs().sum())
        return u / mean if mean > 0 else u.clone()

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The mean Hessian."""
        return Dense(self._damp(state, setting), symmetric=True)
