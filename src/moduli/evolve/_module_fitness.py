"""A function of a module as a fitness of vectors: the chosen parameters as one vector, and how members are evaluated."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Entry, call_with_tensors, layout_and_tensors, select
from ..population import FunctionOfMember, call_low_rank
from ._base import Search
from ._distribution import Distribution
from ._executor import EvaluationWarning


class Chosen:
    """The parameters of a module whose names match a pattern, in the order of its layout."""

    def __init__(self, net: nn.Module, over: str | Sequence[str]) -> None:
        patterns = (over,) if isinstance(over, str) else tuple(over)
        layout, _ = layout_and_tensors(net)
        chosen = select(patterns, [entry.names for entry in layout], owner=type(net).__name__)
        self.entries: list[Entry] = [layout.entries[place] for place in chosen]
        for entry in self.entries:
            if not entry.dtype.is_floating_point:
                raise TypeError(f"{entry.name!r} is {entry.dtype}; a search moves real floating-point parameters")
        if len({entry.device for entry in self.entries}) > 1:
            raise ValueError("the chosen parameters are on several devices; search over those of one")
        self.names = [entry.name for entry in self.entries]
        self.numel = sum(entry.numel for entry in self.entries)
        if self.numel == 0:
            raise ValueError(f"the parameters that match {', '.join(map(repr, patterns))} have no elements")

    def tensors(self, net: nn.Module) -> list[Tensor]:
        """Return the chosen parameters of a module with the same structure, not copied."""
        return [net.get_parameter(name) for name in self.names]

    def read(self, net: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the chosen parameters as one new vector."""
        tensors = [t.detach().reshape(-1) for t in self.tensors(net)]
        dtype = dtype or functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        return torch.cat([t.to(dtype) for t in tensors])

    def write(self, net: nn.Module, values: Tensor, at: int = 0) -> None:
        """Copy a vector into the chosen parameters.

        Args:
            net: The module to write to.
            values: The vector, or a part of it; a part needs contiguous parameters.
            at: The offset of the first of `values` in the whole vector.
        """
        start = 0
        for tensor in self.tensors(net):
            low, high = max(at, start), min(at + len(values), start + tensor.numel())
            part = values[low - at : max(low, high) - at]
            if len(part) == tensor.numel():
                tensor.detach().copy_(part.view(tensor.shape))
            elif len(part):
                tensor.detach().view(-1)[low - start : high - start] = part
            start += tensor.numel()

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Return rows as parameters by name, each with the leading dimensions of `rows`, in the parameter's dtype."""
        params, at = {}, 0
        for entry in self.entries:
            part = rows[..., at : at + entry.numel]
            params[entry.name] = part.reshape((*rows.shape[:-1], *entry.shape)).to(entry.dtype)
            at += entry.numel
        return params


def evaluate_low_rank(
    net: nn.Module, fitness: Callable[[Any], Any], like: Mapping[str, Tensor], search: Any, members: Sequence[int]
) -> Tensor:
    """Evaluate members that differ by noise of low rank without forming their matrices: one product serves all of them.

    Args:
        net: The module.
        fitness: The function of it.
        like: The parameters that are searched over, by name, in the order of the search.
        search: The search, a `Distribution` that shares products.
        members: The indices of the members.

    Returns:
        One fitness for each of `members`.

    Raises:
        RuntimeError: If `torch.vmap` can't follow the fitness.
        ValueError: If it is more than one number for each member.
    """
    mean, spread, at = search.state["mean"], search.spread(), 0
    means, factors, vectors, spreads = {}, {}, {}, {}
    for (name, param), (left, right) in zip(like.items(), search.factors(members), strict=True):
        own = mean[at : at + param.numel()].view(param.shape).to(param.dtype)
        scale = None if spread is None else spread[at : at + param.numel()].view(param.shape).to(param.dtype)
        at += param.numel()
        if right is None:
            noise = left.view(-1, *param.shape).to(param.dtype)
            vectors[name] = own + (noise if scale is None else noise * scale)
        else:
            if scale is not None:
                spreads[name] = scale
            means[name], factors[name] = own, (left.to(param.dtype), right.to(param.dtype))
    counted: dict[str, Any] = {"count": len(members), "report": {}}
    values = call_low_rank(FunctionOfMember(net), fitness, (), (), means, factors, vectors, spreads, **counted)
    if not isinstance(values, Tensor) or values.shape.numel() != len(members):
        raise ValueError("fitness is one number per member")
    return values.reshape(len(members))


class ModuleFitness:
    """The fitness of a module as a function of its chosen parameters, for one row or for many.

    Args:
        net: The module, which is written to.
        chosen: Its chosen parameters.
        fitness: The function of the module.
        search: The search that makes the members. It is not pickled: workers receive members, or a draft of it.
    """

    def __init__(
        self, net: nn.Module, chosen: Chosen, fitness: Callable[[Any], Any], search: Search | None = None
    ) -> None:
        self.net, self.chosen, self.fitness, self.search = net, chosen, fitness, search
        #: Whether `torch.vmap` failed on the fitness.
        self.refused = False

    def __call__(self, row: Tensor) -> Any:
        self.chosen.write(self.net, row)
        return self.fitness(self.net)

    def evaluate_member(self, index: int) -> Any:
        """Return the fitness of a member of the search, which is drawn directly into contiguous parameters."""
        search: Any = self.search
        if not all(tensor.is_contiguous() for tensor in self.chosen.tensors(self.net)):
            return self(search.rows(index, index + 1)[0])
        for at, values in search.parts(index):
            self.chosen.write(self.net, values, at)
        return self.fitness(self.net)

    def refuse(self, why: str) -> None:
        """Record that torch can't vectorise the fitness, and warn."""
        message = f"members are made one by one, because the fitness can't be vectorised: {why}"
        warnings.warn(EvaluationWarning(message), stacklevel=7)
        self.refused = True

    def shares_products(self) -> bool:
        """Whether members differ by noise of low rank, so that they are evaluated without forming their matrices."""
        return not self.refused and isinstance(self.search, Distribution) and self.search.shares_products()

    def evaluate_together(self, members: Sequence[int]) -> Tensor:
        """Return the fitness of several members: one product for all of them per matrix, plus thin products for each.

        Raises:
            RuntimeError: If `torch.vmap` can't follow the fitness.
        """
        like = dict(zip(self.chosen.names, self.chosen.tensors(self.net), strict=True))
        return evaluate_low_rank(self.net, self.fitness, like, self.search, members)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "search": None}

    def batch(self, rows: Tensor) -> Any:
        """Evaluate all rows in one call of `torch.func.vmap`; the fitness gets a function to call like the module."""

        def one(parameters: dict[str, Tensor]) -> Any:
            return self.fitness(lambda *args, **kwargs: call_with_tensors(self.net, parameters, args, kwargs))

        return torch.func.vmap(one, randomness="different")(self.chosen.named(rows))
