"""MARS: a gradient corrected by its change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Across
from .._checks import allow_none, fraction, positive
from .._lists import norm
from .._scalars import divide, smaller
from .._transforms import ListTransform, Settings, States, Tensors


class MARSCorrection(ListTransform):
    r"""Adds a multiple of the change of the update, which makes the momentum that follows vary less.

    $c_t = u_t + \gamma \frac{\beta}{1-\beta}(u_t - u_{t-1})$, scaled down to norm at most 1 over all parameters. Put it
    before `Adam(beta1=...)` or `Lion` with the same $\beta$. It is the approximate variant, with the last update in place of
    the last parameters' gradient on this batch; inside `Online` it is the exact one.

    Args:
        beta: The memory of the momentum that follows.
        scaling: The factor $\gamma$.
        max_norm: The largest norm; None: any.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.MARSCorrection(beta=0.5, scaling=0.5, max_norm=None), torch.zeros(1)
        >>> for u in (1.0, 2.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([2.5000])]

    References:
        H. Yuan, Y. Liu, S. Wu, X. Zhou, Q. Gu, "MARS: unleashing the power of variance reduction for training large
        models", 2024.
    """

    members = "batched"

    across = Across.SUMS

    shared_settings = ("max_norm",)
    buffers = {"change": "grad"}
    ranges = {fraction: ("beta",), positive: ("scaling",), allow_none(positive): ("max_norm",)}

    def __init__(self, *, beta: float = 0.9, scaling: float = 0.025, max_norm: float | None = 1.0) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad", "previous")

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        previous = state.get("previous")
        state["change"] = torch.zeros_like(tensor) if previous is None else tensor - previous
        state["previous"] = tensor.clone()

    def transform_all(self, tensors: Tensors, states: States, settings: Settings) -> list[Tensor]:
        out = []
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            beta = setting["beta"]
            out.append(tensor.add(state["change"], alpha=setting["scaling"] * beta / (1 - beta)))
        limit = settings[0]["max_norm"]
        if limit is not None:
            scale = smaller(divide(limit, norm(out), 1.0), 1.0)
            if isinstance(scale, Tensor) or scale < 1:
                out = [tensor.mul_(scale) for tensor in out]
        return out

    def reset_for_online(self) -> None:
        """Forgets the last update."""
        super().reset_for_online()
        self.clear_state_keys("previous")
