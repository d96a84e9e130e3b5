"""Tensors, and dictionaries, lists and tuples of them, as the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..labels import Tensor as Labelled
from ..layout import call_with_tensors


class TensorTree(nn.Module):
    """A tree of tensors as a module: its parameters are copies of the tensors, and calling it returns the tree.

    A parameter is named by keys and indices, `"layer/0/weight"`; that of a single tensor is `"x"`.

    Args:
        value: A tensor, labelled or not, or a tree of dictionaries, lists and tuples of them; numbers and arrays become
            tensors in double precision.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.form = self._take(value, "")

    def _take(self, value: Any, path: str) -> Any:
        """Return the tree with every tensor replaced by the name of its parameter and its axes."""
        if isinstance(value, Mapping):
            return {key: self._take(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            several = [self._take(item, f"{path}/{i}" if path else str(i)) for i, item in enumerate(value)]
            return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
        name = path or "x"
        if "." in name or hasattr(self, name):
            raise ValueError(f"search: {name!r} can't name a parameter; use another key, without dots")
        self.register_parameter(name, nn.Parameter(_read_tensor(value, name), requires_grad=False))
        return TreeLeaf(name, value.dims if isinstance(value, Labelled) else None)

    def forward(self) -> Any:
        """Return the tree of the parameters, not copied."""
        return self._put(self.form)

    def _put(self, form: Any) -> Any:
        if isinstance(form, TreeLeaf):
            data = getattr(self, form.name)
            return data if form.dims is None else Labelled(data, form.dims)
        if isinstance(form, dict):
            return {key: self._put(item) for key, item in form.items()}
        several = [self._put(item) for item in form]
        return type(form)(*several) if hasattr(form, "_fields") else type(form)(several)

    def read(self) -> Any:
        """Return the tree with copies of the parameters, as plain tensors."""
        with torch.no_grad():
            copies = {name: param.detach().clone() for name, param in self.named_parameters()}
            return call_with_tensors(self, copies)


class TreeLeaf:
    """The name of a parameter, and the axes of the labelled tensor in its place.

    Args:
        name: The name.
        dims: The axes of a labelled tensor, or None.
    """

    def __init__(self, name: str, dims: Any) -> None:
        self.name, self.dims = name, dims


class TreeFitness:
    """A fitness of a tree of tensors as a fitness of its module.

    Args:
        fitness: The function of the tree.
    """

    def __init__(self, fitness: Callable[[Any], Any]) -> None:
        self.fitness = fitness

    def __call__(self, tree: Callable[[], Any]) -> Any:
        return self.fitness(tree())


def _read_tensor(value: Any, name: str) -> Tensor:
    """Return a copy of a leaf as a plain tensor."""
    data = value.data if isinstance(value, Labelled) else value
    if not isinstance(data, Tensor):
        array = np.asarray(data)
        if array.dtype.kind not in "iuf":
            what = f"an array of {array.dtype}" if hasattr(value, "__array__") else f"a {type(value).__name__}"
            fact = f"search: {name!r} is {what}"
            raise TypeError(f"{fact}; search over a module, tensors, or dictionaries and lists of tensors")
        data = torch.from_numpy(array.astype(float))
    return data.detach().clone()
