"""Sophia with Hutchinson's estimator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import Chainable
from .._checks import collect_settings
from ._diagonal import DiagonalMoments


class SophiaH(DiagonalMoments):
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

    second = "D_exp_avg"

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
        super().__init__(**collect_settings(locals()))

    def learn_diagonal(self, held: Tensor, D: Tensor, setting: Any) -> None:
        """The mean."""
        held.lerp_(D, 1 - setting["beta2"])

    def divide(self, m: Tensor, D: Tensor, setting: Any) -> Tensor:
        """By the diagonal, and clips."""
        ratio = m / (D * setting["precond_scale"]).clamp(min=setting["eps"])
        return ratio.clamp(-setting["clip"], setting["clip"])
