"""Executors, which evaluate the members of a generation: the base class, `InProcess` and `Ranks`."""

from __future__ import annotations

import math
import random
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ._noise import Share, key

Rows = Callable[[int, int], Tensor]
RowFitness = Callable[[Tensor], Any]
Values = Generator[tuple[int, float], None, None]


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
    """Evaluates the members of one generation. The result depends on the members alone, not on the executor.

    Before a member is evaluated, the generators of torch, NumPy and `random` are seeded for it, so that even a random
    fitness gives the same numbers on any number of workers. Members with noise of low rank that are evaluated together, without
    being made, have the same fitness to rounding, if it uses no random numbers.

    Attributes:
        keeps_files: Whether this process writes checkpoints: one of those that run the same search does.
        share: This process's part of the sums over noise, where several run the same search.
    """

    keeps_files: bool = True
    share: Share | None = None

    @abstractmethod
    def evaluate(self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: Mapping[int, float]) -> Values:
        """Iterate over (index, fitness) of every member that is not known, in the order in which evaluations end.

        Args:
            fitness: A function of one member.
            rows: `Search.rows`, which returns members by their indices.
            seeds: The seed of each member's evaluation.
            known: The fitness of members that need not be evaluated.
        """

    def collect(
        self,
        fitness: RowFitness,
        rows: Rows,
        seeds: Sequence[int],
        known: Mapping[int, float],
        note: Callable[[int, float], None] | None = None,
    ) -> Tensor:
        """Return the fitness of a whole generation.

        Args:
            fitness: A function of one member.
            rows: `Search.rows`, which returns members by their indices.
            seeds: The seed of each member's evaluation.
            known: The fitness of members that need not be evaluated.
            note: Called with the index and fitness of each member when its evaluation ends.
        """
        values = dict(known)
        with closing(self.evaluate(fitness, rows, seeds, known)) as evaluations:
            for member, value in evaluations:
                values[member] = value
                if note is not None:
                    note(member, value)
        return torch.tensor([values[i] for i in range(len(seeds))], dtype=torch.float64)

    def map(self, fitness: RowFitness, x: Tensor, seed: int = 0) -> Tensor:
        """Return the fitness of every row of x.

        Args:
            fitness: A function of one row.
            x: The members, as `ask` returns them.
            seed: For a fitness that uses random numbers: each row has its own stream under this seed.

        Raises:
            EvaluationError: If no row could be evaluated.
        """
        seeds = member_seeds(seed, 0, len(x))
        return self.collect(fitness, lambda start, stop: x[start:stop], seeds, {})

    def close(self) -> None:  # noqa: B027 - an executor without workers has nothing to close
        """End the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def member_seeds(seed: int, first: int, count: int) -> list[int]:
    """Return seeds for the evaluations of `count` members from `first` on; their streams differ from those of the search.

    Args:
        seed: The seed of the search.
        first: The number of evaluations before.
        count: The number of members.
    """
    return [key(seed ^ 0x5EEDF17, first + i) for i in range(count)]


def answer(fitness: Callable[[Any], Any], given: Any, seed: int) -> tuple[float, str | None]:
    """Return the fitness of one member and None, or NaN and a traceback if the fitness raised.

    Args:
        fitness: The function.
        given: Its argument.
        seed: The seed of the global generators during the call.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        with torch.no_grad():
            value = fitness(given)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"fitness is one number per member; got a tensor of shape {tuple(value.shape)}")
        return float(value), None
    except Exception:  # noqa: BLE001 - whatever a fitness raises
        return math.nan, traceback.format_exc()


class Faults:
    """The failed evaluations of one generation."""

    def __init__(self, retries: int, count: int) -> None:
        self.retries, self.count = retries, count
        self.attempts: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self.said: list[str] = []

    def should_retry(self, member: int, why: str) -> bool:
        """Record a failure, which `check` reports, and return whether to evaluate the member again."""
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
        """Raise if no member could be evaluated; otherwise warn of each failure, or once if there are more than three."""
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
        block: The number of members of a vectorised call.

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

    def evaluate(self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: Mapping[int, float]) -> Values:
        """Iterate over (index, fitness) of every member that is not known.

        Args:
            fitness: A function of one member.
            rows: `Search.rows`, which returns members by their indices.
            seeds: The seed of each member's evaluation.
            known: The fitness of members that need not be evaluated.
        """
        from ._module_fitness import ModuleFitness  # it imports this file

        todo = [i for i in range(len(seeds)) if i not in known]
        faults = Faults(0, len(todo))
        # Checked by class, because a user's fitness may have attributes of these names.
        ours = fitness if isinstance(fitness, ModuleFitness) else None
        make = (lambda i: fitness(rows(i, i + 1)[0])) if ours is None else ours.evaluate_member
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            if ours is not None and not self.vectorised and ours.shares_products():
                shared = yield from self._evaluate_shared(ours, seeds, todo)
                todo = todo[shared:]
            for member in () if self.vectorised else todo:
                value, error = answer(make, member, seeds[member])
                if error is not None:
                    faults.should_retry(member, error)
                yield member, value
            if self.vectorised:
                yield from self._evaluate_together(fitness if ours is None else ours.batch, rows, seeds, todo)
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
        faults.check()

    def _evaluate_shared(self, fitness: Any, seeds: Sequence[int], todo: Sequence[int]) -> Generator[Any, None, int]:
        """Evaluate members that differ by noise of low rank; return how many were evaluated before vectorisation failed."""
        for start in range(0, len(todo), self.block):
            members = todo[start : start + self.block]
            torch.manual_seed(seeds[members[0]])
            try:
                with torch.no_grad():
                    values = fitness.evaluate_together(members).tolist()
            except (RuntimeError, ValueError, TypeError) as error:
                fitness.refuse(str(error).strip().splitlines()[0])
                return start
            yield from zip(members, values, strict=True)
        return len(todo)

    def _evaluate_together(self, batch: RowFitness, rows: Rows, seeds: Sequence[int], todo: Sequence[int]) -> Values:
        for start in range(0, len(seeds), self.block):
            stop = min(start + self.block, len(seeds))
            new = [member for member in todo if start <= member < stop]
            if not new:
                continue
            torch.manual_seed(seeds[start])
            with torch.no_grad():
                values = batch(rows(start, stop))
            if not isinstance(values, Tensor) or values.shape != (stop - start,):
                what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(f"a vectorised fitness returns one number per member, {stop - start}; got {what}")
            numbers = values.tolist()
            yield from ((member, numbers[member - start]) for member in new)


