"""Particle swarms as a link: members of a population pulled by their own best places and by each other's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ... import kernels
from ...evolve import informed_velocity, neighbourhood_best, remember_best, swarm_velocity
from ...optim import Module, Need, Objective, as_real
from ...population import Shard

__all__ = ["PSO"]

_hasten = kernels.fuse(swarm_velocity, inplace=("v",))


class PSO(Module):
    r"""Moves every member of a population towards the best place it has seen and the best its neighbours have seen.

    $v \leftarrow w v + c_1 r_1 \odot (p - x) + c_2 r_2 \odot (l - x),\quad u \leftarrow u - v$

    with p a member's own best place, l the best of its neighbourhood, and r uniform in [0, 1). The velocity is added to
    whatever links before it have made of the gradient, so that gradient steps and swarm moves mix in one chain; without
    such links no gradient is evaluated. A loss that is not finite is the worst.

    Args:
        inertia: w, how much of the velocity stays.
        cognitive: $c_1$, the pull of a member's own best place.
        social: $c_2$, the pull of the neighbours' best place.
        topology: Who the neighbours are: "global" (all), "ring" (`radius` on both sides), or "informed": every neighbour on
            the ring pulls, with weight `cognitive + social` shared between them.
        radius: How many neighbours on each side, for a ring.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.PSO(seed=0))
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda: pop.losses(lambda net: (net(x) - y).square().mean())))
        >>> bool(losses.min() < 1e-3)
        True

    References:
        J. Kennedy, R. Eberhart, "Particle swarm optimization", ICNN 1995.
        Y. Shi, R. Eberhart, "A modified particle swarm optimizer", ICEC 1998, equation (1).
        M. Clerc, J. Kennedy, "The particle swarm: explosion, stability, and convergence", IEEE TEC 6 (2002): the defaults.
        R. Mendes, J. Kennedy, J. Neves, "The fully informed particle swarm", IEEE TEC 8 (2004).
    """

    needs = frozenset({Need.LOSS, Need.MEMBERS})
    members = "matrix"

    def __init__(
        self,
        *,
        inertia: float = 0.7298437881283576,
        cognitive: float = 1.496179765663133,
        social: float = 1.496179765663133,
        topology: Literal["global", "ring", "informed"] = "global",
        radius: int = 1,
        seed: int | None = None,
    ) -> None:
        if topology not in ("global", "ring", "informed"):
            raise ValueError(f"PSO: topology is {topology!r}; it is 'global', 'ring' or 'informed'")
        if radius < 1:
            raise ValueError(f"PSO: radius is {radius}; a member has at least one neighbour on each side")
        super().__init__({"inertia": inertia, "cognitive": cognitive, "social": social})
        self.topology = topology
        self.over_processes = topology == "global"
        self.radius = radius
        self.seed = seed

    def update(self, objective: Objective) -> None:
        """Remember the best place of every member."""
        losses = objective.get_loss(backward=False)
        losses = torch.where(losses.isfinite(), losses, torch.full_like(losses, torch.inf))
        best = self.global_state.get("best")
        if best is None:
            best = self.global_state["best"] = torch.full_like(losses, torch.inf)
        for param in objective.params:
            state = self.state[param]
            if "place" not in state:
                state["place"] = param.detach().clone(memory_format=torch.contiguous_format)
                state["velocity"] = torch.zeros_like(state["place"])
            # Every parameter compares with the same record, so each works on a copy of it.
            remember_best(_rows(param.detach()), losses, _rows(state["place"]), best.clone())
        best.copy_(torch.where(losses < best, losses, best))

    def apply(self, objective: Objective) -> Objective:
        """Add the swarm's velocity to what the links before this one want."""
        best = self.global_state["best"]
        shard = None if objective.model is None else getattr(objective.model, "sharding", None)
        radius = min(self.radius, max((len(best) - 1) // 2, 0))
        if shard is not None:
            near = shard.gather(best).argmin()  # one number from each member, over all processes
        else:
            near = neighbourhood_best(best, radius) if self.topology == "ring" else best.argmin()
        moves = [self._velocity(param, near, radius, shard) for param in objective.params]
        if objective.updates is None:
            objective.updates = [-move for move in moves]
        else:
            objective.updates = [u - move for u, move in zip(objective.updates, moves, strict=True)]
        return objective

    def _velocity(self, param: Tensor, near: Tensor, radius: int, shard: Shard | None) -> Tensor:
        state, setting = self.state[param], self.settings[param]
        generator = self.get_generator(param.device, self.seed)
        x, v, place = _rows(param.detach()), _rows(state["velocity"]), _rows(state["place"])

        def uniform(*lead: int) -> Tensor:
            if shard is not None:
                return shard.draw(lambda rows: torch.rand(rows, x.shape[1], dtype=x.dtype, generator=generator))
            return torch.rand((*lead, *x.shape), dtype=x.dtype, device=x.device, generator=generator)

        leader = place[near] if shard is None else shard.fetch(place, near.reshape(1))

        w, own, social = (_column(setting[key], x) for key in ("inertia", "cognitive", "social"))
        if self.topology == "informed":
            draws = uniform(2 * radius + 1)
            new = informed_velocity(x, v, place, draws, radius, w, (own + social) / w, torch.empty_like(x))
        elif any(isinstance(value, Tensor) for value in (w, own, social)):
            new = swarm_velocity(x, v, place, leader, uniform(), uniform(), w, own, social)
        else:
            towards = leader.expand_as(x).contiguous()
            _hasten([x], [v], [place], [towards], [uniform()], [uniform()], w, own, social)
            new = v
        if new is not v:
            v.copy_(new)
        shaped = new.reshape(as_real(param.detach()).shape)
        return torch.view_as_complex(shaped.contiguous()) if param.is_complex() else shaped


def _rows(tensor: Tensor) -> Tensor:
    """One row of real numbers per member; of what is contiguous a view, which can be written to."""
    return as_real(tensor).reshape(len(tensor), -1)


def _column(value: Any, rows: Tensor) -> Any:
    """A setting of each member, to multiply rows with."""
    return value.to(rows).reshape(-1, 1) if isinstance(value, Tensor) else value
