"""Particle swarms.

References:
    Kennedy and Eberhart, Particle swarm optimization, ICNN 1995; inertia of Shi and Eberhart (1998), equation (1);
    constriction of Clerc and Kennedy, IEEE TEC 6 (2002); ring neighbourhoods of Kennedy and Mendes (2002); fully informed
    swarms of Mendes, Kennedy, Neves, IEEE TEC 8 (2004), equations (2) and (3).
"""

import torch
from torch import Tensor

from ..kernels import fuse

__all__ = ["informed_velocity", "move", "move_inside", "neighbourhood_best", "remember", "velocity"]


def velocity(
    x: Tensor,
    v: Tensor,
    own: Tensor,
    social: Tensor,
    r1: Tensor,
    r2: Tensor,
    inertia: float,
    cognition: float,
    sociality: float,
    out: Tensor | None = None,
) -> Tensor:
    """W v + c₁ r₁ (own - x) + c₂ r₂ (social - x): each member's best place, and its neighbourhood's (N x P or P)."""
    out = torch.mul(v, inertia, out=out)
    pull = own - x
    out.addcmul_(r1, pull, value=cognition)
    return out.addcmul_(r2, torch.sub(social, x, out=pull), value=sociality)


def _moved(
    x: Tensor, v: Tensor, own: Tensor, social: Tensor, r1: Tensor, r2: Tensor, w: float, c1: float, c2: float
) -> tuple[Tensor, Tensor, Tensor]:
    faster = w * v + c1 * r1 * (own - x) + c2 * r2 * (social - x)
    there = x + faster
    return there, there * 1.0, faster


def _moved_inside(
    x: Tensor,
    v: Tensor,
    own: Tensor,
    social: Tensor,
    r1: Tensor,
    r2: Tensor,
    lower: Tensor,
    upper: Tensor,
    w: float,
    c1: float,
    c2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    there = x + (w * v + c1 * r1 * (own - x) + c2 * r2 * (social - x))
    there = torch.where(there < lower, lower, there)
    there = torch.where(there > upper, upper, there)
    return there, there * 1.0, there - x


move = fuse(_moved)
"""x + v, the same again, and `velocity`, in one pass, where `social` is a matrix too."""

move_inside = fuse(_moved_inside)
"""The same between bounds, which are matrices too; the velocity is what was really moved."""


def informed_velocity(
    x: Tensor, v: Tensor, own: Tensor, draws: Tensor, radius: int, constriction: float, weight: float, out: Tensor
) -> Tensor:
    """χ (v + Σ_k φ_k (own_k - x) / K) over the K = 2 radius + 1 neighbours on the ring, φ_k = weight · uniform.

    `draws` gives K uniform N x P matrices, one per neighbour from -radius to radius.
    """
    out.zero_()
    for k, shift in enumerate(range(-radius, radius + 1)):
        out.addcmul_(draws[k], own.roll(-shift, 0) - x)
    return out.mul_(weight / (2 * radius + 1)).add_(v).mul_(constriction)


def neighbourhood_best(own_fitness: Tensor, radius: int) -> Tensor:
    """For each member, the index of the best among its neighbours on a ring; of equal ones the member itself, then nearer."""
    n = len(own_fitness)
    here = torch.arange(n, device=own_fitness.device)
    shifts = sorted(range(-radius, radius + 1), key=lambda s: (abs(s), s))
    near = torch.stack([(here + shift) % n for shift in shifts])
    return near.gather(0, own_fitness[near].argmin(0, keepdim=True))[0]


def remember(x: Tensor, fitness: Tensor, own: Tensor, own_fitness: Tensor) -> None:
    """Move the remembered best place of every member that improved, in place."""
    better = (fitness < own_fitness).nonzero()[:, 0]
    if len(better) == len(x):
        own.copy_(x)
        own_fitness.copy_(fitness)
    elif len(better):
        own.index_copy_(0, better, x.index_select(0, better))
        own_fitness.index_copy_(0, better, fitness[better])
