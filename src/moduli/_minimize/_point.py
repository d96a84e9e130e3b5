"""`StartPoint`: points in the user's form (tensors, nested dictionaries and lists, labelled tensors, modules) as leaf tensors."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..labels import Tensor as Labelled
from ..layout import call_with_tensors, copy_module, public_name, recompute_weights


class StartPoint:
    """The numbers of x0 as leaf tensors, and the conversion back to its form.

    Args:
        x0: A tensor, number, array, labelled tensor, `nn.Module`, or a nesting of dictionaries, lists and tuples of those.
    """

    def __init__(self, x0: Any) -> None:
        self.leaves: list[Tensor] = []
        self.names: list[str] = []
        self.dims: list[Any] = []
        self.x0 = x0
        self.module: nn.Module | None = None
        if isinstance(x0, nn.Module):
            # The user's module is not changed; the copy is.
            self.module = copy_module(x0)
            named = {name: param for name, param in self.module.named_parameters() if param.requires_grad}
            self.names, self.leaves, self.dims = (
                list(map(public_name, named)),
                list(named.values()),
                [None] * len(named),
            )
            self._keys = list(named)
            if not self.leaves:
                raise ValueError(f"minimize: {type(x0).__name__} has no parameters that require a gradient")
        else:
            _map_leaves(self._take, x0, "x0")
        if not self.leaves or sum(leaf.numel() for leaf in self.leaves) == 0:
            raise ValueError("minimize: x0 has no numbers in it")
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if not bool(leaf.isfinite().all()):
                raise ValueError(f"minimize: {name} is not finite at the start")

    def _take(self, value: Any, name: str) -> None:
        data = _read_leaf(value, name)
        if not (data.is_floating_point() or data.is_complex()):
            raise TypeError(f"minimize: {name} has dtype {data.dtype}; give real numbers: x0.double()")
        self.leaves.append(data.detach().clone().requires_grad_())
        self.names.append(name)
        self.dims.append(value.dims if isinstance(value, Labelled) else None)

    def _form(self, leaves: Sequence[Any]) -> Any:
        """Return values, one for each leaf, in the form of x0, labelled where x0 is."""
        rest = iter(leaves)

        def put(value: Any, name: str) -> Any:
            part = next(rest)
            if not isinstance(value, Labelled):
                return part
            # One of many starts lacks the first axis.
            shape, dims = value.data.shape, value.dims
            fits = isinstance(part, Tensor) and part.shape in (shape, shape[1:])
            return Labelled(part, dims[len(dims) - part.dim() :]) if fits else part

        return _map_leaves(put, self.x0, "x0")

    @property
    def size(self) -> int:
        """The number of real numbers."""
        return sum(leaf.numel() * (2 if leaf.is_complex() else 1) for leaf in self.leaves)

    def choose_tol(self, tol: float | None, double: float, single: float) -> float:
        """Return a tolerance, or the default for the precision of x0.

        Args:
            tol: The tolerance, or None.
            double: The default in double precision.
            single: The default in other precisions.
        """
        exact = self.leaves[0].dtype in (torch.float64, torch.complex128)
        return tol if tol is not None else double if exact else single

    def call(self, fun: Callable[[Any], Any], leaves: list[Tensor]) -> Any:
        """Return the user's function at these leaves."""
        if isinstance(self.x0, Tensor):
            return fun(leaves[0])
        if self.module is None:
            return fun(self._form(leaves))
        if all(map(operator.is_, leaves, self.leaves)):
            return fun(self.module)
        wrapped = _FunctionOfModule(fun, self.module)
        named = {f"module.{name}": leaf for name, leaf in zip(self._keys, leaves, strict=True)}
        return call_with_tensors(wrapped, named)

    def result(self, values: list[Tensor]) -> Any:
        """Return the point with these values, copied and detached."""
        if self.module is not None:
            out = copy_module(self.module)
            with torch.no_grad():
                free = [param for param in out.parameters() if param.requires_grad]
                for param, value in zip(free, values, strict=True):
                    param.copy_(value)
                    param.grad = None
            recompute_weights(out)
            return out
        return self._form([value.detach().clone() for value in values])

    def row(self, i: int) -> StartPoint:
        """Return the form of one of many starts, which are along the first axis of every leaf."""
        out = copy.copy(self)
        out.leaves = [leaf.detach()[i] for leaf in self.leaves]
        out.dims = [None if dims is None else dims[1:] for dims in self.dims]
        return out

    def form(self, parts: Sequence[Any]) -> Any:
        """Return values, one for each leaf, in the form of x0; by name for a module."""
        if self.module is not None:
            return dict(zip(self.names, parts, strict=True))
        return self._form(parts)

    def list_labels(self) -> list[Any]:
        """Return the axes of every leaf that is labelled, and None for the others; also of those that a module owns."""
        return self.dims if self.module is None else [_find_dims(self.module, name) for name in self.names]

    def match(self, values: Any, what: str, covers: Callable[[Any], bool]) -> list[Any]:
        """Return the value for every leaf from a nesting like x0; None where there is none.

        Args:
            values: A nesting like x0, for a module a dictionary by parameter name; None for no values.
            what: The plural noun for the values in errors.
            covers: Whether a value applies to all leaves below its place.
        """
        out: dict[str, Any] = dict.fromkeys(self.names)

        def walk(part: Any, x: Any, name: str) -> None:
            if part is None:
                return
            if name in out:
                out[name] = part
            elif covers(part):
                out.update((key, part) for key in out if key.startswith(name))
            else:
                for key, item in _list_items(part, x, name, what):
                    walk(item, x[key], f"{name}[{key!r}]" if name else key)

        walk(values, *((self.x0, "x0") if self.module is None else (out, "")))
        return list(out.values())


