"""`UnitMap`: where each entry of a tensor comes from after the axes of a model got more units or fewer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 16


class EntryGain(NamedTuple):
    """A factor of the entries along some axes: `base + noise * sign`, where each broadcasts over the tensor.

    Attributes:
        base: The factor.
        noise: The summand that is multiplied by the sign; None for none.
        sign: The sign of the noise; None for none.
    """

    base: Tensor
    noise: Tensor | None = None
    sign: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Multiply a tensor in place, and return it."""
        base = self.base.to(tensor)
        if self.noise is None or self.sign is None:
            return tensor.mul_(base)
        noise, sign = self.noise.to(tensor), self.sign.to(tensor)
        axis = next((axis for axis, size in enumerate(sign.shape) if size > 1), None)
        if axis is None:
            return tensor.mul_(torch.addcmul(base, noise, sign))
        # In chunks small enough that their factors stay in the processor's cache.
        axis += tensor.dim() - sign.dim()
        rows = max(1, _CHUNK * tensor.shape[axis] // max(tensor.numel(), 1))
        parts = zip(torch.split(tensor, rows, axis), torch.split(sign, rows, axis - tensor.dim()), strict=True)
        for part, own in parts:
            part.mul_(torch.addcmul(base, noise, own))
        return tensor


class FreshEntries(NamedTuple):
    """Values of new entries along one axis.

    Attributes:
        axis: The axis.
        positions: The positions along it.
        values: The values, of the tensor's shape but for that axis.
    """

    axis: int
    positions: Tensor
    values: Tensor


class UnitMap:
    """The map from a tensor to the one that replaces it when axes are resized: entries are taken, scaled and filled.

    Attributes:
        shape: The shape before.
        index: For each axis, the former position of each entry; None where the axis is unchanged.
        fresh: For each axis, the positions of entries that are new; None where there are none.
        gains: Factors of the entries that are taken.
        fills: Values of new entries, which are written after that.
        masks: Factors that are applied last.
        sizes: The numbers of units of the model's axes after the resize, by name.

    Example:
        >>> from moduli.layout import UnitMap
        >>> wider = UnitMap((2,), (torch.tensor([0, 1, 1]),), (torch.tensor([2]),))
        >>> wider.resize(torch.tensor([3.0, 4.0])), wider.resize_state(torch.tensor([3.0, 4.0]))
        (tensor([3., 4., 4.]), tensor([3., 4., 0.]))
    """

    __slots__ = ("fills", "fresh", "gains", "index", "masks", "shape", "sizes")

    def __init__(
        self,
        shape: Sequence[int],
        index: Sequence[Tensor | None],
        fresh: Sequence[Tensor | None],
        gains: Sequence[EntryGain] = (),
        fills: Sequence[FreshEntries] = (),
        masks: Sequence[EntryGain] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.shape, self.index, self.fresh = tuple(shape), tuple(index), tuple(fresh)
        self.gains, self.fills, self.masks = tuple(gains), tuple(fills), tuple(masks)
        self.sizes = dict(sizes or {})

    @property
    def shape_after(self) -> tuple[int, ...]:
        """The shape of the tensor after the resize."""
        return tuple(size if index is None else len(index) for size, index in zip(self.shape, self.index, strict=True))

    @property
    def removes(self) -> bool:
        """Whether any former entry is dropped."""
        return any(
            index is not None and len(set(index.tolist())) < size
            for size, index in zip(self.shape, self.index, strict=True)
        )

    def resize(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Return the resized tensor, a new one.

        Args:
            tensor: The tensor.
            lead: The number of axes before those that are resized, such as the members of a population.
        """
        result = self._take(tensor.detach(), lead, lambda axis: True)
        if not (result.is_floating_point() or result.is_complex()):
            for fill in self.fills:
                _write(result, fill, lead)
            return result
        for gain in self.gains:
            gain(result)
        for fill in self.fills:
            _write(result, fill, lead)
        for mask in self.masks:
            mask(result)
        return result

    def resize_state(self, tensor: Tensor, start: Tensor | float = 0.0, lead: int = 0) -> Tensor:
        """Return per-parameter state resized as the parameter; new entries have the value `start`.

        Axes along which the state was reduced to size 1 stay so.

        Args:
            tensor: The state.
            start: The value of new entries: a number, or a tensor of the new shape.
            lead: The number of axes before those of the parameter.
        """
        followed = [size == tensor.shape[lead + axis] for axis, size in enumerate(self.shape)]
        if not isinstance(start, Tensor) and all(
            index is None or not followed[axis] or self._only_adds(axis) for axis, index in enumerate(self.index)
        ):
            return self._extend(tensor.detach(), start, lead, followed)
        result = self._take(tensor.detach(), lead, lambda axis: followed[axis])
        for axis, positions in enumerate(self.fresh):
            if positions is None or not followed[axis]:
                continue
            positions = positions.to(result.device)
            if isinstance(start, Tensor):
                result.index_copy_(lead + axis, positions, start.to(result).index_select(lead + axis, positions))
            else:
                result.index_fill_(lead + axis, positions, start)
        return result

    def _only_adds(self, axis: int) -> bool:
        """Whether the entries along an axis are the former ones, in order, and then new ones."""
        index, fresh, size = self.index[axis], self.fresh[axis], self.shape[axis]
        if index is None or fresh is None or not 0 < len(fresh) == len(index) - size:
            return False
        return int(fresh[0]) == size and torch.equal(index[:size], torch.arange(size))

    def _extend(self, tensor: Tensor, start: float, lead: int, followed: Sequence[bool]) -> Tensor:
        """Return a tensor with entries appended, each of which is written once."""
        shape = list(tensor.shape)
        for axis, index in enumerate(self.index):
            if index is not None and followed[axis]:
                shape[lead + axis] = len(index)
        result = block = tensor.new_empty(shape)
        for axis, size in enumerate(tensor.shape):
            if block.shape[axis] > size:
                block.narrow(axis, size, block.shape[axis] - size).fill_(start)
                block = block.narrow(axis, 0, size)
        block.copy_(tensor)
        return result

    def _take(self, tensor: Tensor, lead: int, follows: Callable[[int], bool]) -> Tensor:
        source = tensor
        for axis, index in enumerate(self.index):
            if index is not None and follows(axis):
                tensor = _select(tensor, lead + axis, index)
        return tensor.clone() if tensor is source else tensor


def _select(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """Return entries along an axis; an index that repeats all entries in order is applied by copying blocks."""
    size = tensor.shape[axis]
    if len(index) >= size > 0 and torch.equal(index, torch.arange(len(index)) % size):
        whole, rest = divmod(len(index), size)
        return torch.cat([*[tensor] * whole, *([tensor.narrow(axis, 0, rest)] if rest else [])], axis)
    return tensor.index_select(axis, index.to(tensor.device))


def _write(tensor: Tensor, fill: FreshEntries, lead: int) -> None:
    values = fill.values.to(tensor)
    if lead:
        shape = list(tensor.shape)
        shape[lead + fill.axis] = len(fill.positions)
        values = values.expand(shape)
    tensor.index_copy_(lead + fill.axis, fill.positions.to(tensor.device), values)


class ResizedParameters:
    """The parameters that replaced others when a model was resized, with the maps; references are weak.

    An optimizer that finds another parameter under a name looks up the map from the one it has.

    Example:
        >>> from moduli.layout import ResizedParameters, UnitMap
        >>> resized, before, after = ResizedParameters(), torch.ones(2), torch.ones(1)
        >>> resized.record(before, after, [UnitMap((2,), (torch.tensor([1]),), (None,))])
        >>> [each.shape_after for each in resized.find(before, after)]
        [(1,)]
    """

    def __init__(self) -> None:
        self._lineages: dict[int, tuple[weakref.ref[Tensor], list[tuple[weakref.ref[Tensor], list[UnitMap]]]]] = {}

    def record(self, before: Tensor, after: Tensor, maps: Sequence[UnitMap]) -> None:
        """Record that a tensor was made from another one.

        Args:
            before: The former tensor.
            after: The tensor made from it.
            maps: The maps between them, in order of application.
        """
        key, steps = id(after), list(maps)

        def forget(source: weakref.ref[Tensor]) -> None:
            lineage[:] = [entry for entry in lineage if entry[0] is not source]

        lineage = [(weakref.ref(before, forget), steps)]
        for source, earlier in self._read(before):
            tensor = source()
            if tensor is not None:
                lineage.append((weakref.ref(tensor, forget), [*earlier, *steps]))
        self._lineages[key] = weakref.ref(after, lambda _: self._lineages.pop(key, None)), lineage

    def find(self, before: Tensor, after: Tensor) -> list[UnitMap] | None:
        """Return the maps from one tensor to another; None if the one was not made from the other."""
        return next((maps for source, maps in self._read(after) if source() is before), None)

    def _read(self, tensor: Tensor) -> list[tuple[weakref.ref[Tensor], list[UnitMap]]]:
        entry = self._lineages.get(id(tensor))
        return [] if entry is None or entry[0]() is not tensor else entry[1]


RESIZED = ResizedParameters()
"""The resized parameters of all models."""
