"""A line search for each member of a population: each chooses its lengths, all are evaluated together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...optim import Objective, keeps_graph
from .._vectors import flat_members, mask_absent, unflat

if TYPE_CHECKING:
    from ._base import Trials


def search_members(
    objective: Objective,
    trials: Callable[[float, float, Any, dict[str, Any]], Trials],
    setting: Any,
    remembered: dict[str, Any],
    slopes: bool,
) -> Objective:
    """Run a search by trials for each member of a population; return the objective with each member's step.

    Args:
        objective: The objective of a population.
        trials: The search of one member, as `LineSearchBase.trials`.
        setting: The settings of the link: numbers, or one for each member.
        remembered: The stacked search states of all members.
        slopes: Whether the search needs slopes.
    """
    losses, grads = objective.get_loss_grads()
    if losses is None:
        losses = objective.get_loss(backward=True)
    x, g = flat_members(objective.params), flat_members(mask_absent(grads, objective.present))
    u, slope, can = _turn_downhill(g, _update(objective), bool(setting.get("plus_minus")))
    rows = can.nonzero()[:, 0].tolist()
    # Scalars are passed as lists: an operation for each member would cost as much as a loop over models.
    memories, settings = _part(remembered, len(x)), _part_settings(setting, len(x))
    starts, falls = losses.tolist(), slope.tolist()
    searches = _Searches({i: trials(starts[i], falls[i], settings[i], memories[i]) for i in rows}, len(x))
    fixed = objective.evaluator is not None and objective.evaluator.fixed
    # As for one model: the gradient at an accepted trial point is that of the next step.
    carries = fixed and objective.blocks is None
    gradients = slopes or (carries and not keeps_graph(objective.needs))
    rounds: list[tuple[Tensor, Tensor]] = []  # values and gradients of all members
    with objective.moved():
        while searches.running:
            # Members that are done stay at their last trial point.
            _place(objective, x - u * _as_column(searches.reach, u))
            f, along, there = _evaluate(objective, u, gradients)
            if carries and there is not None:
                rounds.append((f, there))
            searches.advance(f.tolist(), along)
    _remember(remembered, memories)
    length = _as_column(searches.lengths, u)
    step = torch.where(length > 0, u * length, 0.0)
    objective.updates = unflat(step, objective.params)
    if carries and gradients:
        loss, grad = _select_rounds(searches.find_rounds(), rounds, losses, g)
        objective.accepted = (unflat(x - step, objective.params), loss, unflat(grad, objective.params))
    return objective


class _Searches:
    """One search for each member, which are all sent the values of a round together.

    Args:
        running: The searches, by member.
        members: How many members there are.
    """

    def __init__(self, running: dict[int, Trials], members: int) -> None:
        self.running = running
        self.reach = [0.0] * members  # the length that each member tries next
        self.lengths = [0.0] * members  # the result of each search; 0 for none
        self._round = -1
        self._tried: list[dict[float, int]] = [{} for _ in range(members)]  # the round of each length
        for i, search in running.items():
            self.reach[i] = next(search)

    def advance(self, values: list[float], slopes: list[float]) -> None:
        """Send the values and slopes of all members to their searches, and remove those that end."""
        self._round += 1
        for i, search in list(self.running.items()):
            self._tried[i][self.reach[i]] = self._round
            value = values[i] if math.isfinite(values[i]) or values[i] == -math.inf else math.inf
            try:
                self.reach[i] = search.send((value, slopes[i] if math.isfinite(slopes[i]) else math.inf))
            except StopIteration as end:
                del self.running[i]
                self.lengths[i] = 0.0 if end.value is None else end.value

    def find_rounds(self) -> list[int]:
        """Return for each member the round in which it tried the resulting length; -1 for none."""
        return [tried[length] if length > 0 else -1 for tried, length in zip(self._tried, self.lengths, strict=True)]


def _select_rounds(
    chosen: list[int], rounds: list[tuple[Tensor, Tensor]], loss: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss and gradient of each member in the round chosen for it.

    Args:
        chosen: The round of each member; -1 for none.
        rounds: The losses and gradients of all members, by round.
        loss: The losses for members without a round.
        grad: The gradients for these.
    """
    for turn in set(chosen) - {-1}:
        here = torch.tensor([at == turn for at in chosen], device=grad.device)
        loss, grad = torch.where(here, rounds[turn][0], loss), torch.where(here[:, None], rounds[turn][1], grad)
    return loss, grad


def _as_column(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(like)[:, None]


def _update(objective: Objective) -> Tensor:
    return flat_members(mask_absent(objective.peek_updates(), objective.present))


def _place(objective: Objective, rows: Tensor) -> None:
    for param, value in zip(objective.params, unflat(rows, objective.params), strict=True):
        param.copy_(value)


def _evaluate(objective: Objective, u: Tensor, gradients: bool) -> tuple[Tensor, list[float], Tensor | None]:
    """Return losses, slopes along the update, and gradients at the current members."""
    if not gradients:
        f = objective.get_loss(backward=False, at_x0=False)
        return f, [0.0] * len(u), None
    losses, grads = objective.get_loss_grads(at_x0=False)
    if losses is None:
        raise RuntimeError("the closure returned no loss")
    there = flat_members(grads)
    return losses, (-(there * u).sum(1)).tolist(), there


def _turn_downhill(g: Tensor, u: Tensor, plus_minus: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the update (or the gradient with its length, if it points uphill), the slope, and whether there is a direction."""
    slope = -(g * u).sum(1).double()
    if plus_minus:
        up = slope > 0
        u, slope = torch.where(up[:, None], -u, u), torch.where(up, -slope, slope)
    down = (slope < 0) & slope.isfinite()
    size, length = (g * g).sum(1).double(), (u * u).sum(1).double()
    valid = length.isfinite() & (length > 0)
    ratio = torch.where(valid, (length / size).sqrt(), size.rsqrt())
    can = down | ((size > 0) & size.isfinite())
    u = torch.where(down[:, None], u, g * ratio.to(g)[:, None])
    # Without a direction the point must not become NaN.
    return torch.where(can[:, None], u, torch.zeros_like(u)), torch.where(down, slope, -size * ratio), can


def _part_settings(setting: Any, members: int) -> list[dict[str, Any]]:
    """Return the settings of each member."""
    lists = {
        key: value.tolist() if isinstance(value, Tensor) and value.dim() == 1 else [value] * members
        for key, value in setting.items()
    }
    return [{key: values[i] for key, values in lists.items()} for i in range(members)]


def _part(stored: dict[str, Any], members: int) -> list[dict[str, Any]]:
    """Return the search state of each member; zeros stand for none."""
    out: list[dict[str, Any]] = [{} for _ in range(members)]
    for key, rows in stored.items():
        for memory, row in zip(out, rows.tolist() if isinstance(rows, Tensor) else (), strict=False):
            if isinstance(row, list) and any(row):
                memory[key] = tuple(row)
            elif not isinstance(row, list) and row:
                memory[key] = row
    return out


def _remember(states: dict[str, Any], memories: list[dict[str, Any]]) -> None:
    """Store the stacked search states of all members, zeros for none."""
    for key, value in {key: value for memory in memories for key, value in memory.items()}.items():
        nothing = (0.0,) * len(value) if isinstance(value, tuple) else 0.0
        rows = [memory.get(key, nothing) for memory in memories]
        states[key] = torch.tensor(rows, dtype=torch.float64)
