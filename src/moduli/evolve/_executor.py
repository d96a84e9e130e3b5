"""Executors: who evaluates the members of a generation."""

from __future__ import annotations

import math
import random
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ._noise import Share, key

Rows = Callable[[int, int], Tensor]
RowFitness = Callable[[Tensor], Any]
KnownValues = Mapping[int, float]
Listener = Callable[[int, float], None]


class EvaluationWarning(UserWarning):
    """A member was evaluated again, or has no fitness, because its worker died, hung, or raised.

    Example:
        >>> from moduli.evolve import EvaluationWarning
        >>> issubclass(EvaluationWarning, UserWarning)
        True
    """


class EvaluationError(RuntimeError):
    """No member of a generation could be evaluated, so the fitness function itself is wrong.

    Example:
        >>> from moduli.evolve import EvaluationError
        >>> issubclass(EvaluationError, RuntimeError)
        True
    """


class Executor(ABC):
    """Evaluates the members of one generation. The result depends on the members alone, not on who evaluates them.

    Before a member is evaluated, the generators of torch, NumPy and `random` are seeded for it, so that even a random
    fitness gives the same numbers on any number of workers.

    Attributes:
        keeps_files: Whether this process writes checkpoints: one of those that run the same search does.
        share: This process's part of the sums over noise, where several run the same search.
    """

    keeps_files: bool = True
    share: Share | None = None

    @abstractmethod
    def evaluate(
        self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: KnownValues, report: Listener
    ) -> dict[int, float]:
        """The fitness of every member that is not known, by index; `report` hears of each as it comes."""

    def map(self, fitness: RowFitness, x: Tensor, seed: int = 0) -> Tensor:
        """The fitness of every row of x.

        Args:
            fitness: A function of one row.
            x: The members, as `ask` gives them.
            seed: For a fitness that uses random numbers: each row has its own stream under this seed.

        Raises:
            EvaluationError: If no row could be evaluated.
        """
        seeds = member_seeds(seed, 0, len(x))
        return evaluate_generation(self, fitness, lambda start, stop: x[start:stop], seeds, {})

    def close(self) -> None:  # noqa: B027 - an executor without workers has nothing to close
        """Let go of the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluate_generation(
    executor: Executor,
    fitness: RowFitness,
    rows: Rows,
    seeds: Sequence[int],
    known: KnownValues,
    report: Listener | None = None,
) -> Tensor:
    """The fitness of a whole generation, whichever of it was known."""
    found = {**known, **executor.evaluate(fitness, rows, seeds, known, report or (lambda member, value: None))}
    return torch.tensor([found[i] for i in range(len(seeds))], dtype=torch.float64)


def member_seeds(seed: int, first: int, count: int) -> list[int]:
    """The seeds of the random numbers that evaluations use; other streams than those of the search."""
    return [key(seed ^ 0x5EEDF17, first + i) for i in range(count)]


def evaluate_seeded(fitness: Callable[[Any], Any], row: Any, seed: int) -> float:
    """Evaluate one member with the global generators seeded for it."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    with torch.no_grad():
        value = fitness(row)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"fitness is one number per member; got a tensor of shape {tuple(value.shape)}")
        value = value.item()
    return float(value)


def answer(evaluate: Callable[..., float], *given: Any) -> tuple[float, str | None]:
    """A fitness, or NaN and the traceback of what was raised: that concerns one member only."""
    try:
        return evaluate(*given), None
    except Exception:  # noqa: BLE001 - whatever a fitness raises
        return math.nan, traceback.format_exc()


@contextmanager
def kept_generators() -> Iterator[None]:
    """The global generators, put back on the way out."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class Faults:
    """What went wrong with which member of one generation."""

    def __init__(self, retries: int, count: int) -> None:
        self.retries, self.count = retries, count
        self.attempts: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self.said: list[str] = []

    def should_retry(self, member: int, why: str) -> bool:
        """Whether to evaluate a member once more; either way it is said when the generation is over."""
        self.attempts[member] = self.attempts.get(member, 0) + 1
        last = why.strip().splitlines()[-1]
        if self.attempts[member] <= self.retries:
            self.said.append(f"member {member} is evaluated again: {last}")
            return True
        times = "" if self.attempts[member] == 1 else f" ({self.attempts[member]} attempts)"
        self.said.append(f"member {member} has no fitness (NaN){times}: {last}")
        self.lost[member] = why
        return False

    def check(self) -> None:
        """Raise if nothing at all could be evaluated; warn of what went wrong otherwise, of much in one warning."""
        if self.count and len(self.lost) == self.count:
            member, why = next(iter(self.lost.items()))
            raise EvaluationError(f"none of {self.count} members could be evaluated; member {member} said:\n{why}")
        if len(self.said) > 3:
            self.said = [f"{len(self.said)} evaluations failed in one generation; the first: {self.said[0]}"]
        for message in self.said:
            warnings.warn(EvaluationWarning(message), stacklevel=5)


class InProcess(Executor):
    """Evaluates in this process: one member after the other, or all in one call.

    Args:
        vectorised: Whether the fitness takes many members in one call: a function of rows gets the whole matrix; a fitness
            of a module gets a model to call whose parameters are batched by `torch.func.vmap`.
        block: How many members a vectorised call gets.

    Example:
        >>> import torch
        >>> from moduli.evolve import InProcess
        >>> InProcess().map(lambda row: row.sum(), torch.eye(3))
        tensor([1., 1., 1.], dtype=torch.float64)
        >>> InProcess(vectorised=True).map(lambda x: x.sum(1), torch.eye(3))
        tensor([1., 1., 1.], dtype=torch.float64)
    """

    def __init__(self, vectorised: bool = False, block: int = 256) -> None:
        if block < 1:
            raise ValueError(f"block={block}: a vectorised call takes at least one member")
        self.vectorised, self.block = vectorised, block

    def evaluate(
        self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: KnownValues, report: Listener
    ) -> dict[int, float]:
        """The fitness of every member that is not known, by index; `report` hears of each as it comes."""
        found: dict[int, float] = {}
        todo = [i for i in range(len(seeds)) if i not in known]
        faults = Faults(0, len(todo))
        values = self._evaluate_together if self.vectorised else self._evaluate_singly
        with kept_generators():
            for member, value, error in values(fitness, rows, seeds, todo):
                if error is not None:
                    faults.should_retry(member, error)
                found[member] = value
                report(member, value)
        faults.check()
        return found

    def _evaluate_singly(
        self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], todo: Sequence[int]
    ) -> Iterator[tuple[int, float, str | None]]:
        """(member, value, error) of each."""
        made_there = getattr(fitness, "member", None) or (lambda member, rows: fitness(rows(member, member + 1)[0]))
        for member in todo:
            yield member, *answer(evaluate_seeded, lambda index: made_there(index, rows), member, seeds[member])

    def _evaluate_together(
        self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], todo: Sequence[int]
    ) -> Iterator[tuple[int, float, str | None]]:
        batch, wanted = getattr(fitness, "batch", fitness), set(todo)
        for start in range(0, len(seeds), self.block):
            stop = min(start + self.block, len(seeds))
            if wanted.isdisjoint(range(start, stop)):
                continue
            torch.manual_seed(seeds[start])
            with torch.no_grad():
                values = batch(rows(start, stop))
            if not isinstance(values, Tensor) or values.shape != (stop - start,):
                what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"a vectorised fitness returns one number per member, shape ({stop - start},); got {what}"
                )
            yield from ((i, value, None) for i, value in enumerate(values.tolist(), start) if i in wanted)
