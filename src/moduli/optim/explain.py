"""The chain of an optimizer as text: the needs of each link, the fused passes, and why other links are not fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._fusion import FusedRun
from .segments import explain_unfused, make_segments

if TYPE_CHECKING:
    from . import Module, Optimizer


def _needs(link: Module) -> str:
    """Return the needs of a link as text."""
    wanted = sorted(need.value for need in link.all_needs())
    return f"needs {', '.join(wanted)}" if wanted else "needs nothing"


def explain(optimizer: Optimizer) -> str:
    """Return a text with the chain, the needs of each link, the fused passes, and why other links are not fused."""
    params = optimizer.list_params()
    numbers = sum(param.numel() for param in params)
    lines = [f"{len(params)} parameter{'s' * (len(params) != 1)}, {numbers:,} numbers"]
    if optimizer.binding.members is not None:
        lines[0] += f", {optimizer.binding.members} members"
    lines += [] if optimizer._following is None else optimizer._following.events
    width = max(len(type(link).__name__) for link in optimizer.modules)
    plan = optimizer._plan
    if plan is not None and plan.matches(optimizer):
        segments = plan.find_segments(optimizer, optimizer.modules)
    else:
        segments = make_segments(optimizer.modules, moves=True)
    for segment in segments:
        if isinstance(segment, FusedRun):
            lines += _explain_run(optimizer, segment, width)
        else:
            lines += _explain_link(optimizer, segment.links[0], width + 2)
    return "\n".join(lines)


def _explain_run(optimizer: Optimizer, run: FusedRun, width: int) -> list[str]:
    """Return lines about links in one pass.

    Args:
        optimizer: The optimizer.
        run: The links.
        width: The width of the column of names.
    """
    where = "" if optimizer.rows is None else f" over {optimizer.rows.name_tensors()}"
    links = [f"  {type(link).__name__:<{width}}  {_needs(link)}" for link in run.links]
    if not optimizer.binding.fuse:
        return [f"one by one{where} (fuse=False):", *links]
    forms = run.explain()
    names = ", ".join(sorted({each.form for each in forms}))
    title = f"one pass{where}{f' ({names})' if names else ''}"
    title += ", which also moves the parameters" if run.tail else ""
    return [f"{title}:", *links, *dict.fromkeys(f"  {line}" for each in forms for line in each.slow)]


def _explain_link(optimizer: Optimizer, link: Module, width: int) -> list[str]:
    """Return lines about a link that is not fused.

    Args:
        optimizer: The optimizer.
        link: The link.
        width: The width of the column of names.
    """
    rows = optimizer.rows
    apart = "" if rows is None else f", {rows.describe(link)}"
    why = explain_unfused(link, rows is not None)
    title = f"{type(link).__name__:<{width}}  {_needs(link)}; on its own{apart}: {why}"
    return [title, *(f"  {path}, inside it" for path, _ in link.links() if path)]
