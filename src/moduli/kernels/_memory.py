"""Memory on a device that is kept from call to call, so that a step allocates nothing and can be captured in a graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._torch import count_references, count_storage_uses, is_fake

Memory = dict[Any, Any]


class KeptMemory:
    """What calls of one kind leave their values in: tensors by any key, one set for each stream."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[Any, list[Memory]] = {}

    @contextmanager
    def open(self, like: torch.Tensor) -> Iterator[Memory]:
        """The memory for calls on the current stream of a tensor's device.

        It is held by one call at a time: another thread that comes in between begins its own.
        """
        waiting = self._waiting.setdefault(_find_order(like), [])
        try:
            memory = waiting.pop()
        except IndexError:
            memory = {}
        yield memory
        waiting.append(memory)


def _find_order(like: torch.Tensor) -> Any:
    """What orders calls so that they may share memory: the stream, or the mode of tensors that have no numbers."""
    if is_fake(like):
        return like.fake_mode  # type: ignore[attr-defined]
    return None if like.device.type == "cpu" else torch.accelerator.current_stream(like.device).stream_id


def take_result(memory: Memory, device: torch.device) -> torch.Tensor:
    """A place for a number on a device: that of the last one, where no one else holds it."""
    held = memory.get("result")
    if held is not None and count_references(held) <= 3 and _count_uses(held) <= memory["uses"]:
        return held  # type: ignore[no-any-return]
    wide = torch.float32 if device.type == "mps" else torch.float64
    held = memory["result"] = torch.empty((), dtype=wide, device=device)
    memory["uses"] = _count_uses(held)
    return held


def _count_uses(tensor: torch.Tensor) -> int:
    return 0 if is_fake(tensor) else count_storage_uses(tensor)


@contextmanager
def pause_collection() -> Iterator[None]:
    """A block in which Python looks for no cycles of garbage; reference counts free the rest as ever.

    Thousands of objects that are made to be kept would have it look through all of a program, which takes longer than to make
    them, and finalizers of others would run in between.

    Example:
        >>> import gc
        >>> from moduli import kernels
        >>> with kernels.pause_collection():
        ...     gc.isenabled()
        False
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
