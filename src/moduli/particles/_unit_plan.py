"""What becomes of every tensor of a model when axes get other units: copies, divided or zero outgoing weights, fresh entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ..axes import ParameterAxes, list_names, locate_units
from ..layout import EntryGain, FreshEntries, UnitMap


@dataclasses.dataclass(frozen=True, eq=False)
class AxisResize:
    """One axis of a model with other units.

    Attributes:
        name: The axis.
        before: How many units it had.
        source: For each unit that it has then, the one before that it is or is a copy of.
        fresh: The positions of the units that are new.
        mode: What new units are: "copy" of others, whose outgoing weights are divided; "fresh", with outgoing zeros; "zero".
        labels: The labels of its units, where it has any.
    """

    name: str
    before: int
    source: Tensor
    fresh: Tensor
    mode: str = "copy"
    labels: tuple[Hashable, ...] | None = None

    @property
    def after(self) -> int:
        """How many units it has then."""
        return len(self.source)

    @property
    def copies(self) -> Tensor:
        """For each unit, how many there are of it."""
        return torch.bincount(self.source, minlength=self.before)[self.source]

    @property
    def uniform(self) -> bool:
        """Whether every unit is there equally often."""
        return self.after % self.before == 0 and bool((self.copies == self.after // self.before).all())

    def describe(self) -> str:
        """Return the change in words."""
        return (
            f"axis {self.name!r} {'grew' if self.after > self.before else 'shrank'} from {self.before} to {self.after}"
        )


@dataclasses.dataclass(frozen=True)
class Compensation:
    """Where the sum over copies is divided by their number.

    Attributes:
        undivided: The axes of which outgoing weights are not.
        norm: The normalisation whose scale and shift are, in place of a weight that both makes and reads the axis.
    """

    undivided: frozenset[str] = frozenset()
    norm: str | None = None


class UnitPlanner:
    """Plans the new tensors of a model.

    Args:
        resizes: The axes that change.
        noise: How much the outgoing weights of copies differ, relative to them.
        generator: The random numbers.
        compensation: Where the sum over copies is divided by their number.
        apart: Parameters and axes that are not summed over, though they are among the inputs: groups of convolutions.

    Attributes:
        maps: How tensors follow, by name, as far as they were planned.
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
        """Return how one tensor follows; None if it has none of the axes.

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
        fresh: list[Tensor | None] = [None] * len(index)
        gains, fills, masks = list[EntryGain](), list[FreshEntries](), list[EntryGain]()
        for axis, factors in enumerate(axes.dims):
            news = torch.zeros(shape[axis], dtype=torch.bool)
            for each in dict.fromkeys(list_names(factors)):
                if each not in self.resizes:
                    continue
                resize, units = self.resizes[each], locate_units(factors, sizes, each)
                own = torch.isin(units, resize.fresh)
                news |= own
                reads = axes.uses[axis] == "in" and axes.role != "buffer" and (axes.name, each) not in self._apart
                if resize.mode == "copy":
                    gains += self._divide(name, axis, reads, resize, units, shape)
                elif own.any() and (reads or axes.role == "tied" or resize.mode == "zero"):
                    masks.append(EntryGain(_along(~own, axis, len(shape))))
                elif own.any():
                    fills.append(self._draw(name, tensor, axis, own.nonzero().flatten(), shape))
            fresh[axis] = news.nonzero().flatten() if news.any() else None
        after = {each.name: each.after for each in self.resizes.values()}
        self.maps[name] = UnitMap(tensor.shape, index, fresh, gains, fills, masks, after)
        return self.maps[name]

    def _divide(
        self, name: str, axis: int, reads: bool, resize: AxisResize, units: Tensor, shape: Sequence[int]
    ) -> list[EntryGain]:
        """Return the factors by which the sum over the copies of a unit is what one unit gave."""
        norm = self.compensation.norm
        scaled = norm is not None and name.rpartition(".")[0] == norm
        if not scaled and (not reads or resize.name in self.compensation.undivided):
            return []
        copies = resize.copies.to(torch.float64)
        base = torch.where(units >= 0, (1 / copies)[units], 1.0)
        if scaled or self.noise == 0:
            return [EntryGain(_along(base, axis, len(shape)))]
        # The noise of the copies of one unit adds up to zero: the function is what it was, and the copies differ. Its sign is
        # another for each output; with one sign for all, the gradients of copies would be parallel.
        draws = torch.randn(resize.after, generator=self.generator, dtype=torch.float64)
        sums = torch.zeros(resize.before, dtype=torch.float64).index_add_(0, resize.source, draws)
        draws = (draws - sums[resize.source] / copies) * self.noise / copies
        noise = torch.where(units >= 0, draws[units], 0.0)
        others = [each for each in range(len(shape)) if each != axis]
        sign = torch.ones(1, dtype=torch.float64)
        if others:
            widest = max(others, key=lambda each: shape[each])
            flips = torch.randint(0, 2, (shape[widest],), generator=self.generator)
            sign = _along(flips * 2.0 - 1, widest, len(shape))
        return [EntryGain(_along(base, axis, len(shape)), _along(noise, axis, len(shape)), sign)]

    def _draw(self, name: str, tensor: Tensor, axis: int, positions: Tensor, shape: Sequence[int]) -> FreshEntries:
        """Return values for new entries like those that are there: normal ones of their size; shifts are zero."""
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


def _along(values: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector shaped to broadcast along one axis."""
    return values.reshape([-1 if each == axis else 1 for each in range(rank)])


def scale_leading(factors: Sequence[object], before: Mapping[str, int], after: Mapping[str, int], count: int) -> int:
    """Return how many groups an axis has then, which had `count` of them as its leading factors.

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
