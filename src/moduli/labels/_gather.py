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
@constant()
class Gather:
    """For each wanted label its position in the source, or -1 where the source has none."""

    __slots__ = ("__weakref__", "_cpu", "_made", "_positions", "_readers", "highest", "missing")

    def __init__(self, positions: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._positions: Final = np.asarray(positions, np.int64)
        self.missing: Final = bool((self._positions < 0).any())
        self.highest: Final = int(self._positions.max(initial=-1))
        self._cpu: torch.Tensor | None = None
        self._readers: dict[str, Callable[[torch.device], torch.Tensor]] = {}
        self._made: dict[tuple[torch.device, str], torch.Tensor] = {}

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

            def found(device: torch.device) -> torch.Tensor:
                return self.build(device, what)

            found.__code__ = found.__code__.replace(co_name=f"moduli_{what}_{next(_numbers)}")
            self._readers[what] = mark_constant(found)
        return found

    def build(self, device: torch.device, what: str) -> torch.Tensor:
        """The places as an index on a device, or as a mask: True where the source has the label."""
        found = self._made.get((device, what))
        if found is None:
            values = self._positions.clip(0) if what == "index" else self._positions >= 0
            # It outlives the call: it must not belong to a function transform, a tracer or inference mode that is active.
            found = self._made[device, what] = run_outside(torch.tensor, values, device=device)
            found._moduli_constant = True  # type: ignore[attr-defined]  # what is computed with it depends on nothing more
        return found


_numbers: Final = itertools.count()


def index_of(gather: Gather, data: torch.Tensor) -> torch.Tensor:
    """The index of a Gather, where the data is."""
    if is_dynamo_compiling():
        return gather.reader("index")(data.device)
    if data.is_cpu:
        found = gather._cpu
        if found is None:
            found = gather._cpu = gather.build(data.device, "index")
        return found
    return gather.build(data.device, "index")


def gather(data: torch.Tensor, axis: int, plan: Gather, fill: Any) -> torch.Tensor:
    """The data with one axis rearranged; what is missing becomes `fill`."""
    if not plan.missing:
        return data.index_select(axis, index_of(plan, data))
    mask = plan.reader("mask")(data.device) if is_dynamo_compiling() else plan.build(data.device, "mask")
    mask = lay_along(mask, axis, data.ndim)
    # 0.0 in integers is 0: a float that is a whole number must not turn integers into floats and round them.
    if not (data.is_floating_point() or data.is_complex() or isinstance(fill, complex)) and fill % 1 == 0:
        fill = bool(fill) if data.dtype is torch.bool and fill in (0, 1) else int(fill)
    if data.shape[axis] == 0:
        wanted = list(data.shape)
        wanted[axis] = plan.size
        return torch.where(mask, data.new_zeros(wanted), fill)
    return torch.where(mask, data.index_select(axis, index_of(plan, data)), fill)


def lay_along(vector: torch.Tensor, axis: int, ndim: int) -> torch.Tensor:
    """A vector as a tensor of more axes, all of size one but one."""
    return vector.reshape([-1 if at == axis else 1 for at in range(ndim)])
