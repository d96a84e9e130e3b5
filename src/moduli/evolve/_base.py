"""`Search`: the base class of ask-and-tell searches."""

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
    """An ask-and-tell search: `ask` returns members, `tell` takes their fitness, which is minimised.

    One generation is `x = search.ask()`, `search.tell(fitness)` with one number per row of x. Until `tell` is called,
    `ask` returns the same members again: they are a function of `state`, a dict of tensors and numbers that `state_dict`
    copies. A search that is saved at any point, even between `ask` and `tell`, and loaded elsewhere continues bit for bit.
    NaN counts as the worst fitness. Random numbers come from the search's own generator.

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
        own: Whether the search may store x0 itself instead of a copy; the caller must not write to it again.
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
        _check_start(name, x0)
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
        if target is not None and math.isnan(target):
            raise ValueError("target is nan; it is a fitness, or None")
        self.target, self.patience, self.max_evaluations, self.tol = target, patience, max_evaluations, tol
        self._generator = torch.Generator(x0.device)
        self._pending: Any = None
        self._lent = False
        # A model may fill most of the memory, so x0 is copied no more often than needed.
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

    # -- implemented by methods

    @abstractmethod
    def _start(self, x0: Tensor) -> None:
        """Put the first state of the method into `state`."""

    @abstractmethod
    def _propose(self, start: int, stop: int) -> Tensor:
        """Return members `start` to `stop` of the current generation, as they are evaluated."""

    @abstractmethod
    def _learn(self, fitness: Tensor) -> None:
        """Update `state` from the fitness of the current generation (double, without NaN)."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The centre of the search, inside the bounds: of the distribution, or of the members."""

    def parts(self, index: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over one member in parts, (offset, numbers); each part may be overwritten by the next one.

        Seed-replayed methods over many coordinates never store more than one part.
        """
        yield 0, self._propose(index, index + 1)[0]

    def _improve(self, index: int) -> None:
        """Copy a member to `best`."""
        if self._lent:
            self.state["best"], self._lent = torch.empty_like(self._tensor("best")), False
        for at, part in self.parts(index):
            self._tensor("best")[at : at + len(part)] = part

    def _find_convergence(self) -> Reason | None:
        """Return a reason to stop that is specific to the method, or None."""
        return None

    def _draws(self) -> int:
        """Return how many counters of the random stream a generation uses."""
        return 1

    # -- called by users

    def ask(self) -> Tensor:
        """Return the members to evaluate, one per row, as a copy."""
        return self.rows(0, self.population)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return members `start` to `stop` of those that `ask` returns. Seed-replayed methods draw only these."""
        if not 0 <= start <= stop <= self.population:
            raise IndexError(f"members {start} to {stop} of a population of {self.population}")
        with torch.no_grad():
            return self._propose(start, stop)

    def draft(self) -> Search | None:
        """Return a copy with only the state that other processes need to draw the members of this generation.

        None where members are stored, or so small that they are sent themselves.
        """
        return None

    def tell(self, fitness: Tensor | Iterable[float]) -> None:
        """Take the fitness of every member that `ask` returned, in order; lower is better.

        Raises:
            ValueError: If there is not one number per member. Nothing has changed then.
        """
        if isinstance(fitness, Tensor) and fitness.is_complex():
            raise TypeError("fitness is complex; a search needs real numbers that can be ordered")
        # NumPy takes a third of torch's time for few numbers; numbers from Python are double.
        numbers = (
            fitness.detach().cpu().double().numpy() if isinstance(fitness, Tensor) else [float(f) for f in fitness]
        )
        state, values = self.state, np.array(numbers, dtype=np.float64)
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
        # A generation of one member always has equal values, which says nothing about flatness.
        state["flat"] = self._int("flat") + 1 if population > 1 and value == worst else 0
        state["counter"] = self._int("counter") + used
        state["generation"] = self.generation + 1
        state["evaluations"] = self.evaluations + population
        self._pending = None

    def revise(self, **entries: Tensor) -> None:
        """Replace tensors of the state, after a gradient step or the user changed the searched parameters.

        Members that `ask` returned belong to the old state; the next `ask` returns others. The search stores the tensors
        that are passed, not copies.

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
        for name, tensor in entries.items():
            mine = self.state.get(name)
            if not isinstance(mine, Tensor):
                names = ", ".join(k for k, v in self.state.items() if isinstance(v, Tensor))
                raise KeyError(f"{type(self).__name__} has no {name!r} to revise; there are {names}")
            self._check_kind(name, mine, tensor, tensor.shape == mine.shape)
        self.state.update((name, tensor.detach().to(self.device)) for name, tensor in entries.items())
        self._pending = None

    def should_stop(self) -> Reason | None:
        """Return why the search should stop, or None.

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
        """Return `best` without a copy. The search never writes to this tensor again, and the caller must not."""
        self._lent = True
        return self._tensor("best")

    @property
    def best_fitness(self) -> float:
        """The fitness of `best`; infinite until a member has a finite one."""
        return float(self.state["best_fitness"])

    @property
    def population(self) -> int:
        """The number of members of a generation."""
        return self._int("population")

    @property
    def generation(self) -> int:
        """The number of completed generations."""
        return self._int("generation")

    @property
    def evaluations(self) -> int:
        """The number of members whose fitness was passed to `tell`."""
        return self._int("evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state: tensors and numbers by name, and the name of the method."""
        copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.state.items()}
        return {"method": type(self).__name__, **copied}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned, of a search with the same method and dimension.

        Raises:
            ValueError: If the state belongs to another method or dimension, or lacks something. Nothing has changed then.
        """
        name, entries = type(self).__name__, dict(state)
        method = entries.pop("method", None)
        if method != name:
            raise ValueError(f"the state is one of {method}, and can't be loaded into {name}")
        missing = [k for k in self.state if k not in entries]
        unknown = [k for k in entries if k not in self.state]
        if missing or unknown:
            raise ValueError(f"the state of {name} lacks {missing}, and has {unknown} that these settings have not")
        for k, v in entries.items():
            mine = self.state[k]
            if isinstance(mine, Tensor):
                # The population, or the length of a history, may have changed during the run.
                fits = v.shape[-1:] == mine.shape[-1:] or v.shape == (entries["population"],)
                self._check_kind(k, mine, v, fits)
        self.state = {k: v.detach().clone().to(self.device) if isinstance(v, Tensor) else v for k, v in entries.items()}
        self._pending = None
        self._restore_derived()

    def _check_kind(self, name: str, mine: Tensor, given: Tensor, fits: bool) -> None:
        if not fits or given.dtype != mine.dtype:
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            raise ValueError(
                f"{name!r} of {type(self).__name__} is {mine.dtype} of shape {tuple(mine.shape)}; got {got}"
            )

    def _restore_derived(self) -> None:  # noqa: B027 - most methods have nothing to recompute
        """Recompute attributes that depend on the state."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dim={self.dim}, population={self.population}, generation={self.generation}, "
            f"best_fitness={self.best_fitness:.6g})"
        )

    # -- used by methods

    def _check_step(self, step: float, centre: Tensor) -> Reason | None:
        """Return SMALL_STEP if steps are below the tolerance relative to the centre, DIVERGED if they overflow, or None."""
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
        """Return the generator, seeded for the start of this generation's stream."""
        return self._generator.manual_seed(key(self._int("seed"), self._int("counter") + offset))


def _check_start(name: str, x0: Any) -> None:
    """Raise if x0 is not a vector of finite floating-point numbers."""
    if not isinstance(x0, Tensor) or x0.dim() != 1 or not x0.dtype.is_floating_point:
        what = f"{x0.dtype} of shape {tuple(x0.shape)}" if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"{name} starts from a vector of floating-point numbers; got {what}")
    if x0.numel() == 0:
        raise ValueError(f"{name} has nothing to search over: x0 is empty")
    if not bool(x0.isfinite().all()):
        raise ValueError(f"x0 of {name} contains infinities or NaN")
