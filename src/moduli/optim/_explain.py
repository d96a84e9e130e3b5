"""A chain as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _fusion, _members

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer


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
    over = None if optimizer.rows is None else optimizer.rows.describe()
    for segment in _fusion.segments(optimizer, optimizer.modules):
        if isinstance(segment, _fusion.FusedRun):
            lines += _run(segment, optimizer.binding.fuse, over, width)
        else:
            name = type(segment).__name__
            where = "" if over is None else f", {_members.describe(segment, over)}"
            why = _fusion.explain_unfused(segment, over is not None)
            lines.append(f"{name:<{width + 2}}  {_needs(segment)}; on its own{where}: {why}")
            lines += [f"  {path}, inside it" for path, _ in segment.links() if path]
    return "\n".join(lines)


def _run(run: _fusion.FusedRun, fusing: bool, over: str | None, width: int) -> list[str]:
    """What a run of pointwise links does: as one pass, unless its last step was something else, with the form that ran."""
    where = "" if over is None else f" over {over}"
    slow: dict[str, None] = {}
    if not fusing:
        first = f"one by one{where} (fuse=False):"
    else:
        forms = run.explain_forms()
        names = ", ".join(sorted({each.form for each in forms}))
        first = (
            f"one pass{where}{f' ({names})' if names else ''}{', which also moves the parameters' if run.tail else ''}:"
        )
        slow = dict.fromkeys(f"  {line}" for each in forms for line in each.slow)
    links = [f"  {type(link).__name__:<{width}}  {_needs(link)}" for link in run.links]
    return [first, *links, *slow]
