"""Norms and elements bounded by what updates were like so far."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import above_one, allow_none, choice, fraction, positive
from .._metrics import check_metric, group_tensors, metric_of_all
from .._scalars import divide, larger, smaller
from .._transforms import BufferTransform, ListTransform, Settings, States, Tensors


class ClipNormByEMA(ListTransform):
    r"""Scales the update down where its norm is above that of a running mean of updates.

    $e_t = \beta e_{t-1} + (1-\beta) u_t$, the growth of $\|e\|$ per step bounded, and
    $u \leftarrow u \min(1, \|e_t\| / \|u\|)$.

    Args:
        beta: Memory of the mean.
        ord: The norm: p, or a name as in `ClipNorm`.
        tensorwise: A norm for each tensor; False: one over all parameters.
        max_ema_growth: How much the norm of the mean may grow in a step, above 1; None: as it likes.
        init: The mean starts at zero (0), or at the first "update".
        min_norm: A norm of the mean below this may grow as one of this size.
        inner: Links that transform the update before it is scaled, after the mean was learnt.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.ClipNormByEMA(beta=0.5, init="update"), torch.zeros(1)
        >>> for u in (1.0, 9.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([1.5000])]
    """

    members = "batched"

    shared_settings = ("tensorwise",)
    differentiable = True
    normalize: bool = False
    ranges = {fraction: ("beta",), positive: ("min_norm",), allow_none(above_one): ("max_ema_growth",)}

    def __init__(
        self,
        *,
        beta: float = 0.99,
        ord: Any = 2,
        tensorwise: bool = True,
        max_ema_growth: float | None = 1.5,
        init: Literal["update"] | float = 0.0,
        min_norm: float = 1e-6,
        inner: Chainable | None = None,
    ) -> None:
        check_metric(type(self).__name__, ord)
        choice(type(self).__name__, "init", init, (0, "update"))
        super().__init__(locals())
        self.add_projected_keys("grad", "exp_avg")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"] = tensor.clone() if setting["init"] == "update" else torch.zeros_like(tensor)
        state["norm"] = None

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            state["exp_avg"].lerp_(tensor, 1 - setting["beta"])
        for group in group_tensors(len(tensors), settings[0]["tensorwise"]):
            first, setting = states[group[0]], settings[group[0]]
            means = [states[i]["exp_avg"] for i in group]
            size, growth = metric_of_all(means, setting["ord"]), setting["max_ema_growth"]
            if growth is not None and first["norm"] is not None:
                limit = larger(first["norm"], setting["min_norm"]) * growth
                scale = smaller(divide(limit, size, 1.0), 1.0)
                if isinstance(scale, Tensor) or scale < 1:
                    for i, mean in zip(group, means, strict=True):
                        states[i]["exp_avg"] = mean * scale
                    size = smaller(size, limit)
            for i in group:
                states[i]["norm"] = size

    def transform_all(self, tensors: Tensors, states: States, settings: Settings) -> list[Tensor]:
        out = list(tensors)
        for group in group_tensors(len(tensors), settings[0]["tensorwise"]):
            size = metric_of_all([tensors[i] for i in group], settings[group[0]]["ord"])
            target = states[group[0]]["norm"]
            scale = divide(target, size, 1.0)
            if isinstance(scale, Tensor) and not self.normalize:
                scale = smaller(scale, 1.0)
            if self.normalize or isinstance(scale, Tensor) or scale < 1:
                for i in group:
                    out[i] = tensors[i] * scale
        return out


class NormalizeByEMA(ClipNormByEMA):
    r"""Scales the update to the norm of a running mean of updates: `ClipNormByEMA` that scales up too.

    Args:
        beta: Memory of the mean.
        ord: The norm: p, or a name as in `ClipNorm`.
        tensorwise: A norm for each tensor; False: one over all parameters.
        max_ema_growth: How much the norm of the mean may grow in a step, above 1; None: as it likes.
        init: The mean starts at zero (0), or at the first "update".
        min_norm: A norm of the mean below this may grow as one of this size.
        inner: Links that transform the update before it is scaled, after the mean was learnt.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.NormalizeByEMA(beta=0.5, init="update"), torch.zeros(1)
        >>> for u in (4.0, 2.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([3.])]
    """

    normalize = True


class ClipValueByEMA(BufferTransform):
    r"""Keeps each element within a running mean of its size, $|u_i| \le e_i$ with $e$ the mean of $|u|$.

    Args:
        beta: Memory of the mean.
        init: The mean starts at zero (0), or at the first "update".
        inner: Links that transform the update before it is clipped, after the mean was learnt.
        exp_avg_tfm: Links that transform a copy of the mean before it bounds the update.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.ClipValueByEMA(beta=0.5, init="update"), torch.zeros(1)
        >>> for u in (1.0, -9.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([-5.])]
    """

    elementwise = True
    static = ("init",)
    tfms = {"exp_avg_tfm": ("exp_avg_abs",)}
    ranges = {fraction: ("beta",)}

    def __init__(
        self,
        *,
        beta: Any = 0.99,
        init: Literal["update"] | float = 0.0,
        inner: Chainable | None = None,
        exp_avg_tfm: Chainable | None = None,
    ) -> None:
        choice("ClipValueByEMA", "init", init, (0, "update"))
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg_abs"] = tensor.abs() if setting["init"] == "update" else torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg_abs"].lerp_(tensor.abs(), 1 - setting["beta"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        bound = state["exp_avg_abs"]
        return torch.minimum(torch.maximum(tensor, -bound), bound)
