"""Memory: huge pages for large results, temporaries that may be overwritten, and reused buffers on a device.

With reused buffers a step allocates nothing, so that it can be captured in a graph.
"""

from __future__ import annotations

import gc
import mmap
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
# From this size on new memory is requested in huge pages.
_LARGE = 4 << 20


def ask_for_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Ask for huge pages for large new tensors on the CPU: the first write then costs fewer page faults."""
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _LARGE and tensor.device.type == "cpu" and _backend.mode() in ("auto", "c"):
            runtime = _backend.runtime()
            if isinstance(runtime, Runtime):
                runtime.huge(tensor.data_ptr(), size)


# New memory costs more than the arithmetic on it: the system maps it in pages of 4 KB, each with a page fault. An
# allocator reuses freed memory for the next result, but not if a whole model was freed at once. One mapping in huge pages
# has a five-hundredth of the faults.
_MANY_ELEMENTS = 1 << 22
_ALIGNMENT = 64
_PAGE = 1 << 21
_HUGE: int = getattr(mmap, "MADV_HUGEPAGE", 0)


def allocate_large(tensors: Sequence[torch.Tensor], numel: int) -> list[torch.Tensor] | None:
    """Return uninitialised contiguous tensors of the shapes and dtypes of others, in huge pages.

    Args:
        tensors: The others.
        numel: The total number of their elements.

    Each has a separate storage, so saving one of them writes that part only, and a separate version counter. The
    mapping is freed with the last of them.

    Returns:
        The tensors; None if the allocator is faster: fewer than four million elements, or not plain
        floating numbers on the CPU.

    Example:
        >>> from moduli import kernels
        >>> print(kernels.allocate_large([torch.zeros(3)], 3))
        None
    """
    if numel < _MANY_ELEMENTS or not _HUGE:
        return None
    if not all(t.device.type == "cpu" and t.is_floating_point() and t.layout is torch.strided for t in tensors):
        return None
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, end + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_HUGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _PAGE
    results = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        count, dtype = tensor.numel(), tensor.dtype
        part = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + offset) if count else tensor.detach()
        results.append(part.view(tensor.shape))
    return results


def find_temporaries(left: Any, right: Any, reflected: bool = False) -> tuple[bool, bool]:
    """Return which operands exist only inside the expression that is being computed, as NumPy elides temporaries.

    It is called by `_binary(self, fn, other, reflected)`, which the operators of a class call. The number of references added by
    a call depends on the interpreter, and on whether tools such as torch.compile watch its frames at this moment, so counts are
    compared with those of new values. If the interpreter does not count a named value more often than a nameless
    one, no operand is a temporary.

    Args:
        left: The operand whose method is called.
        right: The other one.
        reflected: Whether the method is a reflected one, such as `__rmul__`.

    Example:
        >>> from moduli import kernels
        >>> class Value:
        ...     def _binary(self, fn, other, reflected=False):
        ...         return kernels.find_temporaries(self, other, reflected)
        ...     def __mul__(self, other):
        ...         return self._binary(None, other)
        >>> named = Value()
        >>> named * Value()
        (False, True)
    """
    counts = _count_both(left, right)
    named = _ReferenceProbe()
    if reflected:
        alone, with_name = 1 * _ReferenceProbe(), 1 * named
    else:
        alone, with_name = _ReferenceProbe() * _ReferenceProbe(), (named * 1)[:1] + (_ReferenceProbe() * named)[1:]
    first, second = (counts[i] <= alone[i] < with_name[i] for i in (0, 1))
    return first, second and not reflected


def _count_both(left: Any, right: Any) -> tuple[int, int]:
    return count_references(left), count_references(right)


class _ReferenceProbe:
    """Counts the references to operands as an operator does that is a function around `_binary`."""

    __slots__ = ()

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> tuple[int, int]:
        return _pass_on(self, other)

    def __mul__(self, other: Any) -> tuple[int, int]:
        return self._binary(None, other)

    def __rmul__(self, other: Any) -> tuple[int, int]:
        return self._binary(None, other, True)


def _pass_on(left: Any, right: Any, reflected: bool = False) -> tuple[int, int]:
    return _count_both(left, right)


def put_bounded(cache: dict[K, V], key: K, value: V) -> V:
    """Put an entry into a cache and return it; a full cache is cleared first.

    Args:
        cache: The cache.
        key: The key.
        value: The value.
    """
    if len(cache) >= _MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value


class KeptMemory:
    """Reused buffers for calls of one kind: tensors by any key, one set for each stream."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[Any, list[Memory]] = {}

    @contextmanager
    def open(self, like: torch.Tensor) -> Iterator[Memory]:
        """Yield the buffers for calls on the current stream of a tensor's device.

        They are used by one call at a time: a concurrent thread gets a new set.
        """
        waiting = self._waiting.setdefault(_find_order(like), [])
        try:
            memory = waiting.pop()
        except IndexError:
            memory = {}
        yield memory
        waiting.append(memory)


def _find_order(like: torch.Tensor) -> Any:
    """Return the stream, on which calls are ordered so that they may share buffers; the mode of fake tensors for those."""
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


class pause_collection:
    """A context in which Python's garbage collector is off; reference counting still frees memory.

    Thousands of new long-lived objects would trigger collections of the whole program, which take longer than to create
    them, and finalizers of other libraries would run in between.

    Example:
        >>> import gc
        >>> from moduli import kernels
        >>> with kernels.pause_collection():
        ...     gc.isenabled()
        False
    """

    __slots__ = ("_collects",)

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._collects:
            gc.enable()
