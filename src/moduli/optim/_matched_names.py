"""The names that saved parameters have in the optimizer that loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..layout import unwrapped_name

_WRAPPER = "module."


def match_names(shapes: Mapping[str, Any], here: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the names that saved parameters have here, by saved name.

    Prefixes that `torch.compile`, FSDP and checkpointing put into names are removed; `module.` before all names (that of
    DistributedDataParallel) is added or removed; where only one side has names, the order decides.

    Args:
        shapes: The saved shapes by name.
        here: The shapes of the parameters here by name, in order.
    """
    if shapes and _are_positions(shapes) != _are_positions(here):  # without parameters there is nothing to decide
        return _match_in_order(shapes, here)
    new = {name: unwrapped_name(name) for name in shapes}
    if not any(name in here for name in new.values()):
        if all(name.startswith(_WRAPPER) for name in new.values()):
            return {old: name.removeprefix(_WRAPPER) for old, name in new.items()}
        if here and all(name.startswith(_WRAPPER) for name in here):
            return {old: _WRAPPER + name for old, name in new.items()}
    return new


def _match_in_order(shapes: Mapping[str, Any], here: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the names that saved parameters have here by their order; raise ValueError if the shapes differ."""
    if [shape and tuple(shape) for shape in shapes.values()] != list(here.values()):
        what = f"saved {list(shapes.values())}, here {list(here.values())}"
        raise ValueError(f"only one side has names of parameters, and their shapes differ in order: {what}")
    return dict(zip(shapes, here, strict=True))


def _are_positions(names: Iterable[str]) -> bool:
    return all(name == str(i) for i, name in enumerate(names))
