"""Layouts of modules and of passed tensors, and mapping over the tensors of a nested value."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._entries import lay_out
from ._layout import Layout, LayoutError
from ._structure import read

Source: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""Anything with a layout: a module, a dict of tensors, a list of tensors, or pairs such as `named_parameters()` gives."""


def layout_of(source: Source) -> Layout:
    """Return the layout of a module's parameters and buffers, or of passed tensors.

    For a module it is computed once and then compared, on each call, with the live module: names, identities, dtypes,
    shapes and devices in the whole tree. So the result is always the current layout, whatever was assigned,
    deleted, appended, tied, converted or moved since, and through whichever interface.

    Args:
        source: A module, a dict of tensors, an iterable of tensors (named "0", "1", ...) or of (name, tensor) pairs.

    Raises:
        LayoutError: If a parameter is lazy, a name occurs twice, or a module contains itself.
        TypeError: If the source is none of these.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3))
        >>> layout_of(net).names
        ('0.weight', '0.bias')
        >>> _ = net.append(nn.Linear(3, 1, bias=False))
        >>> layout_of(net).names
        ('0.weight', '0.bias', '1.weight')
        >>> layout_of(net.named_parameters()) is layout_of(net)
        True
    """
    return layout_and_tensors(source)[0]


def layout_and_tensors(source: Source) -> tuple[Layout, list[Tensor]]:
    """Return the layout together with the live parameters, one per entry and in the order of the entries.

    Args:
        source: As for `layout_of`.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> layout, tensors = layout_and_tensors(net)
        >>> tensors[0] is net.weight
        True
    """
    if isinstance(source, nn.Module):
        reading = read(source)
        return reading.structure.layout, reading.parameters
    pairs = _name_tensors(source)
    layout, chosen, _ = lay_out(pairs, [], {})
    return layout, [pairs[i][1] for i in chosen]


def addresses(source: Source) -> tuple[int, ...]:
    """Return the address of each parameter's first element, in the order of the entries.

    Results of two calls differ if storage was replaced in between, by `.data =`, `.half()`, `load_state_dict(assign=True)`
    and the like, even if the layout is the same. Tensors without memory (on "meta", or empty) have address 0.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> before = addresses(net)
        >>> net.weight.data = net.weight.data.clone()
        >>> [a == b for a, b in zip(before, addresses(net))]
        [False, True]
    """
    return tuple(map(Tensor.data_ptr, layout_and_tensors(source)[1]))


def _name_tensors(source: object) -> list[tuple[str, Tensor]]:
    """Return passed tensors with their names."""
    if isinstance(source, Tensor | str) or not isinstance(source, Iterable):
        raise TypeError(
            "a layout is that of a module, or of a dict, list or named_parameters() of tensors; "
            f"got {type(source).__name__}" + (" (put it in a list)" if isinstance(source, Tensor) else "")
        )
    pairs: list[tuple[str, Tensor]] = []
    taken: set[str] = set()
    items = source.items() if isinstance(source, Mapping) else source
    for position, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (str(position), item)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"item {position} is a {type(item).__name__}; each must be a tensor, or a pair of a name and a tensor"
            )
        if name in taken:
            raise LayoutError(f"two parameters are called {name!r}; names must be distinct")
        if is_lazy(tensor):
            raise LayoutError(f"{name!r} is lazy: its shape is not known yet; run one forward pass first")
        taken.add(name)
        pairs.append((name, tensor))
    return pairs


def map_tensors(value: Any, act: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None) -> Any:
    """Return a nested value with every tensor in it replaced; its containers are new, of the same kinds.

    Args:
        value: A tensor, or lists, tuples, deques and dictionaries of values.
        act: Returns the replacement of a tensor.
        other: Returns the replacement of any other leaf; None keeps it.

    Example:
        >>> import torch
        >>> from moduli.layout import map_tensors
        >>> map_tensors({"history": [torch.ones(2), 3]}, torch.neg)
        {'history': [tensor([-1., -1.]), 3]}
    """
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, act, other) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((map_tensors(item, act, other) for item in value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, act, other) for item in value)
    return value if other is None else other(value)
