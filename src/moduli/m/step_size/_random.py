"""Random step sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._transforms import ListTransform, Settings, States, Tensors


class RandomStepSize(ListTransform):
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
        super().__init__(locals())

    def learn_all(self, tensors: Tensors, states: States, settings: Settings) -> None:
        one: float | None = None
        for state, setting in zip(states, settings, strict=True):
            if one is None or setting["parameterwise"]:
                one = torch.rand((), generator=self.get_generator("cpu", setting["seed"])).item()
            state["factor"] = setting["low"] + (setting["high"] - setting["low"]) * one

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * state["factor"]
