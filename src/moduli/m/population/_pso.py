"""Members that move by what they find: swarms, and searches of `evolve`.

* Particle swarms as a link: members of a population are attracted by their own best points and by each other's.
* The links around searches over the members of a population: each names its search, and has its settings.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ... import evolve, kernels
from ...evolve import informed_velocity, neighbourhood_best, remember_best, swarm_velocity
from ...layout import Guard
from ...optim import DeclaredLink, Need, Objective, as_real
from ...optim import ranges as check
from ...population import Shard
from .._search_link import PopulationLink


def _pull(
    x: Tensor, v: Tensor, own: Tensor, near: Tensor, word: Tensor, u: Tensor, w: float, c1: float, c2: float
) -> tuple[Tensor, Tensor]:
    """Return the velocity for one random word per coordinate, and add it to the update."""
    r1, r2 = split_word(word)
    new = swarm_velocity(x, v, own, near, r1, r2, w, c1, c2)
    return new, u - new


def split_word(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return two uniform numbers from a random word of 32 bits: the word itself, and the bits after its first twelve."""
    first = word * 2.0**-32 + 0.5
    rest = first * 4096.0
    return first, rest - torch.floor(rest)


_pull_together = kernels.fuse(_pull, inplace=("v", "u"))


class PSO(DeclaredLink):
    r"""Moves every member of a population towards the best place it has seen and the best its neighbours have seen.

    $v \leftarrow w v + c_1 r_1 \odot (p - x) + c_2 r_2 \odot (l - x),\quad u \leftarrow u - v$

    with p a member's own best place, l the best of its neighbourhood, and r uniform in [0, 1) (in single precision, both from
    one word of 32 bits: torch's generator takes five times as long). The velocity is added to whatever links before it have
    made of the gradient, so that gradient steps and swarm moves mix in one chain; without
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

    points = ("place",)
    needs = frozenset({Need.LOSS, Need.MEMBERS})
    members = "matrix"
    over_processes = True

    ranges = {check.at_least_one: ("radius",)}
    attributes = ("topology", "radius", "seed")

    inertia: float = 0.7298437881283576
    cognitive: float = 1.496179765663133
    social: float = 1.496179765663133
    topology: Literal["global", "ring", "informed"] = "global"
    radius: int = 1
    seed: int | None = None

    def update(self, objective: Objective) -> None:
        """Store the best point of every member."""
        losses = objective.get_loss(backward=False)
        losses = torch.where(losses.isfinite(), losses, torch.full_like(losses, torch.inf))
        best = self.global_state.get("best")
        # In the dtype of the losses: the population may have been converted since.
        best = torch.full_like(losses, torch.inf) if best is None else best.to(losses)
        self.global_state["best"] = best
        for param in objective.params:
            state = self.state[param]
            if "place" not in state:
                state["place"] = param.detach().clone(memory_format=torch.contiguous_format)
                state["velocity"] = torch.zeros_like(state["place"])
            # Every parameter compares with the same record, so each works on a copy of it.
            remember_best(_view_rows(param.detach()), losses, _view_rows(state["place"]), best.clone())
        best.copy_(torch.where(losses < best, losses, best))

    def apply(self, objective: Objective) -> Objective:
        """Add the swarm's velocity to the update of the links before this one."""
        best = self.global_state["best"]
        shard = None if objective.model is None else getattr(objective.model, "sharding", None)
        best = best if shard is None else shard.gather(best)  # one number from each member, over all processes
        radius = min(self.radius, max((len(best) - 1) // 2, 0))
        near = neighbourhood_best(best, radius) if self.topology == "ring" else best.argmin().reshape(1)
        updates = objective.updates
        if updates is None:
            updates = [torch.zeros_like(param, memory_format=torch.contiguous_format) for param in objective.params]
        objective.updates = [
            self._move(param, update, near, radius, shard)
            for param, update in zip(objective.params, updates, strict=True)
        ]
        return objective

    def protect(self, guard: Guard, unwritten: Sequence[Tensor] = ()) -> None:
        """Register the state with a guard: places and velocities by copies in memory that every step uses again.

        Args:
            guard: The guard.
            unwritten: Tensors of the state of which no copy is needed.
        """
        written = [row[name] for row in self.rows.values() for name in ("place", "velocity") if name in row]
        before, copies = _copies.get(self, []), []
        for at, tensor in enumerate(written):
            old = before[at] if at < len(before) else None
            fits = old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype
            reusable = old is not None and fits and old.device == tensor.device
            copies.append(old.copy_(tensor) if old is not None and reusable else tensor.clone())
        _copies[self] = copies
        guard.tensors(written, copies)
        super().protect(guard, (*unwritten, *written))

    def _fits(self, param: Tensor, update: Tensor) -> bool:
        """Return whether the velocity is computed in one pass: a swarm around single points, with all of them in this process."""
        setting = self.settings[param]
        fixed = not any(isinstance(setting[key], Tensor) for key in ("inertia", "cognitive", "social"))
        single = param.dtype is torch.float32 and param.device.type == "cpu"
        return self.topology != "informed" and fixed and single and update.is_contiguous()

    def _move(self, param: Tensor, update: Tensor, near: Tensor, radius: int, shard: Shard | None) -> Tensor:
        """Return the update of one parameter with the new velocity added."""
        state, setting = self.state[param], self.settings[param]
        x, v, place = _view_rows(param.detach()), _view_rows(state["velocity"]), _view_rows(state["place"])
        w, own, social = (_column(setting[key], x) for key in ("inertia", "cognitive", "social"))
        draws = Draws(x, self.get_generator(param.device, self.seed), shard)
        if self.topology == "informed":
            new = self._move_informed(x, v, place, draws, radius, (w, own, social), shard)
        else:
            single = self.topology == "global"
            if shard is None:
                towards = place[near]
            else:
                towards = shard.fetch(place, near) if single else shard.take(place, near)
            if single:
                towards = towards.expand_as(x)
            if self._fits(param, update):
                u = update.detach()
                # Some members at a time, so that their random numbers are still in the cache when they are used.
                leader = None
                for rows, words in draws.blocks():
                    if leader is None:
                        leader = _borrow("leader", words.shape)
                    if not single or rows.start == 0:
                        leader[: len(words)].copy_(towards[rows])
                    roles = (x[rows], v[rows], place[rows], leader[: len(words)], words, u[rows])
                    _pull_together(*([role] for role in roles), w, own, social)
                return u
            new = swarm_velocity(x, v, place, towards, *draws.pair(), w, own, social)
        v.copy_(new)
        shaped = new.reshape(as_real(param.detach()).shape)
        return update - (torch.view_as_complex(shaped.contiguous()) if param.is_complex() else shaped)

    def _move_informed(
        self, x: Tensor, v: Tensor, place: Tensor, draws: Draws, radius: int, settings: Any, shard: Shard | None
    ) -> Tensor:
        w, own, social = settings
        pulls = torch.stack([draws.uniform() for _ in range(2 * radius + 1)])
        if shard is None:
            return informed_velocity(x, v, place, pulls, radius, w, (own + social) / w, torch.empty_like(x))
        # The neighbours on both sides, wherever they are, around the members here.
        wide = torch.cat([x.new_zeros(radius, x.shape[1]), x, x.new_zeros(radius, x.shape[1])])
        places = torch.cat([shard.shift(place, -radius), place, shard.shift(place, radius)])
        pulls = torch.nn.functional.pad(pulls, (0, 0, radius, radius))
        w, own, social = (_pad(value, radius) for value in (w, own, social))
        faster = torch.nn.functional.pad(v, (0, 0, radius, radius))
        velocity = informed_velocity(wide, faster, places, pulls, radius, w, (own + social) / w, torch.empty_like(wide))
        return velocity[radius : radius + len(x)]


# The number of elements processed at a time, and of random 64-bit words that NumPy draws at a time.
_BLOCK, _DRAWN = 1 << 20, 1 << 13
# Reused buffers of a thread: mapping new pages costs more than the work on them.
_memory = threading.local()
# Points and velocities of a link before its last step, which is undone if it fails.
_copies: weakref.WeakKeyDictionary[PSO, list[Tensor]] = weakref.WeakKeyDictionary()


def _borrow(name: str, shape: Sequence[int]) -> Tensor:
    """Return a single-precision tensor in memory of this thread, whose numbers are those of its last use.

    Args:
        name: What it is used for; tensors of different names do not overlap.
        shape: Its shape.
    """
    size = math.prod(shape)
    buffers: dict[str, Tensor] = _memory.__dict__
    if name not in buffers or len(buffers[name]) < size:
        buffers[name] = torch.empty(size)
    return buffers[name][:size].view(*shape)


class Draws:
    """A sequence of random matrices like one; for the members here, equal to those that one process draws for all.

    Args:
        like: The rows of the members here.
        generator: What decides the numbers.
        shard: Which members are here.
    """

    def __init__(self, like: Tensor, generator: torch.Generator | None, shard: Shard | None) -> None:
        self.like, self.generator, self.shard = like, generator, shard
        self.single = like.dtype is torch.float32 and like.device.type == "cpu"
        if self.single:
            self.source = np.random.PCG64DXSM(int(torch.randint(2**62, (1,), generator=generator)))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows of a matrix of random words, from -2^31 to 2^31 - 1 in single precision, in a reused buffer."""
        count, width = self.like.shape
        start, total = (0, count) if self.shard is None else (self.shard.start, self.shard.total)
        # Every matrix starts at a word of 64 bits; a row may start in the middle of one.
        before, skipped = divmod(start * width, 2)
        self.source.advance(before)
        size = count if skipped else min(count, 2 * max(1, _BLOCK // (2 * max(width, 1))))
        used = before
        for first in range(0, count, size):
            last = min(count, first + size)
            number = -(-((last - first) * width + skipped) // 2)
            drawn = _borrow("words", (2 * number,))
            for part in torch.split(drawn, 2 * _DRAWN):
                part.copy_(torch.from_numpy(self.source.random_raw(len(part) // 2).view(np.int32)))
            used += number
            yield slice(first, last), drawn[skipped : skipped + (last - first) * width].view(last - first, width)
        self.source.advance(-(-total * width // 2) - used)

    def words(self) -> Tensor:
        """Return a matrix of random words."""
        return torch.cat([words.clone() for _, words in self.blocks()])

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return two matrices of numbers in [0, 1)."""
        return split_word(self.words()) if self.single else (self.uniform(), self.uniform())

    def uniform(self) -> Tensor:
        """Return numbers in [0, 1)."""
        x, generator = self.like, self.generator
        if self.single:
            return split_word(self.words())[0]
        if self.shard is not None:
            return self.shard.draw(lambda rows: torch.rand(rows, x.shape[1], dtype=x.dtype, generator=generator))
        return torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def _pad(value: Any, radius: int) -> Any:
    """Return a column of settings with ones at both ends."""
    if not isinstance(value, Tensor):
        return value
    return torch.nn.functional.pad(value, (0, 0, radius, radius), value=1.0)


def _view_rows(tensor: Tensor) -> Tensor:
    """Return one row of real numbers per member; a writable view of contiguous tensors."""
    return as_real(tensor).reshape(len(tensor), -1)


def _column(value: Any, rows: Tensor) -> Any:
    """Return a setting of each member as a column, to multiply rows."""
    return value.to(rows).reshape(-1, 1) if isinstance(value, Tensor) else value


class CEM(PopulationLink):
    r"""Draws members from a Gaussian that follows the best of them.

    Args:
        sigma: The first standard deviation around the mean of the members; None for theirs.
        elites: The share of members that the Gaussian follows.
        smoothing: How much of the new Gaussian is taken.
        noise: Added to the deviations, so that they do not vanish too early.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.CEM())
        >>> for _ in range(40):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 1e-2
        True

    References:
        R. Y. Rubinstein, "The cross-entropy method for combinatorial and continuous optimization", Methodology and Computing in
        Applied Probability 1 (1999).
    """

    search_class = evolve.CEM


class DE(PopulationLink):
    r"""Tries differences of members added to members, and keeps what is better.

    Args:
        strategy: "rand/1", "best/1" or "current-to-pbest/1".
        adapt: None, "jade" or "shade": learn scale and rate from what has worked.
        scale: The factor of differences, F.
        rate: The share of coordinates taken from a trial, CR.
        p: The share of best members, for "current-to-pbest/1".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.DE())
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 1e-3
        True

    References:
        R. Storn, K. Price, "Differential evolution", Journal of Global Optimization 11 (1997). J. Zhang, A. C. Sanderson, "JADE",
        IEEE TEC 13 (2009). R. Tanabe, A. Fukunaga, "Success-history based parameter adaptation for differential evolution",
        CEC 2013.
    """

    search_class = evolve.DE
    left_out = ("population", "shrink")


class GA(PopulationLink):
    r"""Tournaments choose parents, simulated binary crossover and polynomial mutation make children; elites stay.

    Args:
        elites: How many of the best stay.
        tournament: How many compete to become a parent.
        crossover: The probability that two parents mix.
        eta: How near children are to their parents.
        mutation: The probability that a coordinate mutates; None for one in P.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.GA())
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 0.1
        True

    References:
        K. Deb, R. B. Agrawal, "Simulated binary crossover for continuous search space", Complex Systems 9 (1995).
    """

    search_class = evolve.GA
