"""Bounds on how fast updates may grow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import Ranges, allow_none, non_negative, positive
from .._metrics import check_metric, group_tensors, metric_of_all
from .._scalars import choose, divide, larger, smaller
from .._transforms import BufferTransform, ListTransform, Settings, States, Tensors

_RANGES: Ranges = {allow_none(non_negative): ("add",), allow_none(positive): ("mul",), positive: ("min_value",)}


def _check(name: str, add: Any, mul: Any, max_decay: Any) -> None:
    if add is None and mul is None:
        raise ValueError(f"{name}: give add, mul or both")
    if max_decay is not None and not max_decay >= 1:
        raise ValueError(f"{name}: max_decay is {max_decay!r}; give a number of at least 1, or None")


class ClipNormGrowth(ListTransform):
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

    members = "batched"

    shared_settings = ("tensorwise",)
    differentiable = True
    ranges = _RANGES

    def __init__(
        self,
        *,
        add: float | None = None,
        mul: float | None = 1.5,
        min_value: float = 1e-4,
        max_decay: float | None = 2.0,
        ord: Any = 2,
        tensorwise: bool = True,
    ) -> None:
        _check("ClipNormGrowth", add, mul, max_decay)
        check_metric("ClipNormGrowth", ord)
        super().__init__(locals())

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
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


class ClipValueGrowth(BufferTransform):
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

    elementwise = True
    counts = True
    ranges = _RANGES

    def __init__(
        self,
        *,
        add: Any = None,
        mul: Any = 1.5,
        min_value: Any = 1e-4,
        max_decay: Any = 2.0,
    ) -> None:
        _check("ClipValueGrowth", add, mul, max_decay)
        super().__init__(locals())

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
