"""The rows of links (state per parameter) for a parameter that left, was resized, or has another precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..layout import RESIZED, Reorder, UnitMap, map_tensors
from ._label_order import follow
from ._resized_state import resize_row
from ._saved_precision import cast_value, widens_state

if TYPE_CHECKING:
    from . import Module, Optimizer


def drop_rows(optimizer: Optimizer, links: Sequence[Module], slot: int) -> None:
    """Remove the state of a parameter, and that of tensors that links derived from it.

    Args:
        optimizer: The optimizer.
        links: Its links.
        slot: The slot of the parameter.
    """
    slots = optimizer.binding.slots
    for link in links:
        own = [each for each in link.rows if slots.find_source(each) == slot]
        for each in own:
            del link.rows[each]
        if own:
            link.row_writes.add()


def resize_rows(
    optimizer: Optimizer, links: Sequence[Module], slot: int, maps: Sequence[UnitMap], after: Tensor
) -> list[str]:
    """Resize the state of a parameter that got more units or fewer; return the names of links that restart for it.

    Args:
        optimizer: The optimizer.
        links: Its links.
        slot: The slot of the parameter.
        maps: How the parameter was resized, step by step.
        after: The parameter after.
    """
    lead = int(optimizer.binding.members is not None)
    return _replace_rows(optimizer, links, slot, lambda link, row: resize_row(link, row, maps, after, lead))


def reorder_rows(
    optimizer: Optimizer, links: Sequence[Module], slot: int, reorder: Reorder, name: str, shape: Sequence[int]
) -> list[str]:
    """Reorder the state of a parameter whose labels have another order; return the names of links that restart for it.

    Args:
        optimizer: The optimizer.
        links: Its links.
        slot: The slot of the parameter.
        reorder: How the parameter is reordered.
        name: Its name.
        shape: Its shape before, without members.
    """
    lead = int(optimizer.binding.members is not None)

    def change(link: Module, row: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return follow(link, f"{type(link).__name__} for {name}", row, reorder, shape, lead)
        except ValueError:
            return None

    return _replace_rows(optimizer, links, slot, change)


def _replace_rows(
    optimizer: Optimizer,
    links: Sequence[Module],
    slot: int,
    change: Callable[[Module, dict[str, Any]], dict[str, Any] | None],
) -> list[str]:
    """Change the state of a parameter; return the names of links that restart for it, since `change` returned None."""
    slots, restarted = optimizer.binding.slots, list[str]()
    inner = {link for link in links if any(each != slot and slots.find_source(each) == slot for each in link.rows)}
    for link in links:
        row = link.rows.get(slot)
        # A link that derives tensors from the parameter (a projection) restarts together with the links that work on them.
        derives = bool(inner) and any(child in inner for _, child in link.links())
        if row is None and not derives:
            continue
        changed = None if derives or row is None else change(link, row)
        before_rows = [each for each in link.rows if slots.find_source(each) == slot]
        for each in before_rows:
            del link.rows[each]
        if changed is not None:
            link.rows[slot] = link.make_row(changed)
        elif before_rows:
            restarted.append(type(link).__name__)
        link.row_writes.add()
    return restarted


def convert_rows(links: Sequence[Module], slot: int, dtype: torch.dtype, device: torch.device, after: Tensor) -> None:
    """Convert the state of a parameter to the dtype and device that the parameter has now.

    Args:
        links: The links.
        slot: The slot of the parameter.
        dtype: The dtype before.
        device: The device before.
        after: The parameter.
    """
    for link in links:
        row = link.rows.get(slot)
        if row is not None:
            cast = {key: cast_value(value, str(dtype), after, widens_state(link, key)) for key, value in row.items()}
            moved = map_tensors(cast, lambda t: t.to(after.device) if t.device == device else t)
            link.rows[slot] = link.make_row(moved)
            link.row_writes.add()


class ParameterKind(NamedTuple):
    """A parameter, with an earlier dtype and device of it."""

    param: Tensor
    dtype: torch.dtype
    device: torch.device

    def differs(self) -> bool:
        """Return whether the parameter has another dtype or device now."""
        return self.param.dtype != self.dtype or self.param.device != self.device


def read_kinds(named: Iterable[tuple[str, Tensor]]) -> list[ParameterKind]:
    """Return the dtypes and devices that parameters have now."""
    return [ParameterKind(param, param.dtype, param.device) for _, param in named]


def has_other_kind(kinds: Iterable[ParameterKind]) -> bool:
    """Return whether some of these parameters were converted or moved since."""
    return any(kind.differs() for kind in kinds)


def convert_state(optimizer: Optimizer, links: Sequence[Module], kinds: Iterable[ParameterKind]) -> str:
    """Convert the state of parameters that were converted or moved in place; return a sentence about it.

    Args:
        optimizer: The optimizer.
        links: Its links.
        kinds: The parameters with their dtypes and devices before.
    """
    slots, converted = optimizer.binding.slots, [kind for kind in kinds if kind.differs()]
    for kind in converted:
        slot = slots.find(kind.param)
        if slot is not None:
            convert_rows(links, slot, kind.dtype, kind.device, kind.param)
    optimizer.binding.writes.add()
    optimizer._carried = None
    what = sorted({f"{kind.param.dtype} on {kind.param.device}" for kind in converted})
    return f"at step {optimizer.current_step} {len(converted)} parameters had become {', '.join(what)}, and their state with them"


def find_sizes(replaced: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, int]:
    """Return the new sizes of the model's axes that were resized, by name."""
    sizes: dict[str, int] = {}
    for _, before, after in replaced:
        for each in RESIZED.find(before, after) or ():
            sizes |= each.sizes
    return sizes
