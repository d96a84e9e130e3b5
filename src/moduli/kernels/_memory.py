"""Memory: huge pages for large results, and memory on a device that is kept from call to call.

Kept memory lets a step allocate nothing, so that it can be captured in a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .._torch import count_references, count_storage_uses, is_fake
from . import _backend
from ._runtime import Runtime

Memory = dict[Any, Any]
K = TypeVar("K")
V = TypeVar("V")
_MOST_ENTRIES = 16
# From this size on fresh memory is asked for in huge pages.
_LARGE = 4 << 20


def ask_for_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Ask for huge pages for large new tensors on the CPU: the first write then costs fewer page faults."""
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _LARGE and tensor.device.type == "cpu" and _backend.mode() in ("auto", "c"):
            runtime = _backend.runtime()
            if isinstance(runtime, Runtime):
                runtime.huge(tensor.data_ptr(), size)


def put_bounded(cache: dict[K, V], key: K, value: V) -> V:
    """Put an entry into a cache and return it; a full cache is emptied first."""
    if len(cache) >= _MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value


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
    """Return a 0-d buffer for a result: the previous one, unless something else references it."""
    result = memory.get("result")
    if result is not None and count_references(result) <= 3 and _count_uses(result) <= memory["uses"]:
        return result  # type: ignore[no-any-return]
    wide = torch.float32 if device.type == "mps" else torch.float64
    result = memory["result"] = torch.empty((), dtype=wide, device=device)
    memory["uses"] = _count_uses(result)
    return result


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
