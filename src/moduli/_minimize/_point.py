"""Points in the user's own form: tensors, nested dictionaries and lists of them, labelled tensors, modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..labels import Tensor as Labelled

__all__ = ["Point"]


class Point:
    """The numbers of x0 as leaf tensors, and the way back to its form.

    Args:
        x0: A tensor, number, array, labelled tensor, `nn.Module`, or a nesting of dictionaries, lists and tuples of those.
    """

    def __init__(self, x0: Any) -> None:
        self.leaves: list[Tensor] = []
        self.names: list[str] = []
        self._module: nn.Module | None = None
        if isinstance(x0, nn.Module):
            # The user's module stays as it is; the copy is what moves.
            self._module = copy.deepcopy(x0)
            named = [(name, param) for name, param in self._module.named_parameters() if param.requires_grad]
            self.leaves = [param for _, param in named]
            self.names = [name for name, _ in named]
            if not self.leaves:
                raise ValueError(f"minimize: {type(x0).__name__} has no parameters that require a gradient")
        else:
            self._form = self._take(x0, "x0")
        if not self.leaves or sum(leaf.numel() for leaf in self.leaves) == 0:
            raise ValueError("minimize: x0 has no numbers in it")
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if not bool(torch.isfinite(torch.view_as_real(leaf) if leaf.is_complex() else leaf).all()):
                raise ValueError(
                    f"minimize: {name} is not finite at the start; give a point where the function is defined"
                )

    def _leaf(self, value: Tensor, name: str) -> Callable[[list[Tensor]], Any]:
        if not (value.is_floating_point() or value.is_complex()):
            raise TypeError(f"minimize: {name} has dtype {value.dtype}; give real numbers: x0.double()")
        position = len(self.leaves)
        self.leaves.append(value.detach().clone().requires_grad_())
        self.names.append(name)
        return lambda leaves: leaves[position]

    def _take(self, value: Any, name: str) -> Callable[[list[Tensor]], Any]:
        if isinstance(value, Labelled):
            inner = self._leaf(value.data, name)
            dims = value.dims
            return lambda leaves: Labelled(inner(leaves), dims)
        if isinstance(value, Tensor):
            return self._leaf(value, name)
        if isinstance(value, Mapping):
            parts = {key: self._take(item, f"{name}[{key!r}]") for key, item in value.items()}
            return lambda leaves: {key: part(leaves) for key, part in parts.items()}
        if isinstance(value, list | tuple):
            numbers = bool(value) and all(isinstance(item, int | float) for item in value)
            if numbers:
                return self._leaf(torch.tensor(value, dtype=torch.float64), name)
            several = [self._take(item, f"{name}[{i}]") for i, item in enumerate(value)]
            if hasattr(value, "_fields"):
                return lambda leaves: type(value)(*(part(leaves) for part in several))
            return lambda leaves: type(value)(part(leaves) for part in several)
        if isinstance(value, bool):
            raise TypeError(f"minimize: {name} is a bool; give numbers")
        if isinstance(value, int | float) or hasattr(value, "__array__"):
            return self._leaf(torch.as_tensor(value, dtype=torch.float64), name)
        raise TypeError(
            f"minimize: {name} is a {type(value).__name__}; x0 is a tensor, a labelled tensor, a module, or a nesting of "
            "dictionaries and lists of tensors"
        )

    @property
    def size(self) -> int:
        """How many real numbers."""
        return sum(leaf.numel() * (2 if leaf.is_complex() else 1) for leaf in self.leaves)

    def arguments(self, leaves: list[Tensor]) -> Any:
        """What the user's function is called with."""
        return self._module if self._module is not None else self._form(leaves)

    def result(self, values: list[Tensor]) -> Any:
        """The point with these numbers, detached from everything."""
        if self._module is not None:
            out = copy.deepcopy(self._module)
            with torch.no_grad():
                for (_, param), value in zip(
                    ((n, p) for n, p in out.named_parameters() if p.requires_grad), values, strict=True
                ):
                    param.copy_(value)
                    param.grad = None
            return out
        return self._form([value.detach().clone() for value in values])

    def spread(self, given: Any, what: str) -> list[Tensor | None]:
        """A bound for every leaf: one number for all, or a nesting like x0."""
        if given is None or (isinstance(given, int | float) and math.isinf(given)):
            return [None] * len(self.leaves)
        if isinstance(given, int | float):
            return [torch.full_like(leaf, given) for leaf in self.leaves]
        if self._module is not None:
            if not isinstance(given, Mapping):
                raise TypeError(f"minimize: {what} of a module is a number or a dictionary by parameter name")
            return [
                None if name not in given else torch.as_tensor(given[name]).to(leaf).expand_as(leaf)
                for name, leaf in zip(self.names, self.leaves, strict=True)
            ]
        other = Point.__new__(Point)
        other.leaves, other.names, other._module = [], [], None
        other._take(given, what)
        if len(other.leaves) != len(self.leaves):
            raise ValueError(
                f"minimize: {what} has {len(other.leaves)} parts, x0 has {len(self.leaves)}; give one number, or the "
                "form of x0"
            )
        try:
            return [b.detach().to(leaf).expand_as(leaf) for b, leaf in zip(other.leaves, self.leaves, strict=True)]
        except RuntimeError as error:
            raise ValueError(f"minimize: {what} does not fit the shape of x0: {error}") from None
