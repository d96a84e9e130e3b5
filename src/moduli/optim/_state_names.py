"""The names under which state is saved: of parameters, of placeholders, and of vectors over all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import Optimizer

ALL = "@all:"
"""The prefix of the saved name of state over all parameters; the path of the link follows."""


def name_stand_ins(optimizer: Optimizer) -> dict[int, str]:
    """Return the names of the placeholder parameters that links make for their children, by slot."""
    return {
        optimizer.binding.slots.number(tensor): f"@{path}:{key}:{i}"
        for path, link in optimizer._links
        for key, stand_ins in link._stand_ins.items()
        for i, tensor in enumerate(stand_ins.tensors)
    }


def make_namer(optimizer: Optimizer) -> Callable[[Tensor], str]:
    """Return the function that maps the optimizer's parameters to names, including those that a program added."""
    slots = optimizer.binding.slots
    if any(slots.find_name(param) is None for param in optimizer.list_params()):
        slots.name_params(optimizer.param_groups)
    return slots.find_name  # type: ignore[return-value]


def split_key(entry: str, paths: Iterable[str]) -> tuple[str, str]:
    """Split "path/key" into the path of a link and the key of its state; both may have slashes."""
    path = max((path for path in paths if entry.startswith(f"{path}/")), key=len, default="")
    return path, entry[len(path) + 1 :]


def find_maker(name: str, paths: Iterable[str]) -> str | None:
    """Return the path of the link that made the tensor with this name ("@path:key:position"); None for a parameter."""
    return max((path for path in paths if name.startswith(f"@{path}:")), key=len, default=None)
