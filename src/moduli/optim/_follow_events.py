"""Sentences about the edits of a module that its optimizer has followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import Optimizer
    from ._following import Change

_SHOWN_NAMES = 4


def describe_change(
    optimizer: Optimizer,
    change: Change,
    fresh: set[str],
    resized: Mapping[str, Sequence[str]],
    reordered: Mapping[str, Sequence[str]],
    restarted: Sequence[str],
) -> str:
    """Return a sentence about a change that was followed.

    Args:
        optimizer: The optimizer.
        change: The change of the parameters.
        fresh: The names of parameters with another shape or other labels.
        resized: Those of them that were resized, with the links that restart for them.
        reordered: The names of parameters whose labels have another order, with the links that restart for them.
        restarted: Links that restart for all parameters.
    """
    same = [name for name, _, _ in change.replaced if name not in fresh]
    others = sorted(fresh - resized.keys())
    relabelled = [name for name, before, after in change.replaced if name in others and before.shape == after.shape]
    others = [name for name in others if name not in relabelled]
    parts = [
        _count(change.left, "left"),
        _count(change.joined, "joined"),
        _count([(name, None) for name in same], "replaced, with their state"),
        _count([(name, None) for name in resized], "resized, with the state of units that stay"),
        _count([(name, None) for name in others], "replaced by others of another shape, without state"),
        _count([(name, None) for name in relabelled], "replaced by others with other labels, without state"),
    ]
    names_by_link = dict[str, list[str]]()
    for name, links in (*resized.items(), *reordered.items()):
        for link in links:
            names_by_link.setdefault(link, []).append(name)
    parts += [f"the state of {link} restarted for {list_some(names)}" for link, names in names_by_link.items()]
    text = "; ".join(part for part in parts if part) or "parameters were renamed"
    if restarted:
        text += f"; {' and '.join(dict.fromkeys(restarted))} restarted"
    return f"at step {optimizer.current_step} the module was edited: {text}"


def _count(named: Sequence[tuple[str, Any]], what: str) -> str:
    """Return text such as "2 parameters left (a, b)"; empty for no parameters."""
    count = len(named)
    plural = "" if count == 1 else "s"
    return f"{count} parameter{plural} {what} ({list_some([name for name, _ in named])})" if named else ""


def list_some(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
