"""L-BFGS for all members of a population at once: each has separate pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Objective, as_real
from .._vectors import mask_absent, unflat

_LOW = (torch.float16, torch.bfloat16)


def _view_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    out = [as_real(tensor.detach()).reshape(len(tensor), -1) for tensor in tensors]
    return [rows.float() if rows.dtype in _LOW else rows for rows in out]


def _dots(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return inner products over all parameters, one for each member."""
    products = [(x * y).sum(1).double() for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum(0)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    maxima = [rows.abs().amax(1).double() for rows in tensors if rows.shape[1]]
    # `amax` propagates NaN, which exceeds no threshold.
    return torch.stack(maxima).amax(0) if maxima else torch.zeros(len(tensors[0]), dtype=torch.float64)


def learn_members(objective: Objective, states: Sequence[Any], shared: dict[str, Any], setting: Any) -> None:
    """Add the pair of the last step of each member; the newest pair is last in (N, history, size).

    Args:
        objective: The objective of a population.
        states: The state of each parameter.
        shared: The number of pairs of each member.
        setting: The settings.
    """
    x, u = _view_rows(objective.params), _view_rows(mask_absent(objective.peek_updates(), objective.present))
    history = setting["history_size"]
    fits = all(
        "x" in state and state["x"].shape == rows.shape and state["s"].shape[1] == history
        for state, rows in zip(states, x, strict=True)
    )
    if not fits:
        shared["pairs"] = torch.zeros(len(x[0]), dtype=torch.long, device=x[0].device)
        for state, place, rows in zip(states, x, u, strict=True):
            state["x"], state["u"] = place.clone(), rows.clone()
            state["s"] = place.new_zeros(len(place), history, place.shape[1])
            state["y"] = torch.zeros_like(state["s"])
        return
    s = [place - state["x"] for place, state in zip(x, states, strict=True)]
    y = [rows - state["u"] for rows, state in zip(u, states, strict=True)]
    for state, place, rows in zip(states, x, u, strict=True):
        state["x"], state["u"] = place.clone(), rows.clone()
    long, steep = _largest(s), _largest(y)
    moved = (long > setting["ptol"]) & long.isfinite()
    changed = (steep > setting["gtol"]) & steep.isfinite()
    pairs: Tensor = shared["pairs"]
    if setting["ptol_restart"]:
        pairs = torch.where(moved, pairs, 0)
    if setting["gtol_restart"]:
        pairs = torch.where(moved & ~changed, 0, pairs)
    sy = _dots(s, y)
    yy, limits = _dots(y, y), torch.finfo(x[0].dtype)
    rounding = limits.eps * (_dots(s, s) * yy).sqrt()
    enough = (sy > max(setting["sy_tol"], limits.tiny)) & (sy > rounding) & (yy > limits.tiny)
    good = moved & changed & enough & sy.isfinite() & yy.isfinite()
    for state, a, b in zip(states, s, y, strict=True):
        for key, new in (("s", a), ("y", b)):
            stored = state[key]
            state[key] = torch.where(good[:, None, None], torch.cat([stored[:, 1:], new[:, None]], 1), stored)
    shared["pairs"] = torch.where(good, (pairs + 1).clamp(max=history), pairs)


def _scale_members(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply the rows of tensors in place by the factor of their member."""
    for rows in tensors:
        rows.mul_(factors.to(rows)[:, None])


def multiply_members(objective: Objective, states: Sequence[Any], shared: dict[str, Any], setting: Any) -> Objective:
    """Return the inverse BFGS matrix of each member times its update: the two-loop recursion, vectorised over members.

    Args:
        objective: The objective of a population.
        states: The state of each parameter.
        shared: The number of pairs of each member.
        setting: The settings.
    """
    u = _view_rows(mask_absent(objective.peek_updates(), objective.present))
    history, pairs = setting["history_size"], shared["pairs"]
    s, y = [state["s"] for state in states], [state["y"] for state in states]
    q = [rows.clone() for rows in u]
    steps: list[tuple[list[Tensor], list[Tensor], Tensor, Tensor]] = []
    gamma = torch.ones(len(pairs), dtype=torch.float64, device=pairs.device)
    for age in range(int(pairs.max()) if len(pairs) else 0):
        here = pairs > age
        of_s, of_y = [rows[:, history - 1 - age] for rows in s], [rows[:, history - 1 - age] for rows in y]
        sy = torch.where(here, _dots(of_s, of_y), 1.0)
        if age == 0:
            gamma = torch.where(here, sy / _dots(of_y, of_y).where(here, 1.0), 1.0)
        alpha = torch.where(here, _dots(of_s, q) / sy, 0.0)
        for rows, other in zip(q, of_y, strict=True):
            rows.sub_(other * alpha.to(rows)[:, None])
        steps.append((of_s, of_y, sy, torch.where(here, alpha, 0.0)))
    _scale_members(q, gamma)
    for age in reversed(range(len(steps))):
        of_s, of_y, sy, alpha = steps[age]
        beta = torch.where(pairs > age, _dots(of_y, q) / sy, 0.0)
        for rows, other in zip(q, of_s, strict=True):
            rows.add_(other * (alpha - beta).to(rows)[:, None])
    if setting["scale_first"]:
        length = _dots(u, u).sqrt()
        shrink = torch.where((pairs == 0) & (length > 1) & length.isfinite(), 1 / length, 1.0)
        _scale_members(q, shrink)
    objective.updates = [unflat(rows, [param])[0] for rows, param in zip(q, objective.params, strict=True)]
    return objective
