"""Backtracking for all members of a population at once: each shortens, accepts or rejects on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from .._flat import flat_members, masked, unflat_members

__all__ = ["backtrack_members", "downhill"]


def backtrack_members(objective: Objective, setting: Any, memory: dict[str, Any]) -> Objective:
    """What `Backtracking` does to one model, to each member; all are evaluated together.

    Args:
        objective: The objective of a population.
        setting: The settings of the link: numbers, or one for each member.
        memory: Where the scale of each member's first length is kept.
    """
    losses, grads = objective.get_loss_grads()
    if losses is None:
        losses = objective.get_loss(backward=True)
    loss = losses.double()
    x = flat_members(objective.params)
    u, slope, can = downhill(flat_members(masked(grads, objective.present)), _update(objective))
    scale = memory.get("scale")
    if scale is None or not setting["adaptive"]:
        scale = torch.ones_like(loss)
    a = torch.as_tensor(setting["init"]).to(loss) * scale
    found, low, low_at = torch.zeros_like(a), torch.full_like(a, torch.inf), torch.zeros_like(a)
    open_ = can.clone()
    with objective.moved():
        for _ in range(setting["maxiter"]):
            if not bool(open_.any()):
                break
            # Members that are done stay where they ended, so that nothing they do can disturb the others.
            reach = torch.where(open_, a, found)
            trial = unflat_members(x - u * reach.to(u)[:, None], objective.params)
            for param, value in zip(objective.params, trial, strict=True):
                param.copy_(value)
            f = objective.get_loss(backward=False, at_x0=False).double()
            lower = open_ & f.isfinite() & (f < low)
            low, low_at = torch.where(lower, f, low), torch.where(lower, a, low_at)
            good = open_ & _accepts(setting["condition"], a, f, loss, slope, setting["c"])
            found = torch.where(good, a, found)
            open_ = open_ & ~good
            a = torch.where(open_, a * setting["beta"], a)
    fallback = open_ & (low < loss)
    found = torch.where(fallback, low_at, found)
    stuck = open_ & ~fallback
    shorter = torch.where(scale > 1e-100, scale * setting["beta"] ** setting["maxiter"], torch.ones_like(scale))
    # A member that could not search at all keeps what it knew.
    memory["scale"] = torch.where(can, torch.where(stuck, shorter, torch.ones_like(scale)), scale)
    step = torch.where((found > 0)[:, None], u * found.to(u)[:, None], torch.zeros_like(u))
    objective.updates = unflat_members(step, objective.params)
    return objective


def _update(objective: Objective) -> Tensor:
    return flat_members(masked(objective.peek_updates(), objective.present))


def downhill(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The update (or the gradient at its length, where it points uphill), the slope, and whether there is one."""
    slope = -(g * u).sum(1).double()
    down = (slope < 0) & slope.isfinite()
    size, length = (g * g).sum(1).double(), (u * u).sum(1).double()
    known = length.isfinite() & (length > 0)
    ratio = torch.where(known, (length / size).sqrt(), size.rsqrt())
    can = down | ((size > 0) & size.isfinite())
    u = torch.where(down[:, None], u, g * ratio.to(g)[:, None])
    # What has no direction must not make a point that is not a number.
    return torch.where(can[:, None], u, torch.zeros_like(u)), torch.where(down, slope, -size * ratio), can


def _accepts(condition: str, a: Tensor, f: Tensor, loss: Tensor, slope: Tensor, c: Any) -> Tensor:
    if condition == "decrease":
        return f < loss
    good = f <= loss + c * a * slope
    return good if condition == "armijo" else good & (f >= loss + (1 - c) * a * slope)