class Ranks(Executor):
    """Evaluates on the ranks of `torch.distributed`, each of which runs the same search with the same seed.

    Member i is evaluated by rank i modulo the number of ranks. Members are drawn from seeds where they are needed, so ranks
    exchange one (seed, fitness) pair for each member: 16 bytes, whatever the size of the model. If the seeds differ, the
    ranks do not run the same search, and `evaluate` raises.

    To update the state, every rank draws the noise of all members again, so that the result is that of one process bit for
    bit. Where that costs more than to exchange a vector of the size of the model, each rank draws its share of the directions
    only and the sums are reduced: for models of more than 131,072 parameters, when (1 - 1 / ranks) * directions is at least 16
    (drawing takes some 6 ns for each number, a network of 1 Gbit/s some 80). All ranks then have the same result, which is
    that of one process to rounding.

    A `checkpoint` is one path that all ranks can read; rank 0 writes it. If a rank is lost the others raise, and the same
    call resumes from the checkpoint, with as many ranks as there are then.

    Args:
        group: The process group; by default that of `init_process_group`.
        device: Where the pairs are gathered; with the NCCL back end, a CUDA device.

    Example:
        >>> from moduli.evolve import Ranks
        >>> Ranks.__name__  # on each rank: search(net, fitness, executor=Ranks(), seed=0)
        'Ranks'
    """

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("Ranks needs torch.distributed.init_process_group on each rank first")
        self.group, self.device = group, torch.device(device)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.keeps_files = self.rank == 0
        self.share = Share(self.rank, self.world, self._reduce)

    def _reduce(self, vector: Tensor) -> None:
        there = vector.to(self.device)
        with _explain_lost_rank():
            dist.all_reduce(there, group=self.group)
        if there is not vector:
            vector.copy_(there)

    def evaluate(self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: Mapping[int, float]) -> Values:
        """Iterate over (index, fitness) of every member that is not known: first those of this rank, then the others.

        Args:
            fitness: A function of one member.
            rows: `Search.rows`, which returns members by their indices.
            seeds: The seed of each member's evaluation, the same on all ranks.
            known: The fitness of members that need not be evaluated.
        """
        others = {i: known.get(i, 0.0) for i in range(len(seeds)) if i % self.world != self.rank or i in known}
        failure: BaseException | None = None
        mine: dict[int, float] = {}
        try:
            for member, value in InProcess().evaluate(fitness, rows, seeds, others):
                mine[member] = value
                yield member, value
        except RuntimeError as error:
            # The other ranks wait in the collective below, so this rank takes part in it before it raises.
            failure = error
        width = -(-len(seeds) // self.world)
        pairs = torch.full((width, 2), -1.0, dtype=torch.float64, device=self.device)
        for member in range(self.rank, len(seeds), self.world):
            value = mine.get(member, known.get(member, torch.nan))
            pairs[member // self.world] = torch.tensor([float(seeds[member]), value], dtype=torch.float64)
        gathered = torch.empty(self.world * width, 2, dtype=torch.float64, device=self.device)
        with _explain_lost_rank():
            dist.all_gather_into_tensor(gathered, pairs, group=self.group)
        if failure is not None:
            raise failure
        table = gathered.cpu().view(self.world, width, 2).tolist()
        for member, seed in enumerate(seeds):
            other_seed, value = table[member % self.world][member // self.world]
            if int(other_seed) != seed:
                fact = f"rank {member % self.world} evaluated member {member} with seed {int(other_seed)} instead of {seed}"
                raise RuntimeError(f"{fact}: the ranks do not run the same search with the same settings and seed")
            if member not in mine and member not in known:
                yield member, value


@contextmanager
def _explain_lost_rank() -> Iterator[None]:
    """Replace the error of a collective by one that says that a rank was lost and how to resume."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"a rank was lost, or does not answer ({str(error).splitlines()[0]}); what was told is in the checkpoint, if there "
            "is one: start the ranks again with the same call, also with fewer"
        ) from error
