"""Sophia with Hutchinson's estimator."""

from __future__ import annotations

from typing import Any

import torch

from ...optim import Chainable, Objective
from ._diagonal import HutchinsonBase


class SophiaH(HutchinsonBase):
    r"""Divides the mean gradient by a running mean of the Hessian's diagonal, and clips.

    $h_t = \beta_2 h_{t-1} + (1-\beta_2)\, z \odot Hz$ at every n-th step,
    $u \leftarrow \mathrm{clip}(m_t / \max(\rho h_t, \epsilon), \pm c)$.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the diagonal.
        update_freq: Estimate the diagonal at every n-th step.
        precond_scale: $\rho$.
        clip: c.
        eps: The smallest divisor.
        hvp_method: As for `NewtonCG`.
        distribution: "gaussian", "rademacher", "uniform" or "sphere".
        h: The length of difference steps.
        n_samples: Vectors per estimate.
        zHz: False to use Hz itself.
        debias: Correct for the means starting at zero.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        inner: Links between learning and the transformation.
        exp_avg_tfm: Links that transform a copy of the mean before it is used.
        D_exp_avg_tfm: Links that transform a copy of the mean diagonal before it is used.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.SophiaH(seed=0), m.LR(0.1))
        >>> for _ in range(100):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 1)
        True

    References:
        H. Liu et al., "Sophia: a scalable stochastic second-order optimizer for language model pre-training", ICLR 2024.
    """

    def __init__(
        self,
        *,
        beta1: Any = 0.96,
        beta2: Any = 0.99,
        update_freq: int = 10,
        precond_scale: Any = 1.0,
        clip: Any = 1.0,
        eps: Any = 1e-12,
        hvp_method: str = "autograd",
        distribution: str = "gaussian",
        h: float = 1e-3,
        n_samples: int = 1,
        zHz: bool = True,
        debias: bool = False,
        seed: int | None = None,
        inner: Chainable | None = None,
        exp_avg_tfm: Chainable | None = None,
        D_exp_avg_tfm: Chainable | None = None,
    ) -> None:
        super().__init__(
            {
                "beta1": beta1,
                "beta2": beta2,
                "precond_scale": precond_scale,
                "clip": clip,
                "eps": eps,
                "hvp_method": hvp_method,
                "distribution": distribution,
                "h": h,
                "n_samples": n_samples,
                "zHz": zHz,
                "debias": debias,
            },
            update_freq,
            seed,
            inner,
            {"exp_avg_tfm": exp_avg_tfm, "D_exp_avg_tfm": D_exp_avg_tfm},
        )

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """The mean gradient, and the mean diagonal when it is its turn."""
        found = self.estimate(objective, settings[0])
        for i, (u, state, setting) in enumerate(zip(objective.peek_updates(), states, settings, strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            if "exp_avg" not in state:
                state["exp_avg"], state["D_exp_avg"] = torch.zeros_like(u), torch.zeros_like(u)
                state["step"] = state["estimates"] = 0
            state["step"] += 1
            state["exp_avg"].lerp_(u, 1 - setting["beta1"])
            if found is not None:
                state["estimates"] += 1
                state["D_exp_avg"].lerp_(found[i], 1 - setting["beta2"])

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Divides and clips."""
        out = list(objective.get_updates())
        for i, state in self.find_known(objective, states, exp_avg_tfm="exp_avg", D_exp_avg_tfm="D_exp_avg"):
            setting = settings[i]
            m, D = state["exp_avg"], state["D_exp_avg"]
            if setting["debias"]:
                m = m / (1 - setting["beta1"] ** state["step"])
                D = D / (1 - setting["beta2"] ** max(state["estimates"], 1))
            out[i] = (m / (D * setting["precond_scale"]).clamp(min=setting["eps"])).clamp(
                -setting["clip"], setting["clip"]
            )
        objective.updates = out
        return objective
