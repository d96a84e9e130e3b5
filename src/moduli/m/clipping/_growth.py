"""Sizes of updates bounded by those of earlier ones.

* Bounds on the growth of updates.
* Norms and elements bounded by running means of earlier updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...optim import BufferTransform, Chainable, ListTransform, Setting, SettingsList, States, Tensors
from ...optim import ranges as check
from .._measures import check_metric, choose, divide, group_tensors, larger, metric_of_all, smaller


class _Growth(BufferTransform):
    ranges = {
        check.allow(check.non_negative, None): ("add",),
        check.allow(check.positive, None): ("mul",),
        check.positive: ("min_value",),
    }

    def collect(self, given: Mapping[str, Any]) -> None:
        name, most = type(self).__name__, given["max_decay"]
        if given["add"] is None and given["mul"] is None:
            raise ValueError(f"{name}: give add, mul or both")
        if most is not None and not most >= 1:
            raise ValueError(f"{name}: max_decay is {most!r}; give a number of at least 1, or None")
        super().collect(given)


class ClipNormGrowth(_Growth, ListTransform):
    r"""Bounds the norm of the update by that of the last one: at most $n_- + a$ and $m\,n_-$.

    Args:
        add: The largest growth a; None: none.
        mul: The largest ratio m; None: none.
        min_value: The norm that is remembered is at least this.
        max_decay: The norm that is remembered shrinks at most by this factor in a step; None: as it likes.
        ord: The norm: p, or a name as in `ClipNorm`.
        tensorwise: A norm for each tensor; False: one over all parameters.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.ClipNormGrowth(mul=2.0), torch.zeros(1)
        >>> for u in (1.0, 9.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([2.])]
    """

    clips = True
    members = "batched"

    shared_settings = ("tensorwise",)
    differentiable = True
    ranges = {check_metric: ("ord",)}

    add: float | None = None
    mul: float | None = 1.5
    min_value: float = 1e-4
    max_decay: float | None = 2.0
    ord: float | str = 2
    tensorwise: bool = True

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
        for group in group_tensors(len(tensors), settings[0]["tensorwise"]):
            setting, state = settings[group[0]], states[group[0]]
            size = metric_of_all([tensors[i] for i in group], setting["ord"])
            scale, last = 1.0, state.get("norm")
            if last is not None:
                limit = smaller(
                    last + setting["add"] if setting["add"] is not None else last * 0 + float("inf"),
                    last * setting["mul"] if setting["mul"] is not None else last * 0 + float("inf"),
                )
                scale = choose(size > limit, divide(limit, size, 1.0), 1.0)
                size = smaller(size, limit)
                if setting["max_decay"] is not None:
                    size = larger(size, last / setting["max_decay"])
            for i in group:
                states[i]["norm"], states[i]["scale"] = larger(size, setting["min_value"]), scale

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * state["scale"]


class ClipValueGrowth(_Growth):
    r"""Bounds the size of each element by that of the last one: at most $|u_-| + a$ and $m\,|u_-|$.

    Args:
        add: The largest growth a; None: none.
        mul: The largest ratio m; None: none.
        min_value: The size that is remembered is at least this.
        max_decay: The size that is remembered shrinks at most by this factor in a step; None: as it likes.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.ClipValueGrowth(mul=2.0), torch.zeros(2)
        >>> for u in ([1.0, 1.0], [-9.0, 1.5]):
        ...     out = optim.step_tensors(link, [torch.tensor(u)], params=[w])
        >>> out
        [tensor([-2.0000,  1.5000])]
    """

    clips = True
    elementwise = True
    counts = True

    add: Any = None
    mul: Setting = 1.5
    min_value: Setting = 1e-4
    max_decay: Setting = 2.0

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["size"] = tensor.abs().clamp(min=setting["min_value"])
        state["bound"] = tensor.abs()

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        size, last = tensor.abs(), state["size"]
        bound: Any = None
        if setting["mul"] is not None:
            bound = last * setting["mul"]
        if setting["add"] is not None:
            bound = last + setting["add"] if bound is None else torch.minimum(bound, last + setting["add"])
        # The first update is not bounded.
        first = 0.0 ** (state["step"] - 1)
        bound = torch.maximum(bound, size * first)
        state["bound"] = bound
        new = torch.minimum(size, bound)
        if setting["max_decay"] is not None:
            new = torch.maximum(new, last / setting["max_decay"])
        state["size"] = new.clamp(min=setting["min_value"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        bound = state["bound"]
        return torch.minimum(torch.maximum(tensor, -bound), bound)


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
        inner: Links that transform the update before it is scaled, after the mean was updated.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.ClipNormByEMA(beta=0.5, init="update"), torch.zeros(1)
        >>> for u in (1.0, 9.0):
        ...     out = optim.step_tensors(link, [torch.tensor([u])], params=[w])
        >>> out
        [tensor([1.5000])]
    """

    clips = True
    members = "batched"

    shared_settings = ("tensorwise",)
    differentiable = True
    normalize: ClassVar[bool] = False
    ranges = {
        check.fraction: ("beta",),
        check.positive: ("min_norm",),
        check.allow(check.above_one, None): ("max_ema_growth",),
        check.one_of(0, "update"): ("init",),
        check_metric: ("ord",),
    }

    projects = {"grad": ("exp_avg",)}

    beta: float = 0.99
    ord: float | str = 2
    tensorwise: bool = True
    max_ema_growth: float | None = 1.5
    init: Literal["update"] | float = 0.0
    min_norm: float = 1e-6
    inner: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"] = tensor.clone() if setting["init"] == "update" else torch.zeros_like(tensor)
        state["norm"] = None

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
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

    def transform_all(self, tensors: Tensors, states: States, settings: SettingsList) -> list[Tensor]:
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
        inner: Links that transform the update before it is scaled, after the mean was updated.

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
        inner: Links that transform the update before it is clipped, after the mean was updated.
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

    clips = True
    elementwise = True
    static = ("init",)
    tfms = {"exp_avg_tfm": ("exp_avg_abs",)}
    ranges = {check.fraction: ("beta",), check.one_of(0, "update"): ("init",)}

    beta: Setting = 0.99
    init: Literal["update"] | float = 0.0
    inner: Chainable | None = None
    exp_avg_tfm: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg_abs"] = tensor.abs() if setting["init"] == "update" else torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg_abs"].lerp_(tensor.abs(), 1 - setting["beta"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        bound = state["exp_avg_abs"]
        return torch.minimum(torch.maximum(tensor, -bound), bound)
