"""Gather: the entries of an axis, rearranged to other labels, as an index that is made once per device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from .._torch import mark_constant, run_outside
from ._constant import constant


@final
@constant("highest", "missing", "positions", "size", "reader")
class Gather:
    """For each wanted label its position in the source, or -1 where the source has none."""

    __slots__ = ("__weakref__", "_cpu", "_indices", "_masks", "_positions", "_readers", "highest", "missing")

    def __init__(self, positions: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._positions: Final = np.asarray(positions, np.int64)
        self.missing: Final = bool((self._positions < 0).any())
        self.highest: Final = int(self._positions.max(initial=-1))
        self._cpu: torch.Tensor | None = None
        self._readers: dict[str, Callable[[torch.device], torch.Tensor]] = {}
        self._indices: dict[torch.device, torch.Tensor] = {}
        self._masks: dict[torch.device, torch.Tensor] = {}

    # A plan is what it is: compared by identity, said here because the compiler asks for it.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Gather], tuple[Any]]:
        return Gather, (self._positions,)

    @property
    def size(self) -> int:
        """The number of wanted labels."""
        return len(self._positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions, -1 where there is none."""
        return tuple(self._positions.tolist())

    def reader(self, what: str) -> Callable[[torch.device], torch.Tensor]:
        """The function that compiled code calls, while it is traced, for the index or the mask.

        What a function marked like this returns is a constant of the graph, and goes by the name of the function: so
        every Gather has functions, and names, of its own.
        """
        found = self._readers.get(what)
        if found is None:
            make: Callable[[torch.device], torch.Tensor] = self.index if what == "index" else self.mask

            def found(device: torch.device) -> torch.Tensor:
                return make(device)

            found.__code__ = found.__code__.replace(co_name=f"moduli_{what}_{next(_numbers)}")
            self._readers[what] = mark_constant(found)
        return found

    def index(self, device: torch.device) -> torch.Tensor:
        """The places as an index on a device."""
        found = self._indices.get(device)
        if found is None:
            found = self._indices[device] = _constant(self._positions.clip(0), device)
        return found

    def mask(self, device: torch.device) -> torch.Tensor:
        """True where the source has the label."""
        found = self._masks.get(device)
        if found is None:
            found = self._masks[device] = _constant(self._positions >= 0, device)
        return found


_numbers: Final = itertools.count()


def _constant(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    # It outlives the call, so it must not belong to a function transform, a tracer or inference mode that is active now.
    made = run_outside(torch.tensor, values, device=device)
    made._moduli_constant = True  # type: ignore[attr-defined]  # what was computed with it depends on nothing more
    return made


def index_of(gather: Gather, data: torch.Tensor) -> torch.Tensor:
    """The index of a Gather, where the data is."""
    if is_dynamo_compiling():
        return gather.reader("index")(data.device)
    if data.is_cpu:
        found = gather._cpu
        if found is None:
            found = gather._cpu = gather.index(data.device)
        return found
    return gather.index(data.device)


def mask_of(gather: Gather, data: torch.Tensor) -> torch.Tensor:
    """The mask of a Gather, where the data is."""
    if is_dynamo_compiling():
        return gather.reader("mask")(data.device)
    return gather.mask(data.device)


def gather(data: torch.Tensor, axis: int, plan: Gather, fill: Any) -> torch.Tensor:
    """The data with one axis rearranged; what is missing becomes `fill`."""
    if not plan.missing:
        return data.index_select(axis, index_of(plan, data))
    shape = [1] * data.ndim
    shape[axis] = -1
    mask = mask_of(plan, data).reshape(shape)
    # 0.0 in integers is 0: a float that is a whole number must not turn integers into floats and round them.
    if not (data.is_floating_point() or data.is_complex() or isinstance(fill, complex)) and fill % 1 == 0:
        fill = bool(fill) if data.dtype is torch.bool and fill in (0, 1) else int(fill)
    if data.shape[axis] == 0:
        wanted = list(data.shape)
        wanted[axis] = plan.size
        return torch.where(mask, data.new_zeros(wanted), fill)
    return torch.where(mask, data.index_select(axis, index_of(plan, data)), fill)
