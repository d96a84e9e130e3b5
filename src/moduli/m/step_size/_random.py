"""Random step sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import TensorTransform


class RandomStepSize(TensorTransform):
    """Multiplies the update by a random number, uniform between two bounds.

    Args:
        low: The lower bound.
        high: The upper bound.
        parameterwise: A number for each tensor; otherwise one for all.
        seed: Seed of the numbers; None uses torch's own generator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> out = optim.step_tensors(m.RandomStepSize(low=0.5, high=1.0, seed=0), [torch.ones(2)])[0]
        >>> bool(out[0] == out[1]), 0.5 <= out[0].item() <= 1.0
        (True, True)
    """

    shared_settings = ("seed",)

    def __init__(
        self, *, low: float = 0.0, high: float = 1.0, parameterwise: bool = False, seed: int | None = None
    ) -> None:
        if low > high:
            raise ValueError(f"RandomStepSize: low is {low!r}, which is above high, {high!r}")
        super().__init__({"low": low, "high": high, "parameterwise": parameterwise, "seed": seed})

    def multi_tensor_update(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        loss: Tensor | None,
        states: list[dict[str, Any]],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        one: float | None = None
        for state, setting in zip(states, settings, strict=True):
            if one is None or setting["parameterwise"]:
                one = torch.rand((), generator=self.get_generator("cpu", setting["seed"])).item()
            state["factor"] = setting["low"] + (setting["high"] - setting["low"]) * one

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        out: Tensor = tensor * state["factor"]
        return out
