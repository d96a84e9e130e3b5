"""`Gather`: the entries of an axis rearranged to other labels, as an index that is cached on each device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from .._torch import mark_constant, run_outside
from ._constant import constant


@final
@constant()
class Gather:
    """The positions of wanted labels in a source, -1 for absent ones, cached as an index on each device."""

    __slots__ = ("__weakref__", "_built", "_cpu", "_positions", "_readers", "highest", "missing")

    def __init__(self, positions: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._positions: Final = np.asarray(positions, np.int64)
        self.missing: Final = bool((self._positions < 0).any())
        self.highest: Final = int(self._positions.max(initial=-1))
        self._cpu: torch.Tensor | None = None
        self._readers: dict[str, Callable[[torch.device], torch.Tensor]] = {}
        self._built: dict[tuple[torch.device, str], torch.Tensor] = {}

    # Equality is identity; defined because the compiler requires it.
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
    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The positions, not to be written to."""
        return self._positions

    def reader(self, what: str) -> Callable[[torch.device], torch.Tensor]:
        """Return the function that compiled code calls during tracing for the index or the mask.

        The result of a function marked like this is a constant of the graph, which identifies it by the name of the function:
        so every Gather has separate functions with separate names.
        """
        function = self._readers.get(what)
        if function is None:

            def function(device: torch.device) -> torch.Tensor:
                return self.build(device, what)

            function.__code__ = function.__code__.replace(co_name=f"moduli_{what}_{next(_numbers)}")
            self._readers[what] = mark_constant(function)
        return function

    def build(self, device: torch.device, what: str) -> torch.Tensor:
        """Return the positions as an index on a device, or a mask that is True where the source has the label."""
        tensor = self._built.get((device, what))
        if tensor is None:
            values = self._positions.clip(0) if what == "index" else self._positions >= 0
            # The tensor is cached, so it must not belong to a function transform, a tracer or inference mode.
            tensor = self._built[device, what] = run_outside(torch.tensor, values, device=device)
            tensor._moduli_constant = True  # type: ignore[attr-defined]  # the attribute marks a constant for tracers
        return tensor


_numbers: Final = itertools.count()


def index_of(gather: Gather, data: torch.Tensor) -> torch.Tensor:
    """Return the index of a Gather on the device of data."""
    if is_dynamo_compiling():
        return gather.reader("index")(data.device)
    if data.is_cpu:
        index = gather._cpu
        if index is None:
            index = gather._cpu = gather.build(data.device, "index")
        return index
    return gather.build(data.device, "index")


def gather(data: torch.Tensor, axis: int, plan: Gather, fill: complex | None) -> torch.Tensor:
    """Return the data with one axis rearranged.

    Args:
        data: The data.
        axis: The axis.
        plan: The position of each new entry.
        fill: The value of missing entries; None for NaN.
    """
    if not plan.missing:
        return data.index_select(axis, index_of(plan, data))
    if fill is None:
        fill = _default_fill(data)
    mask = plan.reader("mask")(data.device) if is_dynamo_compiling() else plan.build(data.device, "mask")
    mask = lay_along(mask, axis, data.ndim)
    # A whole number as the fill becomes an integer, so that `where` does not convert integers to floats.
    if not (data.is_floating_point() or data.is_complex() or isinstance(fill, complex)) and fill % 1 == 0:
        fill = bool(fill) if data.dtype is torch.bool and fill in (0, 1) else int(fill)
    if data.shape[axis] == 0:
        wanted = list(data.shape)
        wanted[axis] = plan.size
        return torch.where(mask, data.new_zeros(wanted), fill)
    return torch.where(mask, data.index_select(axis, index_of(plan, data)), fill)


def _default_fill(data: torch.Tensor) -> float:
    """Return NaN, or raise TypeError for a dtype without NaN."""
    if data.is_floating_point() or data.is_complex():
        return math.nan
    raise TypeError(
        f"labels are missing in a tensor of {data.dtype}, which has no NaN to put there: say what to take, as in "
        "mo.join('outer', fill=0), or convert it first with t.float()"
    )


def lay_along(vector: torch.Tensor, axis: int, ndim: int) -> torch.Tensor:
    """Return a vector reshaped so that it broadcasts along one axis.

    Args:
        vector: The vector.
        axis: The axis along which it lies.
        ndim: The number of axes; the others have size one.
    """
    return vector.reshape([-1 if at == axis else 1 for at in range(ndim)])
