"""Reductions of lists on the CPU by compiled code; and the norm, which every form finds from sums of squares."""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .._torch import has_dispatch_mode, is_fake
from . import _backend
from ._backend import KernelError
from ._checks import explain_opaque
from ._lists import ListLayout, has_memory
from ._memory import put_bounded
from ._runtime import CODES, KINDS, Runtime
from ._warm import is_transformed

# Between them neither squares nor their sum have overflowed or lost digits.
_SMALLEST, _LARGEST = 1e-280, 1e300
_SIGNED = ("sum", "dot", "amax")
_DEVICE = operator.attrgetter("device")

Lists = Sequence[Sequence[torch.Tensor]]


class _CompiledReduction:
    """Compiled reductions of lists that look like some lists; it does not hold the lists."""

    __slots__ = ("_codes", "_elements", "_firsts", "_runtime", "_sizes", "layout")

    def __init__(self, lists: Sequence[tuple[torch.Tensor, ...]], runtime: Runtime, signed: bool) -> None:
        self._runtime = runtime
        self.layout = ListLayout(lists, runtime, range(len(lists)) if signed else ())
        self._codes = [CODES[tensors[0].dtype] for tensors in lists]
        self._sizes = array("q", [tensor.numel() for tensor in lists[0]])
        self._elements = sum(self._sizes)
        chunks = [-(-size // Runtime.CHUNK) for size in self._sizes]
        self._firsts = array("q", itertools.accumulate(chunks, initial=0))

    def run(self, addresses: array[int], kind: str, scale: float = 1.0) -> float:
        """Reduce lists at these addresses."""
        if kind == "norm":
            return float(find_root(partial(self.run, addresses)))
        base, count = addresses.buffer_info()[0], len(self._sizes)
        partial_sums = array("d", bytes(16 * max(self._firsts[-1], 1)))
        return float(
            self._runtime.reduce(
                KINDS[kind],
                self._codes[0],
                self._codes[-1],
                count,
                base,
                base + 8 * count * (len(self._codes) - 1),
                self._sizes.buffer_info()[0],
                self._firsts.buffer_info()[0],
                scale,
                partial_sums.buffer_info()[0],
                _backend.threads(self._elements),
            )
        )


# By number of lists and of tensors, and whether signs matter: a program alternates between a few of those.
_compiled: dict[tuple[int, int, bool], _CompiledReduction] = {}


def try_compiled(kind: str, given: Lists, scale: float = 1.0) -> torch.Tensor | None:
    """Reduce by compiled code; None where it can't take the lists, or where they are to be checked first."""
    setting = _backend.mode()
    if not given[0] or setting not in ("auto", "c") or is_transformed() or has_dispatch_mode():
        return None
    lists, signed = [tuple(tensors) for tensors in given], kind in _SIGNED
    key = (len(lists), len(lists[0]), signed)
    reduction = _compiled.get(key)
    match = None if reduction is None else reduction.layout.find(lists, None)
    if match is None and _are_plain(lists):
        runtime = _backend.runtime()
        if isinstance(runtime, str):
            if setting == "c":
                raise KernelError(f"MODULI_KERNELS=c, but reductions can't be compiled: {runtime}")
            return None
        reduction = put_bounded(_compiled, key, _CompiledReduction(lists, runtime, signed))
        match = reduction.layout.find(lists, None)
    if reduction is None or match is None:
        return None
    return torch.tensor(reduction.run(match[1], kind, scale), dtype=torch.float64, device="cpu")


def _are_plain(lists: Sequence[tuple[torch.Tensor, ...]]) -> bool:
    """Whether lists have tensors of the same sizes, each list those of one dtype, contiguous on the CPU."""
    if explain_opaque(lists) is not None or len({tuple(map(torch.numel, tensors)) for tensors in lists}) > 1:
        return False
    return all(
        tensor.dtype is tensors[0].dtype
        and tensor.dtype in CODES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and has_memory(tensor)
        for tensors in lists
        for tensor in tensors
    )


def find_root(reduce: Callable[[str, float], Any]) -> Any:
    """Return the root of a sum of squares, of scaled elements where squares would overflow or underflow."""
    total = reduce("squares", 1.0)
    if isinstance(total, torch.Tensor) and (are_elsewhere([total]) or total.is_meta):
        return total.sqrt()
    total = float(total)
    if _SMALLEST < total < _LARGEST or total != total:
        return math.sqrt(total)
    largest = float(reduce("largest", 1.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    # A power of two, so that scaling rounds nothing.
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(largest)[1]))
    return math.sqrt(float(reduce("squares", scale))) / scale


def are_elsewhere(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of their numbers can't be read without waiting for a device, or at all."""
    return not {device.type for device in set(map(_DEVICE, tensors))} <= {"cpu", "meta"} or any(
        map(is_fake, tensors[:1])
    )
