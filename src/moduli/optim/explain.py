"""The chain of an optimizer as text: what each link needs, what runs as one pass, and why the rest does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _fusion

if TYPE_CHECKING:
    from . import Module, Optimizer


def _needs(link: Module) -> str:
    wanted = sorted(need.value for need in link.all_needs())
    return f"needs {', '.join(wanted)}" if wanted else "needs nothing"


def explain(optimizer: Optimizer) -> str:
    """The chain, what each link needs, what runs as one pass, and why the rest does not."""
    params = optimizer.list_params()
    numbers = sum(param.numel() for param in params)
    lines = [f"{len(params)} parameter{'s' * (len(params) != 1)}, {numbers:,} numbers"]
    if optimizer.binding.members is not None:
        lines[0] += f", {optimizer.binding.members} members"
    width = max(len(type(link).__name__) for link in optimizer.modules)
    rows = optimizer.rows
    over = None if rows is None else rows.name_tensors()
    fusing, where = optimizer.binding.fuse, "" if over is None else f" over {over}"
    for segment in _fusion.find_segments(optimizer, optimizer.modules):
        if isinstance(segment, _fusion.FusedRun):
            told = [bound.explain() for cohort in segment._cohorts for bound in cohort.bound.values() if fusing]
            forms = [each for each in told if each is not None]
            names = ", ".join(sorted({each.form for each in forms}))
            how = f"one pass{where}{f' ({names})' if names else ''}" if fusing else f"one by one{where} (fuse=False)"
            lines.append(f"{how}{', which also moves the parameters' if fusing and segment.tail else ''}:")
            lines += [f"  {type(link).__name__:<{width}}  {_needs(link)}" for link in segment.links]
            lines += dict.fromkeys(f"  {line}" for each in forms for line in each.slow)
        else:
            apart = "" if rows is None else f", {rows.describe(segment)}"
            why = _fusion.explain_unfused(segment, over is not None)
            lines.append(f"{type(segment).__name__:<{width + 2}}  {_needs(segment)}; on its own{apart}: {why}")
            lines += [f"  {path}, inside it" for path, _ in segment.links() if path]
    return "\n".join(lines)
