"""State of links in host memory: `groups={"*": {"offload": "cpu"}}`.

Between steps the state of such parameters is on the host, for "pinned" in pages that a device reads directly. A fused
pass copies the state of some parameters to the device, runs, and copies it back, so that the device stores little of it at a time.
For an unfused link the state of all of its parameters is copied. Each step copies the state once in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import map_tensors

if TYPE_CHECKING:
    from . import Module
    from ._settings import Binding

PLACES = ("cpu", "pinned")
#: Elements of the parameters whose state is on the device at a time.
STREAMED = 1 << 24


def check_place(value: Any) -> None:
    """Raise ValueError for an unknown place of offloaded state."""
    if value is not None and value not in PLACES:
        raise ValueError(f'offload is {value!r}; it is "cpu", "pinned" (pages that a device reads directly) or None')


def find_place(binding: Binding, param: Tensor) -> str | None:
    """Return the place of a parameter's state between steps; None for the parameter's device."""
    if not binding.offload:
        return None
    slots = binding.slots
    slot = slots.find(param)
    return None if slot is None else binding.offload.get(slots.groups[slots.find_source(slot)])


def is_host(device: torch.device) -> bool:
    """Return whether a device is the host, so that offloading changes nothing."""
    return device.type == "cpu"


def copy_to_host(tensor: Tensor, place: str) -> Tensor:
    """Return a tensor in host memory."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=place == "pinned")
    return copy.copy_(tensor)


def send_row(row: dict[str, Any], place: str | None) -> None:
    """Move the tensors of a row to their place between steps; tensors that are there and numbers stay."""
    for key, value in list(row.items()) if place is not None else ():
        moved = map_tensors(value, lambda tensor: copy_to_host(tensor, str(place)) if tensor.dim() else tensor)
        dict.__setitem__(row, key, moved)  # not counted as a change of the row


def fetch_row(row: dict[str, Any], device: torch.device) -> None:
    """Copy the tensors of a row to a device; numbers stay on the host."""
    for key, value in list(row.items()):
        fetched = map_tensors(value, lambda tensor: tensor.to(device) if tensor.dim() else tensor)
        dict.__setitem__(row, key, fetched)  # not counted as a change of the row


@contextmanager
def fetched_rows(link: Module, params: Sequence[Tensor]) -> Iterator[None]:
    """Copy the state of a link, and of links inside it, to the device of its parameters for a block."""
    binding = link.settings.binding
    places = [find_place(binding, param) for param in params] if binding.offload else []
    if not any(places):
        yield
        return
    links = [each for _, each in link.links()]
    for each in links:
        for row, param, place in zip(each.find_rows(params), params, places, strict=True):
            if place is not None:
                fetch_row(row, param.device)
    try:
        yield
    finally:
        for each in links:
            for row, place in zip(each.find_rows(params), places, strict=True):
                send_row(row, place)


def fetch_columns(columns: Sequence[Sequence[Tensor]], params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return copies of states on the device of their parameters."""
    return [
        [state.to(param.device, non_blocking=True) for state, param in zip(column, params, strict=True)]
        for column in columns
    ]


def store_columns(columns: Sequence[Sequence[Tensor]], fetched: Sequence[Sequence[Tensor]]) -> None:
    """Copy fetched states back to their place between steps.

    Args:
        columns: The stored states.
        fetched: Their copies on the device.
    """
    for column, copies in zip(columns, fetched, strict=True):
        for state, copy in zip(column, copies, strict=True):
            state.copy_(copy)
