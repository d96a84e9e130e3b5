"""`Search`: what every ask-and-tell search has in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ._noise import Share, key
from ._problem import Bounds, Coordinates, Reason


class Search(ABC):
    """A search that is asked for members and told their fitness, which it minimises.

    One generation is `x = search.ask()`, `search.tell(fitness)` with one number per row of x. Until `tell` is called,
    `ask` gives the same members again: they are a function of `state`, a dict of tensors and numbers that `state_dict`
    copies. A search that is saved anywhere, even between `ask` and `tell`, and loaded elsewhere goes on bit for bit.
    NaN counts as the worst fitness there is. Random numbers come from the search's own generator.

    Args:
        x0: Where to start, one number per coordinate; its dtype and device are those of the search.
        population: How many members a generation has.
        seed: Decides every random number.
        bounds: (lower, upper), numbers or tensors.
        integer: Indices of coordinates that take whole numbers, where the method allows them.
        categorical: {index: number of categories} of coordinates that take 0, 1, ..., where the method allows them.
        target: Stop when a fitness this low is found.
        patience: Stop when the best fitness has not improved for so many generations.
        max_evaluations: Stop before more members than this would have been evaluated.
        tol: Stop when the members differ by less than this, relative to their size.
        own: Whether the search may keep x0 itself instead of a copy; the caller does not write to it again.
    """

    allows_integer: ClassVar[bool] = False
    allows_categorical: ClassVar[bool] = False
    least: ClassVar[int] = 1
    multiple: ClassVar[int] = 1
    share: Share | None = None
    """This process's part of long sums over noise, where several processes run the same search."""

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int,
        seed: int = 0,
        bounds: Bounds | None = None,
        integer: Iterable[int] | None = None,
        categorical: Mapping[int, int] | None = None,
        target: float | None = None,
        patience: int | None = None,
        max_evaluations: int | None = None,
        tol: float = 1e-12,
        own: bool = False,
    ) -> None:
        name = type(self).__name__
        if not isinstance(x0, Tensor) or x0.dim() != 1 or not x0.dtype.is_floating_point:
            what = f"{x0.dtype} of shape {tuple(x0.shape)}" if isinstance(x0, Tensor) else type(x0).__name__
            raise TypeError(f"{name} starts from a vector of floating-point numbers; got {what}")
        if x0.numel() == 0:
            raise ValueError(f"{name} has nothing to search over: x0 is empty")
        if not bool(x0.isfinite().all()):
            raise ValueError(f"x0 of {name} contains infinities or NaN")
        if integer and not self.allows_integer:
            raise TypeError(f"{name} has no integer coordinates; use DE, PSO, GA or CEM")
        if categorical and not self.allows_categorical:
            raise TypeError(f"{name} has no categorical coordinates: their order means nothing; use GA or CEM")
        if not isinstance(population, int) or population < self.least:
            raise ValueError(f"{name} needs at least {self.least} members; population={population!r}")
        if max_evaluations is not None and population > max_evaluations:
            raise ValueError(f"max_evaluations={max_evaluations} is less than one generation of {population} members")
        self.dim, self.dtype, self.device = x0.numel(), x0.dtype, x0.device
        self.coordinates = Coordinates(self.dim, x0.dtype, x0.device, bounds, integer, categorical)
        self.target, self.patience, self.max_evaluations, self.tol = target, patience, max_evaluations, tol
        self._generator = torch.Generator(x0.device)
        self._pending: Any = None
        self._lent = False
        # A model may fill most of the memory, so copies are counted here.
        inside = x0.detach().clamp(self.coordinates.lower, self.coordinates.upper)
        best = x0.detach() if own and not self.coordinates.bounded else inside.clone()
        self.state: dict[str, Any] = {
            "seed": int(seed),
            "counter": 0,
            "generation": 0,
            "evaluations": 0,
            "population": population,
            "best": self.coordinates.rounded(best),
            "best_fitness": math.inf,
            "stalled": 0,
            "lost": 0,
            "flat": 0,
        }
        del best
        self._start(inside)

    # -- what a method fills in

    @abstractmethod
    def _start(self, x0: Tensor) -> None:
        """Put the first state of the method into `state`."""

    @abstractmethod
    def _propose(self, start: int, stop: int) -> Tensor:
        """Members `start` to `stop` of the current generation, as they are to be evaluated."""

    @abstractmethod
    def _learn(self, fitness: Tensor) -> None:
        """Change `state` by what the current generation's fitness (double, no NaN) teaches."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The centre of the search, inside the bounds: of the distribution, or of the members."""

    def parts(self, index: int) -> Iterator[tuple[int, Tensor]]:
        """One member in parts, (where it begins, numbers), each to be used before the next is asked for.

        Seed-replayed methods over many coordinates never hold more than one part.
        """
        yield 0, self._propose(index, index + 1)[0]

    def _improve(self, index: int) -> None:
        """Make a member the best."""
        if self._lent:
            self.state["best"], self._lent = torch.empty_like(self._tensor("best")), False
        for at, part in self.parts(index):
            self._tensor("best")[at : at + len(part)] = part

    def _find_convergence(self) -> Reason | None:
        """A reason that only this method knows of."""
        return None

    def _draws(self) -> int:
        """How many counters a generation uses up."""
        return 1

    # -- what users call

    def ask(self) -> Tensor:
        """The members to evaluate, one per row: a copy."""
        return self.rows(0, self.population)

    def rows(self, start: int, stop: int) -> Tensor:
        """Some of the members that `ask` would give. Seed-replayed methods make only these."""
        if not 0 <= start <= stop <= self.population:
            raise IndexError(f"members {start} to {stop} of a population of {self.population}")
        with torch.no_grad():
            return self._propose(start, stop)

    def draft(self) -> Search | None:
        """What others need to make the members of this generation: its mean and its seed.

        None where members are stored, or so small that they are sent.
        """
        return None

    def tell(self, fitness: Tensor | Iterable[float]) -> None:
        """Give the fitness of every member that `ask` gave, in order; lower is better.

        Raises:
            ValueError: If there is not one number per member. Nothing has changed then.
        """
        if isinstance(fitness, Tensor) and fitness.is_complex():
            raise TypeError("fitness is complex; a search needs real numbers that can be ordered")
        # NumPy takes a third of torch's time for few numbers; numbers from Python are double.
        given = fitness.detach().cpu().double().numpy() if isinstance(fitness, Tensor) else [float(f) for f in fitness]
        state, values = self.state, np.array(given, dtype=np.float64)
        if values.shape != (self.population,):
            raise ValueError(f"tell: one fitness for each of {self.population} members; got shape {values.shape}")
        values[values != values] = math.inf
        place = int(values.argmin())
        value, worst = float(values[place]), float(values.max())
        improved = value < self.best_fitness
        used, population = self._draws(), self.population
        with torch.no_grad():
            if improved:
                self._improve(place)
            self._learn(torch.from_numpy(values).to(self.device))
        state["best_fitness"] = min(value, self.best_fitness)
        state["stalled"] = 0 if improved else self._int("stalled") + 1
        state["lost"] = 0 if value < math.inf else self._int("lost") + 1
        # One member alone is neither flat nor steep.
        state["flat"] = self._int("flat") + 1 if population > 1 and value == worst else 0
        state["counter"] = self._int("counter") + used
        state["generation"] = self.generation + 1
        state["evaluations"] = self.evaluations + population
        self._pending = None

    def revise(self, **entries: Tensor) -> None:
        """Replace tensors of the state, when a gradient step or the user moved what the search is about.

        Members that were asked for and not told yet belong to the old state and are forgotten. The search keeps the
        tensors that are given.

        Raises:
            KeyError: If the state has no such tensor.
            ValueError: If the shape or dtype is another. Nothing has changed then.

        Example:
            >>> import torch
            >>> from moduli.evolve import OpenES
            >>> search = OpenES(torch.zeros(3))
            >>> search.revise(mean=torch.ones(3))
            >>> search.mean
            tensor([1., 1., 1.])
        """
        for name, given in entries.items():
            mine = self.state.get(name)
            if not isinstance(mine, Tensor):
                known = ", ".join(k for k, v in self.state.items() if isinstance(v, Tensor))
                raise KeyError(f"{type(self).__name__} has no {name!r} to revise; there are {known}")
            self._check_kind(name, mine, given, given.shape == mine.shape)
        self.state.update((name, given.detach().to(self.device)) for name, given in entries.items())
        self._pending = None

    def should_stop(self) -> Reason | None:
        """Why the search has come to an end, or None.

        Example:
            >>> import torch
            >>> from moduli.evolve import PSO
            >>> search = PSO(torch.zeros(2), population=20, max_evaluations=50)
            >>> while not (reason := search.should_stop()):
            ...     search.tell(search.ask().square().sum(1))
            >>> print(reason)
            The budget of evaluations is spent.
        """
        if self.target is not None and self.best_fitness <= self.target:
            return Reason.TARGET
        if self.max_evaluations is not None and self.evaluations + self.population > self.max_evaluations:
            return Reason.BUDGET
        if self._int("lost") >= 10:
            return Reason.NOT_FINITE
        if self.patience is not None and self._int("stalled") >= self.patience:
            return Reason.STALLED
        if self._int("flat") >= 10 + 30 * self.dim / self.population:
            return Reason.FLAT
        return self._find_convergence()

    @property
    def best(self) -> Tensor:
        """The best member found so far (x0 until one is found)."""
        return self._tensor("best").clone()

    def lend_best(self) -> Tensor:
        """`best` without a copy, which the search never writes to again; nor may the caller."""
        self._lent = True
        return self._tensor("best")

    @property
    def best_fitness(self) -> float:
        """The fitness of `best`; infinite until a member has a finite one."""
        return float(self.state["best_fitness"])

    @property
    def population(self) -> int:
        """How many members a generation has."""
        return self._int("population")

    @property
    def generation(self) -> int:
        """How many generations were told."""
        return self._int("generation")

    @property
    def evaluations(self) -> int:
        """How many members were told."""
        return self._int("evaluations")

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: tensors and numbers by name, and the name of the method."""
        copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.state.items()}
        return {"method": type(self).__name__, **copied}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, of a search of the same method and dimension.

        Raises:
            ValueError: If the state belongs to another method or dimension, or lacks something. Nothing has changed then.
        """
        name, given = type(self).__name__, dict(state)
        method = given.pop("method", None)
        if method != name:
            raise ValueError(f"the state is one of {method}, and can't be loaded into {name}")
        missing = [k for k in self.state if k not in given]
        unknown = [k for k in given if k not in self.state]
        if missing or unknown:
            raise ValueError(f"the state of {name} lacks {missing}, and has {unknown} that these settings have not")
        for k, v in given.items():
            mine = self.state[k]
            if isinstance(mine, Tensor):
                # How many members, or generations, there are may have changed on the way.
                fits = v.shape[-1:] == mine.shape[-1:] or v.shape == (given["population"],)
                self._check_kind(k, mine, v, fits)
        self.state = {k: v.detach().clone().to(self.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        self._pending = None
        self._restore_derived()

    def _check_kind(self, name: str, mine: Tensor, given: Tensor, fits: bool) -> None:
        if not fits or given.dtype != mine.dtype:
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            raise ValueError(
                f"{name!r} of {type(self).__name__} is {mine.dtype} of shape {tuple(mine.shape)}; got {got}"
            )

    def _restore_derived(self) -> None:  # noqa: B027 - most methods have nothing to make
        """Make again what depends on the state."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dim={self.dim}, population={self.population}, generation={self.generation}, "
            f"best_fitness={self.best_fitness:.6g})"
        )

    # -- help for methods

    def _check_step(self, step: float, centre: Tensor) -> Reason | None:
        """Whether steps have become too small beside the centre of the search, or have grown without limit."""
        size = max(1.0, float(torch.linalg.vector_norm(centre, torch.inf)))
        if step <= self.tol * size:
            return Reason.SMALL_STEP
        return Reason.DIVERGED if not (math.isfinite(size) and step < 1e20) else None

    def _int(self, name: str) -> int:
        return int(self.state[name])

    def _float(self, name: str) -> float:
        return float(self.state[name])

    def _tensor(self, name: str) -> Tensor:
        value: Tensor = self.state[name]
        return value

    def _uniform(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=self.dtype, device=self.device)

    def _gauss(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)

    def _make_generator(self, offset: int = 0) -> torch.Generator:
        """The generator at the start of this generation's stream."""
        return self._generator.manual_seed(key(self._int("seed"), self._int("counter") + offset))


class MatrixSearch(Search):
    """A search whose members are a matrix in its state, and that proposes another matrix each generation.

    A subclass gives `_move`, the next matrix and whatever belongs to it, and `_select`, what is kept of it.
    """

    def __init__(
        self, x0: Tensor, *, population: int = 64, spread: float = 1.0, initial: Tensor | None = None, **options: Any
    ) -> None:
        self._spread, self._initial = spread, initial
        self._bounds: tuple[Any, Any] | None = None
        self._buffers: dict[str, Tensor] = {}
        super().__init__(x0, population=population, **options)

    @abstractmethod
    def _move(self) -> dict[str, Tensor]:
        """The next members under "x" (as they are evaluated), and what `_select` needs."""

    @abstractmethod
    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        """Change the state by what was learned from a proposal."""

    def _draw_first(self, x0: Tensor) -> Tensor:
        """The first members: those given, uniform between finite bounds, or normal around x0 with deviation `spread`."""
        n, c = self.population, self.coordinates
        if self._initial is not None:
            x = self._initial.detach()
            if x.shape != (n, self.dim):
                raise ValueError(f"initial has shape {tuple(x.shape)}; {n} members of {self.dim} numbers were expected")
            return c.rounded(x.to(x0).clamp(c.lower, c.upper))
        g = self._make_generator()
        self.state["counter"] = 1
        normal, uniform = self._gauss(g, n, self.dim), self._uniform(g, n, self.dim)
        both = c.lower.isfinite() & c.upper.isfinite()
        # One more than the width, cut off again: each whole number is as likely as the others.
        whole = torch.zeros(self.dim, dtype=torch.bool, device=self.device)
        whole[c.whole] = True
        low = torch.where(both, c.lower, torch.zeros_like(x0)) - 0.5 * whole
        width = torch.where(both, c.upper - c.lower, torch.zeros_like(x0)) + 1.0 * whole
        x = torch.where(both, low + uniform * width, x0 + self._spread * normal)
        return c.rounded(x.clamp(c.lower, c.upper)).clamp(c.lower, c.upper)

    def _proposal(self) -> dict[str, Tensor]:
        if self._pending is None:
            self._pending = self._move()
        return self._pending  # type: ignore[no-any-return]

    def _propose(self, start: int, stop: int) -> Tensor:
        # A copy, which the caller may write to: what is learned is learned from the original.
        return self._proposal()["x"][start:stop].clone()

    def _learn(self, fitness: Tensor) -> None:
        self._select(self._proposal(), fitness)

    def _scratch(self, name: str, *lead: int) -> Tensor:
        """Memory of the size of the members, or of a stack of them, that is used again in every generation."""
        shape = (*lead, self.population, self.dim)
        held = self._buffers.get(name)
        if held is None or held.shape != shape:
            held = self._buffers[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return held

    def _walls(self) -> tuple[Any, Any]:
        """The bounds for one pass over all members: two numbers, or matrices in lists where coordinates differ."""
        if self._bounds is None:
            shape, ends = (self.population, self.dim), (self.coordinates.lower, self.coordinates.upper)
            alike = all(bool((end == end.max()).all()) for end in ends)
            low, high = (float(end.max()) if alike else [end.expand(shape).contiguous()] for end in ends)
            self._bounds = low, high
        return self._bounds

    @property
    def mean(self) -> Tensor:
        """The average of the members that the search keeps."""
        return self._tensor("x").mean(0)

    def _find_convergence(self) -> Reason | None:
        if self.population == 1 or self.generation == 0:
            return None
        low, high = self._tensor("x").amin(0), self._tensor("x").amax(0)
        spread = float((high - low).max() / torch.maximum(low.abs(), high.abs()).max().clamp(min=1.0))
        return Reason.SMALL_STEP if spread <= self.tol else None
