"""An entry of the cache: a value, what it was made from, and the look that tells whether all of it still holds."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import torch

from ._ambient import Ambient, ambient
from ._recorder import Link

__all__ = ["LOOK", "LOOK_AND_FLAG", "Entry", "Scope", "states"]

LOOK: Final = attrgetter("dtype", "shape", "device")
LOOK_AND_FLAG: Final = attrgetter("dtype", "shape", "device", "requires_grad")


class Scope:
    """One outermost `with cached():` and the entries that end with it."""

    __slots__ = ("depth", "entries")

    def __init__(self) -> None:
        self.depth = 0
        self.entries: dict[tuple[int, str], dict[str, Entry]] = {}


class Entry:
    """A value and all that it was made from."""

    __slots__ = (
        "aliases",
        "ambient",
        "dtype",
        "epoch",
        "grad",
        "guard",
        "home",
        "leaf",
        "links",
        "look",
        "pointers",
        "requires",
        "scope",
        "sources",
        "spent",
        "state",
        "value",
        "versions",
        "watched",
    )

    value: Any
    leaf: torch.Tensor
    requires: bool
    epoch: int
    home: dict[str, Any]
    ambient: Ambient
    grad: object
    dtype: object
    scope: Scope | None
    spent: list[bool]
    links: list[Link]
    sources: list[torch.Tensor]
    watched: list[torch.Tensor]
    versions: list[int]
    pointers: list[int]
    look: Callable[[torch.Tensor], tuple[Any, ...]]
    state: list[tuple[Any, ...]]
    guard: Any
    aliases: list[torch.Tensor]

    def holds(self) -> bool:
        """Whether torch's state and the form of every source are as they were: the part that `guard` can vouch for."""
        if self.ambient != ambient() or self.state != states(self.sources, self.look):
            return False
        # Under autocast the dispatch state does not show the dtype that is cast to.
        self.guard = _guard(self.sources) if self.look is LOOK and len(self.ambient) == 2 else None
        return True


def states(sources: list[torch.Tensor], look: Callable[[torch.Tensor], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The form of each source."""
    return [(look(source), source.stride()) for source in sources]


def _guard(sources: list[torch.Tensor]) -> Any:
    """A check in one call that sources have the form they have now, under the dispatch state that holds now.

    It stands for `Entry.holds`: the dispatch state of a thread shows transforms, modes, tracing, autocast and
    inference mode. What it refuses is looked at again in full, so it makes reuse cheaper and never more frequent.
    """
    if not sources:
        return None
    unknown: Any = [[None] * source.ndim for source in sources]
    return torch._C._dynamo.guards.TensorGuards(*sources, dynamic_dims_sizes=unknown, dynamic_dims_strides=unknown)
