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
    rows = optimizer.rows
    over = None if rows is None else rows.name_tensors()
    fusing, where = optimizer.binding.fuse, "" if over is None else f" over {over}"
    plan = optimizer._plan
    if plan is not None and plan.matches(optimizer):
        segments = plan.find_segments(optimizer, optimizer.modules)
    else:
        segments = make_segments(optimizer.modules, moves=True)
    for segment in segments:
        if isinstance(segment, FusedRun):
            forms = segment.explain() if fusing else []
            names = ", ".join(sorted({each.form for each in forms}))
            how = f"one pass{where}{f' ({names})' if names else ''}" if fusing else f"one by one{where} (fuse=False)"
            lines.append(f"{how}{', which also moves the parameters' if fusing and segment.tail else ''}:")
            lines += [f"  {type(link).__name__:<{width}}  {_needs(link)}" for link in segment.links]
            lines += dict.fromkeys(f"  {line}" for each in forms for line in each.slow)
        else:
            (link,) = segment.links
            apart = "" if rows is None else f", {rows.describe(link)}"
            why = explain_unfused(link, over is not None)
            lines.append(f"{type(link).__name__:<{width + 2}}  {_needs(link)}; on its own{apart}: {why}")
            lines += [f"  {path}, inside it" for path, _ in link.links() if path]
    return "\n".join(lines)
