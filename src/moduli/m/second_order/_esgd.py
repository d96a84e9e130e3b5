"""Equilibrated gradient descent."""

from __future__ import annotations

from typing import Any

import torch

from ...optim import Chainable, Objective, sample_like
from .._checks import collect_settings
from ._diagonal import HutchinsonBase


class ESGD(HutchinsonBase):
    r"""Divides by the norms of the Hessian's rows, estimated as $\sqrt{E (Hz)^2}$.

    $D_t = D_{t-1} + (Hz)^2$ at every n-th step, $u \leftarrow u / (\sqrt{D_t / k} + \lambda)$, with k the number of draws.

    Args:
        damping: $\lambda$.
        update_freq: Draw at every n-th step.
        distribution: "gaussian", "rademacher", "uniform" or "sphere".
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        n_samples: Draws each time.
        zHz: Accumulate the squares of $z \odot Hz$ instead.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        beta: Memory of an exponential mean; None for the mean of all draws.
        beta_debias: Correct that mean for starting at zero.
        inner: Links between learning and the transformation.
        Hz_sq_acc_tfm: Links that transform a copy of the accumulated squares before they are used.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.ESGD(seed=0, update_freq=1), m.LR(0.2))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        Y. N. Dauphin, H. de Vries, Y. Bengio, "Equilibrated adaptive learning rates for non-convex optimization", NeurIPS
        2015.
    """

    def __init__(
        self,
        *,
        damping: Any = 1e-4,
        update_freq: int = 20,
        distribution: str = "gaussian",
        hvp_method: str = "autograd",
        h: float = 1e-3,
        n_samples: int = 1,
        zHz: bool = False,
        seed: int | None = None,
        beta: float | None = None,
        beta_debias: bool = True,
        inner: Chainable | None = None,
        Hz_sq_acc_tfm: Chainable | None = None,
    ) -> None:
        super().__init__(**collect_settings(locals()))

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Accumulates squares of products with random vectors."""
        if self.increment_counter("estimates", 0) % self.every:
            return
        setting = settings[0]
        generator = self.get_generator(objective.params[0].device, self.seed)
        grads = None
        for _ in range(setting["n_samples"]):
            z = sample_like(objective.params, setting["distribution"], generator=generator)
            product, grads = objective.hessian_vector_product(
                z, grads, hvp_method=setting["hvp_method"], h=setting["h"]
            )
            for state, own, v, p in zip(states, settings, z, product, strict=True):
                if "Hz_sq" not in state:
                    state["Hz_sq"], state["draws"] = torch.zeros_like(p), 0
                square = (v * p if own["zHz"] else p).abs().square().to(p.dtype)
                state["draws"] += 1
                if own["beta"] is None:
                    state["Hz_sq"].add_(square)
                else:
                    state["Hz_sq"].lerp_(square, 1 - own["beta"])

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Divides by the roots of the means."""
        out = list(objective.get_updates())
        for i, state in self.find_known(objective, states, Hz_sq_acc_tfm="Hz_sq"):
            setting = settings[i]
            mean = state["Hz_sq"]
            if setting["beta"] is None:
                mean = mean / state["draws"]
            elif setting["beta_debias"]:
                mean = mean / (1 - setting["beta"] ** state["draws"])
            out[i] = out[i] / (mean.sqrt() + setting["damping"])
        objective.updates = out
        return objective