def _list_items(part: Any, x: Any, name: str, what: str) -> list[tuple[Any, Any]]:
    """Return the keys or indices of a container with its items; raise an error if it has not the form of another one.

    Args:
        part: The container.
        x: The container at the same place of x0.
        name: The place in errors; "" for a module.
        what: The plural noun for the values in errors.
    """
    if isinstance(x, Mapping) and isinstance(part, Mapping):
        for key in part:
            if key not in x:
                raise ValueError(f"minimize: {what} name {key!r}, which {name or 'the module'} does not have")
        return list(part.items())
    if isinstance(x, list | tuple) and isinstance(part, list | tuple) and len(part) == len(x):
        return list(enumerate(part))
    raise TypeError(f"minimize: {what} do not have the form of {name or 'the module, by parameter name'}")


def _find_dims(module: nn.Module, name: str) -> Any:
    """Return the axes of a labelled tensor of a module, or None."""
    path, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(path), last, None)
    return value.dims if isinstance(value, Labelled) else None


def align_numbers(value: Any, like: Tensor, dims: Any, what: str, whose: str = "x0") -> Any:
    """Return a labelled value as numbers in the order of a leaf's axes and labels; other values unchanged.

    Args:
        value: The value. Axes that it does not have are filled with it.
        like: The leaf.
        dims: The axes of the leaf, or None if it has no labels.
        what: The name of the value in errors.
        whose: The name of the leaf in errors.
    """
    if not isinstance(value, Labelled):
        return value
    if dims is None or value.data.dim() == 0:
        return value.data
    aligned = Labelled(value.data.new_empty(like.shape), dims)
    try:
        aligned[...] = value.detach()
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{what}: the axes or labels are not those of {whose}: {error}") from None
    return aligned.data


def choose_tolerance(exact: bool) -> float:
    """Return the largest component of a gradient that vanishes: 1e-8 in double precision, else 1e-4."""
    return 1e-8 if exact else 1e-4


def _map_leaves(act: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    """Return a nesting with every leaf replaced by a function of the leaf and its path; containers are new, of the same kinds."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(act, item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple) and not (value and all(isinstance(item, int | float) for item in value)):
        several = [_map_leaves(act, item, f"{name}[{i}]") for i, item in enumerate(value)]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    return act(value, name)


def _read_leaf(value: Any, name: str) -> Tensor:
    """Return the data of a leaf: a tensor, labelled or not, or numbers for NumPy, in double precision."""
    if isinstance(value, Labelled | Tensor):
        data: Tensor = value.data if isinstance(value, Labelled) else value
        return data
    array = np.asarray(value)
    if array.dtype.kind not in "iufc":
        what = f"an array of {array.dtype}" if hasattr(value, "__array__") else f"a {type(value).__name__}"
        raise TypeError(
            f"minimize: {name} is {what}; x0 is tensors, numbers, a module, or dictionaries and lists of those"
        )
    return torch.from_numpy(array.astype(complex if array.dtype.kind == "c" else float))


class _FunctionOfModule(nn.Module):
    """A function of a module as a module, so that torch can call it with other parameters."""

    def __init__(self, fun: Callable[[Any], Any], module: nn.Module) -> None:
        super().__init__()
        self.fun, self.module = fun, module

    def forward(self) -> Any:
        return self.fun(self.module)


def data_of(result: Any) -> Any:
    """Return the result of a function without its labels; None if it is no tensor."""
    data = result.data if isinstance(result, Labelled) else result
    return data if isinstance(data, Tensor) else None


def loss_of(result: Any, residuals: bool) -> Tensor:
    """Return the result of a user's function as a 0-d tensor, or a vector of residuals."""
    data: Tensor | None = data_of(result)
    if data is None:
        raise TypeError(
            f"minimize: the function returned a {type(result).__name__}; return the loss as a 0-d tensor, "
            "or give jac=, or use a method that looks at values only, as nelder-mead"
        )
    if data.is_complex() and not residuals:
        raise TypeError(f"minimize: the function returned a {data.dtype} number; return a real one, for instance abs()")
    if data.dim() > 0 and not residuals:
        if data.numel() != 1:
            raise ValueError(
                f"minimize: the function returned shape {tuple(data.shape)}; return one number, or use 'lm'"
            )
        data = data.reshape(())
    return data


def value_of(data: Tensor) -> Tensor:
    """Return the loss: the number itself, or half of the sum of the squares of residuals."""
    return data if data.dim() == 0 else 0.5 * data.abs().square().sum()


def to_vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers as one real vector, complex ones as pairs."""
    parts = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
    return torch.cat([part.reshape(-1) for part in parts])


def from_vector(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a vector, or the rows of a matrix, split into tensors like these."""
    out, position = [], 0
    for tensor in like:
        shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
        count = math.prod(shape)
        piece = vector[..., position : position + count].reshape((*vector.shape[:-1], *shape))
        piece = torch.view_as_complex(piece.contiguous()) if tensor.is_complex() else piece
        out.append(piece.to(tensor.dtype))
        position += count
    return out


def to_numpy(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a tensor in double precision on the host."""
    array: np.ndarray[Any, np.dtype[np.float64]] = tensor.detach().double().cpu().numpy()
    return array
