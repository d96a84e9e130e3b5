"""Tensors by name that are read when they are asked for: what all views of files have in common."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor


class TensorMapping(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for; `held` has the names, and looking for one reads nothing.

    Args:
        held: The names, in order.
    """

    def __init__(self, held: Collection[str]) -> None:
        self._held = held

    def __contains__(self, name: Any) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
