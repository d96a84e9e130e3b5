"""Some parameters of a module as one vector, and the fitness of a module as a function of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Entry, layout_and_tensors
from ._base import Search


class Chosen:
    """The parameters of a module whose names match a pattern, in the order of its layout."""

    def __init__(self, net: nn.Module, over: str | Sequence[str]) -> None:
        patterns = (over,) if isinstance(over, str) else tuple(over)
        layout, _ = layout_and_tensors(net)
        every = [name for entry in layout for name in entry.names]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in every):
                raise ValueError(
                    f"{type(net).__name__} has no parameter called {pattern!r}; it has {', '.join(every) or 'none'}"
                )
        self.entries: list[Entry] = [e for e in layout if any(fnmatchcase(n, p) for n in e.names for p in patterns)]
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
        """The chosen parameters of a module of this structure, where they are."""
        return [net.get_parameter(name) for name in self.names]

    def read(self, net: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
        """Their values as one new vector."""
        tensors = [t.detach().reshape(-1) for t in self.tensors(net)]
        dtype = dtype or functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        return torch.cat([t.to(dtype) for t in tensors])

    def write(self, net: nn.Module, values: Tensor, at: int = 0) -> None:
        """Copy a vector into them, or a part of one, which begins at `at`; a part needs contiguous ones."""
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
        """Rows as parameters by name, each with the leading dimensions of `rows`, in its own dtype."""
        found, at = {}, 0
        for entry in self.entries:
            part = rows[..., at : at + entry.numel]
            found[entry.name] = part.reshape(*rows.shape[:-1], *entry.shape).to(entry.dtype)
            at += entry.numel
        return found


class ModuleFitness:
    """The fitness of a module as a function of its chosen parameters, for one row or for many.

    Args:
        net: The module, which is written to.
        chosen: Its chosen parameters.
        fitness: The function of the module.
        search: Makes the members; other processes are sent them, or its draft.
    """

    def __init__(
        self, net: nn.Module, chosen: Chosen, fitness: Callable[[Any], Any], search: Search | None = None
    ) -> None:
        self.net, self.chosen, self.fitness, self.search = net, chosen, fitness, search

    def __call__(self, row: Tensor) -> Any:
        self.chosen.write(self.net, row)
        return self.fitness(self.net)

    def evaluate_member(self, index: int) -> Any:
        """The same for a member that is made here, in the memory of the module where that is possible."""
        search: Any = self.search
        if not all(tensor.is_contiguous() for tensor in self.chosen.tensors(self.net)):
            return self(search.rows(index, index + 1)[0])
        for at, values in search.parts(index):
            self.chosen.write(self.net, values, at)
        return self.fitness(self.net)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "search": None}

    def batch(self, rows: Tensor) -> Any:
        """All rows in one call, by `torch.func.vmap`: the fitness gets something to call like the module."""

        def one(parameters: dict[str, Tensor]) -> Any:
            return self.fitness(lambda *args, **kwargs: torch.func.functional_call(self.net, parameters, args, kwargs))

        return torch.func.vmap(one, randomness="different")(self.chosen.named(rows))
