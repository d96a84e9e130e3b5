"""Planning the new tensors of a resized model: copied units, divided or zero outgoing weights, and fresh entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import ParameterAxes, list_names, locate_units
from ..layout import EntryGain, FreshEntries, UnitMap


@dataclasses.dataclass(frozen=True, eq=False)
class AxisResize:
    """The resize of one axis of a model.

    Attributes:
        name: The axis.
        before: The number of units before.
        source: For each unit after, the former unit that it is, or a copy of.
        fresh: The positions of the new units.
        mode: The values of new units: "copy" for copies of others, whose outgoing weights are divided; "fresh" for random ones
            with outgoing zeros; "zero"; or "keep" if there are none.
        labels: The labels of its units after, if it has any.
    """

    name: str
    before: int
    source: Tensor
    fresh: Tensor
    mode: str = "copy"
    labels: tuple[Hashable, ...] | None = None

    @property
    def after(self) -> int:
        """The number of units after."""
        return len(self.source)

    @property
    def copies(self) -> Tensor:
        """For each unit, the number of units with the same source."""
        return torch.bincount(self.source, minlength=self.before)[self.source]

    @property
    def uniform(self) -> bool:
        """Whether every former unit is there equally often."""
        return self.after % self.before == 0 and bool((self.copies == self.after // self.before).all())

    @property
    def changes_units(self) -> bool:
        """Whether the units change: their number, or the selection that is kept."""
        return self.after != self.before or self.mode == "keep"

    def describe(self) -> str:
        """Return the change in words."""
        return (
            f"axis {self.name!r} {'grew' if self.after > self.before else 'shrank'} from {self.before} to {self.after}"
        )


@dataclasses.dataclass(frozen=True)
class Compensation:
    """The choice of weights that are divided by the number of copies: by default the outgoing weights of an axis.

    Attributes:
        undivided: The axes whose outgoing weights are not divided.
        norm: The normalisation whose scale and shift are divided instead, for a weight that both makes and reads the axis.
    """

    undivided: frozenset[str] = frozenset()
    norm: str | None = None


class UnitPlanner:
    """Plans the new tensors of a model.

    Args:
        resizes: The axes that change.
        noise: The relative size of the differences between outgoing weights of copies.
        generator: The random number generator.
        compensation: The weights that are divided by the number of copies.
        apart: Pairs of parameter and axis that are among the inputs but not summed over: groups of convolutions.

    Attributes:
        maps: The maps of the tensors planned so far, by name.
    """

    def __init__(
        self,
        resizes: Sequence[AxisResize],
        noise: float,
        generator: torch.Generator,
        compensation: Compensation,
        apart: Collection[tuple[str, str]] = (),
    ) -> None:
        self.resizes = {each.name: each for each in resizes}
        self.units = {each.name: each.source for each in resizes}
        self.maps: dict[str, UnitMap] = {}
        self.noise, self.generator, self.compensation, self._apart = noise, generator, compensation, apart

    def plan(self, name: str, axes: ParameterAxes, tensor: Tensor) -> UnitMap | None:
        """Return the map from one tensor to its resized one; None if it has none of the axes.

        Args:
            name: Its name.
            axes: Its axes.
            tensor: Its value.
        """
        index = [axes.index(axis, self.units) for axis in range(len(axes))]
        if all(each is None for each in index):
            return None
        sizes = {**axes.sizes, **{each.name: each.after for each in self.resizes.values() if each.name in axes.sizes}}
        shape = [size if each is None else len(each) for size, each in zip(tensor.shape, index, strict=True)]
        changes = _Changes([], [], [])
        fresh = [self._plan_axis(name, axes, axis, tensor, sizes, shape, changes) for axis in range(len(index))]
        after = {each.name: each.after for each in self.resizes.values()}
        self.maps[name] = UnitMap(tensor.shape, index, fresh, changes.gains, changes.fills, changes.masks, after)
        return self.maps[name]

    def _plan_axis(
        self,
        name: str,
        axes: ParameterAxes,
        axis: int,
        tensor: Tensor,
        sizes: Mapping[str, int],
        shape: Sequence[int],
        changes: _Changes,
    ) -> Tensor | None:
        """Add the changes along one axis of a tensor; return the positions of new entries, None if there are none.

        Args:
            name: The name of the tensor.
            axes: Its axes.
            axis: The axis.
            tensor: Its value.
            sizes: The sizes of the model's axes after the resize.
            shape: The shape of the tensor after the resize.
            changes: The changes, which are extended.
        """
        factors, news = axes.dims[axis], torch.zeros(shape[axis], dtype=torch.bool)
        for each in dict.fromkeys(list_names(factors)):
            if each not in self.resizes:
                continue
            resize, units = self.resizes[each], locate_units(factors, sizes, each)
            own = torch.isin(units, resize.fresh)
            news |= own
            reads = axes.uses[axis] == "in" and axes.role != "buffer" and (axes.name, each) not in self._apart
            if resize.mode == "copy":
                outputs = [each for each, use in enumerate(axes.uses) if each != axis and use != "in"]
                changes.gains.extend(self._divide(name, axis, reads, resize, units, shape, outputs))
            elif own.any() and (reads or axes.role == "tied" or resize.mode == "zero"):
                changes.masks.append(EntryGain(_along(~own, axis, len(shape))))
            elif own.any():
                changes.fills.append(self._draw(name, tensor, axis, own.nonzero().flatten(), shape))
        return news.nonzero().flatten() if news.any() else None

    def _divide(
        self,
        name: str,
        axis: int,
        reads: bool,
        resize: AxisResize,
        units: Tensor,
        shape: Sequence[int],
        outputs: Sequence[int],
    ) -> list[EntryGain]:
        """Return the factors with which the outgoing weights of the copies of a unit sum up to the former weight."""
        norm = self.compensation.norm
        scaled = norm is not None and name.rpartition(".")[0] == norm
        if not scaled and (not reads or resize.name in self.compensation.undivided):
            return []
        copies = resize.copies.to(torch.float64)
        base = torch.where(units >= 0, (1 / copies)[units], 1.0)
        if scaled or self.noise == 0:
            return [EntryGain(_along(base, axis, len(shape)))]
        # The noise of the copies of one unit adds up to zero, so the function does not change but the copies differ. Its sign
        # is drawn for each output; with one sign for all, the gradients of copies would be parallel. It is not drawn along
        # further inputs (of a bilinear layer), whose own noise it would be correlated with.
        draws = torch.randn(resize.after, generator=self.generator, dtype=torch.float64)
        sums = torch.zeros(resize.before, dtype=torch.float64).index_add_(0, resize.source, draws)
        draws = (draws - sums[resize.source] / copies) * self.noise / copies
        noise = torch.where(units >= 0, draws[units], 0.0)
        sign = torch.ones(1, dtype=torch.float64)
        if outputs:
            widest = max(outputs, key=lambda each: shape[each])
            flips = torch.randint(0, 2, (shape[widest],), generator=self.generator)
            sign = _along(flips * 2.0 - 1, widest, len(shape))
        return [EntryGain(_along(base, axis, len(shape)), _along(noise, axis, len(shape)), sign)]

    def _draw(self, name: str, tensor: Tensor, axis: int, positions: Tensor, shape: Sequence[int]) -> FreshEntries:
        """Return values for new entries: normal ones with the tensor's standard deviation; in vectors its mean, 0 for shifts."""
        size = list(shape)
        size[axis] = len(positions)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return FreshEntries(axis, positions, torch.zeros(size))
        values = tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else torch.complex128)
        if tensor.dim() < 2:
            is_shift = name.endswith(("bias", "mean"))
            return FreshEntries(
                axis, positions, torch.full(size, 0.0 if is_shift or not len(values) else values.mean().item())
            )
        scale = values.std(correction=0).item() if values.numel() else 1.0
        return FreshEntries(axis, positions, scale * torch.randn(size, generator=self.generator))


class _Changes(NamedTuple):
    """The factors and values of one tensor, as in `UnitMap`."""

    gains: list[EntryGain]
    fills: list[FreshEntries]
    masks: list[EntryGain]


def _along(values: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector shaped to broadcast along one axis."""
    return values.reshape([-1 if each == axis else 1 for each in range(rank)])


def scale_leading(factors: Sequence[object], before: Mapping[str, int], after: Mapping[str, int], count: int) -> int:
    """Return the number of groups of an axis after a resize, where the product of its leading factors was `count`.

    Args:
        factors: The factors of the axis.
        before: The sizes of the model's axes before.
        after: The sizes after.
        count: The number of groups before.
    """
    product, grown = 1, 1
    for factor in factors:
        if product == count or not isinstance(factor, str):
            break
        product *= before[factor]
        grown *= after.get(factor, before[factor])
    return grown if product == count else count
