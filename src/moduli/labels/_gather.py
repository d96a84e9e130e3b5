"""Gather: the entries of an axis, rearranged to other labels, as an index that is made once per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch.compiler import is_dynamo_compiling

from ._constant import constant

__all__ = ["Gather", "gather"]


@final
@constant("highest", "missing", "places", "positions", "present", "size")
class Gather:
    """For each wanted label its position in the source, or -1 where the source has none."""

    __slots__ = ("__weakref__", "_indices", "_masks", "highest", "missing", "positions")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions: Final = tuple(positions)
        self.missing: Final = -1 in self.positions
        self.highest: Final = max(self.positions, default=-1)
        self._indices: dict[torch.device, torch.Tensor] = {}
        self._masks: dict[torch.device, torch.Tensor] = {}

    # A plan is what it is: compared by identity, said here because the compiler asks for it.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Gather], tuple[tuple[int, ...]]]:
        return Gather, (self.positions,)

    @property
    def size(self) -> int:
        """The number of wanted labels."""
        return len(self.positions)

    @property
    def places(self) -> tuple[int, ...]:
        """The positions; 0 where there is none."""
        return tuple(max(at, 0) for at in self.positions)

    @property
    def present(self) -> tuple[bool, ...]:
        """Whether the source has the label."""
        return tuple(at >= 0 for at in self.positions)

    def index(self, device: torch.device) -> torch.Tensor:
        """The places as an index on a device."""
        found = self._indices.get(device)
        if found is None:
            found = self._indices[device] = _constant(list(self.places), device)
        return found

    def mask(self, device: torch.device) -> torch.Tensor:
        """True where the source has the label."""
        found = self._masks.get(device)
        if found is None:
            found = self._masks[device] = _constant(list(self.present), device)
        return found


def _constant(values: list[int] | list[bool], device: torch.device) -> torch.Tensor:
    # It outlives the call, so it must not belong to a function transform, a tracer or inference mode that is active now.
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    dtype = torch.bool if values and isinstance(values[0], bool) else torch.int64
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def index_of(gather: Gather, device: torch.device) -> torch.Tensor:
    """The index of a Gather on a device."""
    if is_dynamo_compiling():  # a graph has constants of its own; ours would all go by the same name in it
        return torch.tensor(gather.places, dtype=torch.int64, device=device)
    found = gather._indices.get(device)
    return found if found is not None else gather.index(device)


def mask_of(gather: Gather, device: torch.device) -> torch.Tensor:
    """The mask of a Gather on a device."""
    if is_dynamo_compiling():
        return torch.tensor(gather.present, dtype=torch.bool, device=device)
    return gather.mask(device)


def gather(data: torch.Tensor, axis: int, plan: Gather, fill: Any) -> torch.Tensor:
    """The data with one axis rearranged; what is missing becomes `fill`."""
    if not plan.missing:
        return data.index_select(axis, index_of(plan, data.device))
    shape = [1] * data.ndim
    shape[axis] = -1
    mask = mask_of(plan, data.device).reshape(shape)
    # 0.0 in integers is 0: a float that is a whole number must not turn integers into floats and round them.
    if not (data.is_floating_point() or data.is_complex() or isinstance(fill, complex)) and fill % 1 == 0:
        fill = bool(fill) if data.dtype is torch.bool and fill in (0, 1) else int(fill)
    if data.shape[axis] == 0:
        wanted = list(data.shape)
        wanted[axis] = plan.size
        return torch.where(mask, data.new_zeros(wanted), fill)
    return torch.where(mask, data.index_select(axis, index_of(plan, data.device)), fill)
