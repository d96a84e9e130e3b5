"""Scalars of a step as 0-d tensors on the device of the parameters, for steps that are captured in a graph.

A captured graph replays device operations with the host's numbers at capture: a step count on the host would stand still. With
`capturable=True` the counts, the other scalars that links change at every step (`numbers`) and the step that schedules are
evaluated at are tensors, which the step itself advances in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._needs import ChainError

if TYPE_CHECKING:
    from . import Module
    from .transform import TensorTransform


class DeviceSteps:
    """The step number on each device that has parameters."""

    def __init__(self) -> None:
        self._counters: dict[torch.device, Tensor] = {}

    def find(self, device: torch.device, step: int) -> Tensor:
        """Return the counter of a device; a new one starts at this step."""
        if device not in self._counters:
            self._counters[device] = place_number(step, device)
        return self._counters[device]

    def advance(self) -> None:
        """Count a step on each device."""
        for counter in self._counters.values():
            counter.add_(1)

    def read(self, step: int) -> int:
        """Return the number of steps including replayed ones; the host's number if no counter is on a device."""
        return next((int(counter) for counter in self._counters.values()), step)

    def clear(self) -> None:
        """Drop the counters: they start again from the number on the host, which was loaded."""
        self._counters.clear()


def place_number(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a new tensor on a device, in double precision where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.full((), float(value), dtype=dtype, device=device)


def read_number(value: Any) -> Any:
    """Return a number that may be a 0-d tensor as a Python number; whole numbers as int."""
    if not isinstance(value, Tensor):
        return value
    number = value.item()
    return int(number) if number == int(number) else number


def advance_copies(link: TensorTransform, numbers: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars of a link after one more step; the input is not changed.

    Args:
        link: The link.
        numbers: Its scalars by name.
        setting: Its settings.
    """
    after = dict(numbers)
    link.advance_numbers(after, setting)
    return after


def check_capturable(links: Sequence[Module], fuse: bool) -> None:
    """Raise ChainError for links whose scalars a captured graph would not advance."""
    from .chain import Chain

    for link in links:
        name = type(link).__name__
        pointwise = getattr(link, "elementwise", isinstance(link, Chain))
        if not pointwise and not link.capturable:
            raise ChainError(f"{name} counts or decides in Python, and a captured graph would repeat one step of it")
        if not fuse and (getattr(link, "counts", False) or getattr(link, "numbers", ())):
            raise ChainError(f"{name} counts its steps on the device only in a fused pass; leave out fuse=False")
        for key, value in link.defaults.items():
            if callable(value):
                if not pointwise:
                    raise ChainError(
                        f"{name}: {key} is a function of the step, which only pointwise links find on a device"
                    )
                _check_schedule(name, key, value)


def _check_schedule(name: str, key: str, schedule: Callable[[Any], Any]) -> None:
    """Raise ChainError for a schedule that branches in Python; it is called with a tensor without a value."""
    try:
        schedule(torch.zeros((), dtype=torch.float64, device="meta"))
    except Exception as error:
        raise ChainError(
            f"{name}: {key} is a function of the step that can't be computed on a device ({error}); in a captured graph the step "
            "is a 0-d tensor: use operations of torch (`torch.where` for a choice, `torch.cos`), or a schedule of "
            "moduli.optim.schedules"
        ) from error
