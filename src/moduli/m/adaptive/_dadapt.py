"""D-Adaptation: Adam that learns its step size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import above_one, fraction, non_negative, positive
from .._lists import dot
from .._scalars import divide, larger, read, smaller
from .._transforms import ListTransform, Settings, States, Tensors
from ._axes import work


class DAdaptAdam(ListTransform):
    r"""Adam times a lower bound d of the distance to the solution, which only grows.

    With $A = \operatorname{diag}(\sqrt v + \epsilon)$ and $\rho = \sqrt{\beta_2}$,
    $m = \beta_1 m + (1-\beta_1)\, \gamma d\, u,\quad v = \beta_2 v + (1-\beta_2) u^2$,
    $r = \rho r + (1-\rho)\, \gamma d\, \langle u, A^{-1} s\rangle,\quad s = \rho s + (1-\rho)\, \gamma d\, u$,
    $u \leftarrow A^{-1} m$, and then $d \leftarrow \max\left(d,\ \frac{r}{(1-\rho)\|s\|_1}\right)$. No step size is needed:
    put `LR(1.0)` after it. The bound has to know of a schedule, which is given as `gamma`.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the denominator.
        d0: The first bound: small, and below the true distance.
        growth_rate: How much the bound may grow in a step.
        gamma: A factor of the steps that is part of the bound, usually a schedule that ends at 0.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([5.0]))
        >>> opt = mo.Optimizer([w], m.DAdaptAdam(), m.LR(1.0))
        >>> for _ in range(300):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 0.5
        True

    References:
        A. Defazio, K. Mishchenko, "Learning-rate-free learning by D-adaptation", ICML 2023, Algorithm 5.
    """

    members = "batched"
    shared_settings = ("d0", "growth_rate")
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {
        fraction: ("beta1", "beta2"),
        non_negative: ("eps", "gamma"),
        positive: ("d0",),
        above_one: ("growth_rate",),
    }

    def __init__(
        self,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        d0: float = 1e-6,
        growth_rate: float = float("inf"),
        gamma: Any = 1.0,
    ) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)  # what is multiplied by a small bound is nothing in half precision
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(tensor.abs())
        state["s"] = torch.zeros_like(tensor)

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
        tensors = [work(tensor) for tensor in tensors]
        memory, setting = self.global_state, settings[0]
        d = memory.get("d", setting["d0"])
        rho = setting["beta2"] ** 0.5
        gained: Any = 0.0
        total: Any = 0.0
        for tensor, state, row in zip(tensors, states, settings, strict=True):
            square = tensor.abs().square() if tensor.is_complex() else tensor * tensor
            size = d * row["gamma"]
            state["exp_avg"].mul_(row["beta1"]).add_(tensor * (size * (1 - row["beta1"])))
            state["exp_avg_sq"].mul_(row["beta2"]).add_(square, alpha=1 - row["beta2"])
            denominator = state["exp_avg_sq"].sqrt() + row["eps"]
            gained = gained + size * dot([tensor], [state["s"] / torch.where(denominator > 0, denominator, 1.0)])
            state["s"].mul_(rho).add_(tensor * (size * (1 - rho)))
            total = total + read(state["s"].abs().sum(dtype=torch.float64))
        memory["r"] = rho * memory.get("r", 0.0) + (1 - rho) * gained
        found = divide(memory["r"], (1 - rho) * total, 0.0)
        memory["d"] = larger(d, smaller(found, d * setting["growth_rate"]))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        out = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + setting["eps"])
        return out.to(tensor.dtype)
