"""Schedules: numbers that are functions of the step, for any setting of any link.

A setting takes any function of the step number, from zero; these are the ones that training recipes name. They compare,
print, copy and pickle as values do.

Example:
    >>> from moduli import m
    >>> from moduli.optim import schedules
    >>> rate = schedules.WSD(1e-3, steps=1000, warmup=100, decay=200)
    >>> [round(rate(t), 6) for t in (0, 99, 500, 900, 1000)]
    [1e-05, 0.001, 0.001, 0.0005, 0.0]
    >>> m.LR(rate)
    LR(lr=WSD(peak=0.001, steps=1000, warmup=100, decay=200, floor=0.0, shape='linear'))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ._settings import refuse_string

__all__ = ["WSD", "After", "Cosine"]


@dataclass(frozen=True)
class Cosine:
    r"""Rises linearly over the warmup, then falls along half a cosine.

    For $t < w$: $\frac{t+1}{w}$ of the peak; then $f + (p - f)\,\tfrac12\left(1 + \cos\pi\frac{t-w}{n-w}\right)$ from the
    peak p to the floor f, where it stays from step n on.

    Args:
        peak: The largest value.
        steps: Steps in all, n.
        warmup: Steps of the rise, w.
        floor: The value at the end.

    Example:
        >>> from moduli.optim import schedules
        >>> rate = schedules.Cosine(1.0, steps=10, warmup=2)
        >>> [round(rate(t), 3) for t in (0, 1, 2, 6, 10, 99)]
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    References:
        I. Loshchilov, F. Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.
    """

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check("Cosine", self.steps, self.warmup, peak=self.peak, floor=self.floor)

    def __call__(self, step: int | Tensor) -> Any:
        """Return the value at a step, counted from zero; a 0-d tensor for a 0-d tensor."""
        return WSD(self.peak, self.steps, self.warmup, self.steps - self.warmup, self.floor, "cosine")(step)


@dataclass(frozen=True)
class WSD:
    r"""Warmup, stable, decay: rises linearly, stays at the peak, and falls over the last steps.

    Training can continue from any point of the stable part, and be ended by the decay at any time.

    Args:
        peak: The largest value.
        steps: Steps in all.
        warmup: Steps of the rise.
        decay: Steps of the fall; None for a fifth of all.
        floor: The value at the end.
        shape: The shape of the fall: "linear", "sqrt" (one minus the root of the part that is done) or "cosine".

    Example:
        >>> from moduli.optim import schedules
        >>> rate = schedules.WSD(1.0, steps=10, warmup=2, decay=4, shape="sqrt")
        >>> [round(rate(t), 3) for t in (0, 1, 5, 7, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]

    References:
        S. Hu et al., "MiniCPM: unveiling the potential of small language models", 2024.
        A. Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations", NeurIPS 2024.
    """

    peak: float
    steps: int
    warmup: int = 0
    decay: int | None = None
    floor: float = 0.0
    shape: Literal["linear", "sqrt", "cosine"] = "linear"

    def __post_init__(self) -> None:
        _check("WSD", self.steps, self.warmup, peak=self.peak, floor=self.floor)
        if self.shape not in ("linear", "sqrt", "cosine"):
            raise ValueError(f"WSD: shape is {self.shape!r}; it can be 'linear', 'sqrt' or 'cosine'")
        if not 1 <= self._fall <= self.steps - self.warmup:
            raise ValueError(f"WSD: decay is {self._fall}; give from 1 to {self.steps - self.warmup} steps")

    @property
    def _fall(self) -> int:
        return max(1, self.steps // 5) if self.decay is None else self.decay

    def __call__(self, step: int | Tensor) -> Any:
        """Return the value at a step, counted from zero; a 0-d tensor for a 0-d tensor."""
        if isinstance(step, Tensor):
            return torch.where(step < self.warmup, self.peak * (step + 1) / max(1, self.warmup), self._fall_at(step))
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(max((step - self.steps + self._fall) / self._fall, 0.0), 1.0)
        if self.shape == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * done))
        else:
            left = 1 - (math.sqrt(done) if self.shape == "sqrt" else done)
        return self.floor + (self.peak - self.floor) * left

    def _fall_at(self, step: Tensor) -> Tensor:
        """Return the value after the warmup, at a step that is a tensor."""
        done = ((step - self.steps + self._fall) / self._fall).clamp(0.0, 1.0)
        if self.shape == "cosine":
            left = 0.5 * (1 + torch.cos(math.pi * done))
        else:
            left = 1 - (done.sqrt() if self.shape == "sqrt" else done)
        return self.floor + (self.peak - self.floor) * left


@dataclass(frozen=True)
class After:
    """Zero for the first steps, then a value, which may be a function of the step itself.

    Args:
        steps: The number of steps for which it is zero.
        value: The value after them, or a function of the step.

    Example:
        >>> from moduli.optim import schedules
        >>> [schedules.After(1, 0.01)(t) for t in (0, 1, 2)]
        [0.0, 0.01, 0.01]
    """

    steps: int
    value: Any

    def __post_init__(self) -> None:
        _check("After", self.steps + 1, 0, value=self.value)

    def __call__(self, step: int | Tensor) -> Any:
        """Return the value at a step, counted from zero; a 0-d tensor for a 0-d tensor."""
        if isinstance(step, Tensor):
            return torch.where(step < self.steps, 0.0, self._find_value(step))
        return 0.0 if step < self.steps else self._find_value(step)

    def _find_value(self, step: int | Tensor) -> Any:
        return self.value(step) if callable(self.value) else self.value


def _check(name: str, steps: int, warmup: int, **numbers: Any) -> None:
    for key, value in numbers.items():
        refuse_string(name, key, value)
    for key, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: {key} is {value!r}; give a whole number of steps, at least {least}")
    if warmup >= steps:
        raise ValueError(f"{name}: warmup takes {warmup} of {steps} steps; leave some for the rest")
