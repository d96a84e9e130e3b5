"""PSGD with a preconditioner of low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, as_real, restore_complex
from .._transforms import BufferTransform, allow_none, check_at_least_one, fraction, non_negative, positive, probability
from ._axes import work
from ._kron import limit_amplitude
from ._lra import begin, fit, precondition


class PSGDLRAWhiten(BufferTransform):
    r"""Fits a diagonal and a correction of low rank so that together they whiten the update, and preconditions with them.

    $P = Q^T Q$ with $Q = (I + U V^T)\operatorname{diag}(d)$ minimises $E[u^T P u + v^T P^{-1} v]$ for white noise v. With
    $a = Qu$ and $b = Q^{-T}v$, either $U \leftarrow U - \frac{\mu}{L}(a a^T - b b^T) V (I + V^TU)$ or
    $V \leftarrow V - \frac{\mu}{L}(I + VU^T)(a a^T - b b^T) U$ (by a coin), and
    $d \leftarrow d - \frac{\mu}{L} d \odot (Pu \odot u - v \odot P^{-1}v)$, where each $L$ bounds the size of the change.
    Finally $u \leftarrow Pu$.

    Args:
        rank: Columns of U and V.
        init_scale: The scale of d at the start; None takes $\overline{u^4}^{-1/8}$ of the first update.
        lr_preconditioner: The step $\mu$.
        betaL: Memory of the bounds, which rise at once and fall slowly.
        damping: Size of the noise that is added to the update the factors are fitted to.
        grad_clip_max_amp: Bound on the root mean square of the result.
        update_probability: How often factors are fitted.
        concat_params: One preconditioner for all parameters; False: one for each tensor.
        inner: Links that transform the update before it is preconditioned, after the factors were fitted to it.
        seed: Seed of the noise; None uses torch's own generator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.PSGDLRAWhiten(rank=1, seed=0), torch.zeros(2)
        >>> noise = torch.Generator().manual_seed(0)
        >>> out = [
        ...     optim.step_tensors(link, [torch.tensor([10.0, 0.1]) * torch.randn(2, generator=noise)], params=[w])[0]
        ...     for _ in range(600)
        ... ]
        >>> (torch.stack(out[300:]).square().mean(0) - 1).abs() < 0.5
        tensor([True, True])

    References:
        O. Pooladzandi, X.-L. Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv:2402.04553; X.-L. Li, "Stochastic Hessian fittings with Lie groups", arXiv:2402.11858.
    """

    counts = True
    ranges = {
        check_at_least_one: ("rank",),
        positive: ("lr_preconditioner", "grad_clip_max_amp"),
        non_negative: ("damping",),
        fraction: ("betaL",),
        probability: ("update_probability",),
        allow_none(positive): ("init_scale",),
    }

    def __init__(
        self,
        *,
        rank: int = 10,
        init_scale: float | None = None,
        lr_preconditioner: float = 0.1,
        betaL: float = 0.9,
        damping: float = 1e-9,
        grad_clip_max_amp: float = float("inf"),
        update_probability: float = 1.0,
        concat_params: bool = True,
        inner: Chainable | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = _vector(tensor)
        begin(state, x, setting, self.get_generator(x.device, setting["seed"]))

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        if not tensor.numel():
            return
        chance = torch.rand(2, generator=self.get_generator("cpu", setting["seed"]))
        if float(chance[0]) >= setting["update_probability"]:
            return
        x = _vector(tensor)
        noise = torch.randn(
            x.shape, dtype=x.dtype, device=x.device, generator=self.get_generator(x.device, setting["seed"])
        )
        fit(state, x.add(noise, alpha=setting["damping"]), noise, bool(chance[1] < 0.5), setting)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        out = limit_amplitude(precondition(state, _vector(tensor)), setting["grad_clip_max_amp"])
        return restore_complex(out.reshape(as_real(tensor).shape), tensor).to(tensor.dtype)


def _vector(tensor: Tensor) -> Tensor:
    """All numbers of a tensor as one real vector."""
    return work(as_real(tensor)).reshape(-1)
