"""An immutable, ordered mapping: what `Module.export_all` returns."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from moduli.labels import Tensor

K = TypeVar("K")
V = TypeVar("V", covariant=True)


class FrozenDict(Mapping[K, V]):
    """A mapping that cannot change: ordered, comparable by value, hashable when its values are.

    Two frozen dicts are equal when they have the same keys and equal values, in whatever order; any other mapping is
    compared the same way. Tensors among the values, labelled or plain, are compared as wholes: same axes, dtype and
    elements.

    Args:
        items: A mapping, or pairs of key and value.
        **named: More items, by keyword.

    Raises:
        TypeError: If a key is not hashable, or on any attempt to change it.

    Example:
        >>> d = FrozenDict(b=1, a=2)
        >>> d
        FrozenDict({'b': 1, 'a': 2})
        >>> d == {"a": 2, "b": 1}, d | {"c": 3}
        (True, FrozenDict({'b': 1, 'a': 2, 'c': 3}))
        >>> {d: "usable as a key"}[FrozenDict(a=2, b=1)]
        'usable as a key'
    """

    __slots__ = ("_items",)

    _items: dict[K, V]

    def __init__(self, items: Any = (), /, **named: Any) -> None:
        self._items = dict(items, **named)

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"

    def __or__(self, other: Mapping[K, Any]) -> "FrozenDict[K, Any]":
        return FrozenDict({**self._items, **other})

    def __ror__(self, other: Mapping[K, Any]) -> "FrozenDict[K, Any]":
        return FrozenDict({**other, **self._items})

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(key in other and _same(value, other[key]) for key, value in self._items.items())

    def __hash__(self) -> int:
        return hash(frozenset((key, _hash_of(value)) for key, value in self._items.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._items,)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, torch.Tensor)) and a is not b:
        return isinstance(b, type(a)) and a.dtype == b.dtype and torch.equal(a, b)  # type: ignore[arg-type]
    return a is b or bool(a == b)


def _hash_of(value: Any) -> int:
    # Tensors hash by identity but are compared here by value, so they contribute only what equal tensors share.
    return hash((value.dtype, value.numel()) if isinstance(value, (Tensor, torch.Tensor)) else value)
