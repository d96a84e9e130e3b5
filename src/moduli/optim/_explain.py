"""A chain as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _fusion

if TYPE_CHECKING:
    from .modular import Optimizer
    from .module import Module

__all__ = ["explain"]


def _needs(link: Module) -> str:
    wanted = sorted(need.value for need in link.all_needs())
    return f"needs {', '.join(wanted)}" if wanted else "needs nothing"


def explain(optimizer: Optimizer) -> str:
    """The chain, what each link needs, what runs as one pass, and why the rest does not."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = sum(param.numel() for param in params)
    lines = [f"{len(params)} parameter{'s' * (len(params) != 1)}, {numbers:,} numbers"]
    if optimizer.binding.members is not None:
        lines[0] += f", {optimizer.binding.members} members"
    width = max(len(type(link).__name__) for link in optimizer.modules)
    fusing = optimizer.binding.fuse
    for segment in _fusion.segments(optimizer, optimizer.modules):
        if isinstance(segment, _fusion.FusedRun):
            end = ", which also moves the parameters" if segment.tail and fusing else ""
            lines.append(f"one pass{end}:" if fusing else "one by one (fuse=False):")
            lines += [f"  {type(link).__name__:<{width}}  {_needs(link)}" for link in segment.links]
        else:
            name = type(segment).__name__
            lines.append(f"{name:<{width + 2}}  {_needs(segment)}; on its own: {_fusion.why_not(segment)}")
            lines += [f"  {path}, inside it" for path, _ in segment.links() if path]
    return "\n".join(lines)
