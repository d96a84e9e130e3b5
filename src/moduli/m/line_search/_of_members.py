"""A line search for each member of a population: each chooses lengths of its own, all are evaluated together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Objective, keeps_graph
from .._flat import flat_members, mask_absent, unflat_members
from ._more_thuente import Trials


def search_members(
    objective: Objective,
    trials: Callable[[float, float, Any, dict[str, Any]], Trials],
    setting: Any,
    known: dict[str, Any],
    slopes: bool,
) -> Objective:
    """What a search by trials does to one model, to each member.

    Args:
        objective: The objective of a population.
        trials: The search of one member, as `LineSearchBase.trials`.
        setting: The settings of the link: numbers, or one for each member.
        known: Where each member's memory is kept, stacked.
        slopes: Whether the search looks at slopes.
    """
    losses, grads = objective.get_loss_grads()
    if losses is None:
        losses = objective.get_loss(backward=True)
    x, g = flat_members(objective.params), flat_members(mask_absent(grads, objective.present))
    u, slope, can = _turn_downhill(g, _update(objective), bool(setting.get("plus_minus")))
    rows = can.nonzero()[:, 0].tolist()
    # Numbers come and go as lists: an operation for each member would make a step cost what the loop over models costs.
    memories, settings = _part(known, len(x)), _part_settings(setting, len(x))
    starts, falls = losses.tolist(), slope.tolist()
    searches = {i: trials(starts[i], falls[i], settings[i], memories[i]) for i in rows}
    reach = [0.0] * len(x)
    for i, search in searches.items():
        reach[i] = next(search)
    fixed = objective.evaluator is not None and objective.evaluator.fixed
    # As for one model: gradients at trial points are those of the next step, if the point is accepted.
    carries = fixed and objective.blocks is None
    gradients = slopes or (carries and not keeps_graph(objective.needs))
    turns: list[tuple[Tensor, Tensor]] = []  # values and gradients of all members, at each turn
    seen: list[dict[float, int]] = [{} for _ in reach]  # the turn at which a member was at a length
    found = [0.0] * len(x)
    with objective.moved():
        while searches:
            # Members that are done stay where they were evaluated last.
            _place(objective, x - u * _as_column(reach, u))
            f, along, there = _evaluate(objective, u, gradients)
            values = f.tolist()
            if carries and there is not None:
                turns.append((f, there))
            for i, search in list(searches.items()):
                seen[i][reach[i]] = len(turns) - 1
                value = values[i] if math.isfinite(values[i]) or values[i] == -math.inf else math.inf
                try:
                    reach[i] = search.send((value, along[i] if math.isfinite(along[i]) else math.inf))
                except StopIteration as end:
                    del searches[i]
                    found[i] = 0.0 if end.value is None else end.value
    _remember(known, memories)
    length = _as_column(found, u)
    step = torch.where(length > 0, u * length, 0.0)
    objective.updates = unflat_members(step, objective.params)
    if carries and gradients:
        chosen = [seen[i][a] if a > 0 else -1 for i, a in enumerate(found)]
        loss, grad = losses, g
        for turn, (f, there) in enumerate(turns):
            if turn in chosen:
                here = torch.tensor([at == turn for at in chosen], device=u.device)
                loss, grad = torch.where(here, f, loss), torch.where(here[:, None], there, grad)
        point = unflat_members(x - step, objective.params)
        objective.accepted = (point, loss, unflat_members(grad, objective.params))
    return objective


def _as_column(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(like)[:, None]


def _update(objective: Objective) -> Tensor:
    return flat_members(mask_absent(objective.peek_updates(), objective.present))


def _place(objective: Objective, rows: Tensor) -> None:
    for param, value in zip(objective.params, unflat_members(rows, objective.params), strict=True):
        param.copy_(value)


def _evaluate(objective: Objective, u: Tensor, gradients: bool) -> tuple[Tensor, list[float], Tensor | None]:
    """Losses, slopes along the update, and gradients at where the members are."""
    if not gradients:
        f = objective.get_loss(backward=False, at_x0=False)
        return f, [0.0] * len(u), None
    found, grads = objective.get_loss_grads(at_x0=False)
    if found is None:
        raise RuntimeError("the closure returned no loss")
    there = flat_members(grads)
    return found, (-(there * u).sum(1)).tolist(), there


def _turn_downhill(g: Tensor, u: Tensor, plus_minus: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The update (or the gradient at its length, where it points uphill), the slope, and whether there is one."""
    slope = -(g * u).sum(1).double()
    if plus_minus:
        up = slope > 0
        u, slope = torch.where(up[:, None], -u, u), torch.where(up, -slope, slope)
    down = (slope < 0) & slope.isfinite()
    size, length = (g * g).sum(1).double(), (u * u).sum(1).double()
    known = length.isfinite() & (length > 0)
    ratio = torch.where(known, (length / size).sqrt(), size.rsqrt())
    can = down | ((size > 0) & size.isfinite())
    u = torch.where(down[:, None], u, g * ratio.to(g)[:, None])
    # What has no direction must not make a point that is not a number.
    return torch.where(can[:, None], u, torch.zeros_like(u)), torch.where(down, slope, -size * ratio), can


def _part_settings(setting: Any, members: int) -> list[dict[str, Any]]:
    """The settings of each member."""
    lists = {
        key: value.tolist() if isinstance(value, Tensor) and value.dim() == 1 else [value] * members
        for key, value in setting.items()
    }
    return [{key: values[i] for key, values in lists.items()} for i in range(members)]


def _part(known: dict[str, Any], members: int) -> list[dict[str, Any]]:
    """What each member remembers of its searches; zeros are nothing."""
    out: list[dict[str, Any]] = [{} for _ in range(members)]
    for key, rows in known.items():
        for memory, row in zip(out, rows.tolist() if isinstance(rows, Tensor) else (), strict=False):
            if isinstance(row, list) and any(row):
                memory[key] = tuple(row)
            elif not isinstance(row, list) and row:
                memory[key] = row
    return out


def _remember(known: dict[str, Any], memories: list[dict[str, Any]]) -> None:
    """Stack what all members remember, zeros for nothing."""
    for key, value in {key: value for memory in memories for key, value in memory.items()}.items():
        nothing = (0.0,) * len(value) if isinstance(value, tuple) else 0.0
        rows = [memory.get(key, nothing) for memory in memories]
        known[key] = torch.tensor(rows, dtype=torch.float64)
