"""AdaHessian."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import Chainable
from .._checks import collect_settings
from ._diagonal import DiagonalMoments


class AdaHessian(DiagonalMoments):
    r"""Adam with the Hessian's diagonal in place of the gradient in the second moment.

    $D = z \odot Hz$ (averaged over space), $v_t = \beta_2 v_{t-1} + (1-\beta_2) D^2$,
    $u \leftarrow \hat m_t / (\hat v_t^{k/2} + \epsilon)$.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        averaging: Average the diagonal over the axes beyond the second (the kernels of a convolution).
        block_size: Average over blocks of this many numbers along the first axis instead.
        update_freq: Estimate the diagonal at every n-th step only.
        eps: Added to the denominator.
        hessian_power: k, between 0 and 1.
        distribution: "rademacher", "normal", "uniform" or "sphere".
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        n_samples: Vectors per estimate.
        zHz: False to use Hz itself.
        debias: Correct for the moments starting at zero.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        inner: Links between learning and the transformation.
        exp_avg_tfm: Links that transform a copy of the mean before it is used.
        D_exp_avg_sq_tfm: Links that transform a copy of the mean square before its power is taken.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.AdaHessian(seed=0)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data.abs() < 1e-5
        tensor([True, True])

    References:
        Z. Yao et al., "AdaHessian: an adaptive second order optimizer for machine learning", AAAI 2021.
    """

    second = "D_exp_avg_sq"

    def __init__(
        self,
        *,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        averaging: bool = True,
        block_size: int | None = None,
        update_freq: int = 1,
        eps: Any = 1e-8,
        hessian_power: Any = 1.0,
        distribution: str = "rademacher",
        hvp_method: str = "autograd",
        h: float = 1e-3,
        n_samples: int = 1,
        zHz: bool = True,
        debias: bool = True,
        seed: int | None = None,
        inner: Chainable | None = None,
        exp_avg_tfm: Chainable | None = None,
        D_exp_avg_sq_tfm: Chainable | None = None,
    ) -> None:
        super().__init__(**collect_settings(locals()))

    def learn_diagonal(self, held: Tensor, D: Tensor, setting: Any) -> None:
        """The mean square."""
        D = _average_blocks(D, setting)
        held.mul_(setting["beta2"]).addcmul_(D, D.conj(), value=1 - setting["beta2"])

    def divide(self, m: Tensor, D: Tensor, setting: Any) -> Tensor:
        """By a power of the root of the mean square."""
        out: Tensor = m / (D ** (setting["hessian_power"] / 2) + setting["eps"])
        return out


def _average_blocks(D: Tensor, setting: Any) -> Tensor:
    block = setting["block_size"]
    if block is not None and D.dim() > 0 and D.shape[0] % block == 0:
        blocks = D.reshape(D.shape[0] // block, block, *D.shape[1:]).abs().mean(1, keepdim=True)
        return blocks.expand(D.shape[0] // block, block, *D.shape[1:]).reshape(D.shape)
    if setting["averaging"] and D.dim() >= 3:
        return D.abs().mean(tuple(range(2, D.dim())), keepdim=True).expand_as(D)
    return D
