"""CAME: Adafactor with momentum that is trusted where it is stable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import fraction, positive
from .._transforms import MatrixTransform
from ._adafactor import factor, rebuild, root_mean_square, update_factors
from ._axes import work


class CAME(MatrixTransform):
    r"""Scales by a factored second moment, takes a running mean, and divides by how unstable that mean is.

    $\hat u = u/\sqrt{\hat V}$ clipped as in `Adafactor`, with memory $\beta_2$;
    $m = \beta_1 m + (1-\beta_1)\hat u$; the instability $(\hat u - m)^2 + \epsilon_2$ has factored running means of memory
    $\beta_3$, rebuilt as S, and $u \leftarrow m/\sqrt S$. Of vectors the step is m.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the second moment.
        beta3: Memory of the instability.
        eps1: Added to the square of the update.
        eps2: Added to the instability.
        clip: The largest root mean square of a scaled update, d.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(8, 8))
        >>> opt = mo.Optimizer([w], m.CAME(), m.LR(0.01))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        Y. Luo et al., "CAME: confidence-guided adaptive memory efficient optimization", ACL 2023, Algorithm 2.
    """

    ranges = {fraction: ("beta1", "beta2", "beta3"), positive: ("eps1", "eps2", "clip")}

    def __init__(
        self,
        *,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        beta3: Any = 0.9999,
        eps1: Any = 1e-30,
        eps2: Any = 1e-16,
        clip: Any = 1.0,
    ) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"] = torch.zeros_like(tensor)
        factor(state, tensor.abs())
        if tensor.dim() >= 2:
            factor(state, tensor.abs(), "instability_")

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        if not tensor.numel():
            return
        u = work(tensor)
        update_factors(state, u.abs().square() + setting["eps1"], setting["beta2"])
        scaled = u * rebuild(state).rsqrt()
        scaled = scaled / (root_mean_square(scaled) / setting["clip"]).clamp(min=1.0)
        state["exp_avg"].lerp_(scaled, 1 - setting["beta1"])
        if tensor.dim() >= 2:
            away = (scaled - state["exp_avg"]).abs().square() + setting["eps2"]
            update_factors(state, away, setting["beta3"], "instability_")

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        out: Tensor = state["exp_avg"]
        if tensor.dim() >= 2 and tensor.numel():
            out = out * rebuild(state, "instability_").rsqrt()
        return out.to(tensor.dtype, copy=True)
