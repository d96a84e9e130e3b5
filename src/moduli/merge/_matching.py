"""Matching the units of two models by weights or activations, over the free axes of the model.

The coordinate descent of the paper, for the axes of `moduli.axes`: one axis after the other gets the permutation that
brings the tensors nearest to the other model's, the solution of an assignment problem over the inner products of units,

    (1) C[i, j] = Σ over tensors and positions of the axis: ⟨unit i of one model, unit j of the other⟩,

until no axis can be improved. The descent does not start at the identity: an axis is first matched by the tensors whose other axes
are matched already (inputs and outputs are), and if there are none by the sorted entries, which do not depend on the order of
other axes. So a permuted copy is recovered in the first pass.

Reference:
    Ainsworth, Hayase, Srinivasa, "Git Re-Basin: merging models modulo permutation symmetries", ICLR 2023, arXiv:2209.04836
    (sections 3.1 and 3.2, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import Factors, ModelAxes, ParameterAxes, list_names, measure


class AxisTensor(NamedTuple):
    """A tensor that both models have, with its axes.

    Attributes:
        axes: Its axes.
        model: The tensor of the model whose units are permuted.
        to: The tensor of the model that it is matched with.
    """

    axes: ParameterAxes
    model: Tensor
    to: Tensor

    @property
    def names(self) -> set[str]:
        """The axes of the model that occur in it."""
        return {name for factors in self.axes for name in list_names(factors)}

    def take(self, units: Mapping[str, Tensor]) -> Tensor:
        """Return the model's tensor with its units in the order of `units`."""
        tensor = self.model
        for at in range(len(self.axes)):
            index = self.axes.index(at, units)
            tensor = tensor if index is None else tensor.index_select(at, index)
        return tensor


class UnitView(NamedTuple):
    """A tensor with one of its occurrences of an axis of the model moved to the front.

    Attributes:
        units: The tensor with this axis first, and the other factors of its axes after it.
        others: The names of those factors.
    """

    units: Tensor
    others: tuple[str, ...]

    def list_rows(self, unmatched: set[str]) -> Tensor:
        """Return the units as rows, their entries over unmatched axes in ascending order.

        Entries over axes that are not matched yet can only be compared independently of their order.
        """
        unknown = [at for at, name in enumerate(self.others, 1) if name in unmatched]
        if not unknown:
            return self.units.reshape(len(self.units), -1)
        matched = [at for at, name in enumerate(self.others, 1) if name not in unmatched]
        size = math.prod(self.units.shape[at] for at in unknown)
        rows = self.units.permute(0, *matched, *unknown).reshape(len(self.units), -1, size)
        return rows.sort(-1).values.reshape(len(self.units), -1)


def view_from(name: str, tensor: Tensor, dims: Sequence[Factors], sizes: Mapping[str, int]) -> Iterator[UnitView]:
    """Yield a view of a tensor for every occurrence of an axis of the model in it.

    Args:
        name: The axis of the model.
        tensor: The tensor.
        dims: The factors of each of its axes.
        sizes: The sizes of the model's axes.
    """
    for at, factors in enumerate(dims):
        for place, factor in enumerate(factors):
            if isinstance(factor, str):
                continue
            # Split a concatenation, and continue with each of its parts.
            before, after = factors[:place], factors[place + 1 :]
            lengths = [measure(part, sizes) for part in factor.parts]
            three = (measure(before, sizes), sum(lengths), measure(after, sizes))
            whole = tensor.reshape(*tensor.shape[:at], *three, *tensor.shape[at + 1 :])
            pieces = torch.split(whole, lengths, at + 1)
            for part, piece in zip(factor.parts, pieces, strict=True):
                product = (*before, *part, *after)
                yield from view_from(name, piece.flatten(at, at + 2), (*dims[:at], product, *dims[at + 1 :]), sizes)
            return
    names = [str(factor) for factors in dims for factor in factors]
    split = tensor.reshape([sizes[factor] for factor in names])
    for at, factor in enumerate(names):
        if factor == name:
            yield UnitView(split.movedim(at, 0), (*names[:at], *names[at + 1 :]))


class UnitMatching:
    """The permutation of every free axis that brings the tensors of a model nearest to those of another.

    Args:
        axes: The axes of the model.
        tensors: The tensors of both models that are compared.
        seed: The seed of the order in which axes are improved.

    Attributes:
        units: For each axis, the unit of the model that matches each unit of the other.
    """

    def __init__(self, axes: ModelAxes, tensors: Sequence[AxisTensor], seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.places: dict[str, list[AxisTensor]] = {axis.name: [] for axis in axes.free if axis.size > 1}
        for each in tensors:
            for name in each.names & self.places.keys():
                self.places[name].append(each)
        self.places = {name: places for name, places in self.places.items() if places}
        self.units = {name: torch.arange(axes[name].size) for name in self.places}

    def run(self, sweeps: int) -> dict[str, Tensor]:
        """Match one axis after the other, then improve them until nothing changes; return the permutations.

        Args:
            sweeps: The largest number of passes over all axes.
        """
        unmatched = set(self.places)
        while unmatched:
            name = max(self.places, key=lambda name: self._measure_known(name, unmatched))
            self._match(name, unmatched)
            unmatched.discard(name)
        names = list(self.places)
        for _ in range(sweeps):
            order = torch.randperm(len(names), generator=self.generator).tolist()
            improved = [self._match(names[at], set()) for at in order]
            if not any(improved):
                break
        return self.units

    def _measure_known(self, name: str, unmatched: set[str]) -> float:
        """Return the share of entries of an axis' tensors without another unmatched axis; -1 for a matched axis."""
        if name not in unmatched:
            return -1.0
        sizes = [(each.to.numel(), bool(each.names & unmatched - {name})) for each in self.places[name]]
        return sum(size for size, unknown in sizes if not unknown) / sum(size for size, _ in sizes)

    def _match(self, name: str, unmatched: set[str]) -> bool:
        """Improve the permutation of one axis with the others fixed; return whether there was a better one."""
        size = len(self.units[name])
        product = torch.zeros(size, size, dtype=torch.float64)
        matched = [each for each in self.places[name] if not each.names & unmatched - {name}]
        for each in matched or self.places[name]:
            sizes, dims = each.axes.sizes, each.axes.dims
            both = zip(*(view_from(name, one, dims, sizes) for one in (each.to, each.take(self.units))), strict=True)
            for ours, theirs in both:
                product += ours.list_rows(unmatched) @ theirs.list_rows(unmatched).T
        chosen = assign(product)
        gain = float(product[torch.arange(size), chosen].sum() - product.trace())
        if gain <= 1e-12 * size * float(product.abs().max()):
            return False
        self.units[name] = self.units[name][chosen]
        return True


def assign(product: Tensor) -> Tensor:
    """Return, for each row, the column of the assignment with the largest sum.

    Raises:
        ImportError: Without SciPy.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ImportError("merge.align solves assignment problems by SciPy: pip install 'moduli[merge]'") from error
    return torch.from_numpy(linear_sum_assignment(product.numpy(), maximize=True)[1])
