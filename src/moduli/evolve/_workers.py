"""`Workers`: executors that hand members to workers, and replace workers that die or hang."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._base import Search
from ._executor import EvaluationWarning, Executor, Faults, RowFitness, Rows, Values, answer
from ._module_fitness import ModuleFitness

# The most members that a worker evaluates together, because it stores their noise.
_SLICE = 256


class _Task(NamedTuple):
    """The members that a worker evaluates, the future of its answer, and the time after which it counts as lost."""

    members: list[int]
    future: Future[Any]
    deadline: float


class _Busy(dict[int, _Task]):
    """The tasks of workers by their number."""


class Workers(Executor):
    """An executor that hands one member at a time to each of its workers, and waits for the futures of their answers.

    A member whose worker dies, takes longer than `timeout` seconds, or raises is given to another worker (`retries` times);
    after that its fitness is NaN. Each time an `EvaluationWarning` names the member.
    """

    def __init__(self, workers: int, timeout: float | None, retries: int, threads: int, start_timeout: float) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name}={seconds}: give seconds")
        if retries < 0:
            raise ValueError(f"retries={retries} can't be negative")
        self.workers, self.timeout, self.retries = workers, timeout, retries
        self.threads, self.start_timeout = threads, start_timeout
        self._fitness: RowFitness | None = None
        self._sent: Any = None  # the fitness in the form in which workers receive it
        self._draft: Any = None  # where workers find the draft of the generation
        self._staff: dict[int, Any] = {}  # the workers by number

    @abstractmethod
    def _send(self, fitness: RowFitness) -> Any:
        """Return the fitness in the form in which workers receive it."""

    @abstractmethod
    def _publish(self, draft: tuple[Search, dict[str, Any]] | None) -> Any:
        """Store the packed draft of the generation in place of the last one, and return where workers find it."""

    @abstractmethod
    def _launch(self, worker: int) -> None:
        """Start a worker with this number."""

    @abstractmethod
    def _meet(self, worker: int) -> Future[Any]:
        """Send the fitness to a worker, and return a future that is done when the worker has it."""

    def _check_greeting(self, worker: int, greeting: Future[Any]) -> None:
        """Raise if a worker can't be started at all; one that died meanwhile is replaced when it gets a member."""

    @abstractmethod
    def _submit(self, worker: int, what: Any, seed: int) -> Future[Any]:
        """Have a worker evaluate a row, or (draft, member or members); return a future of (fitness, error)."""

    @abstractmethod
    def _end(self, worker: int) -> None:
        """End a worker, whatever it does, and remove it from the staff."""

    def _count_affordable(self) -> tuple[int, str]:
        """Return how many workers the resources suffice for now, and a sentence about the resource that is missing."""
        return self.workers, ""

    def _greet(self, workers: Sequence[int]) -> None:
        """Send the fitness to workers and wait until they are ready, which does not count towards `timeout`.

        Workers that are late are ended. Warn if fewer workers remain than before, and raise if none do.
        """
        late = {self._meet(worker): worker for worker in workers}
        why, end = f"not all started within {self.start_timeout} seconds", monotonic() + self.start_timeout
        while late and monotonic() < end:
            for greeting in wait(late, min(1.0, self.start_timeout)).done:
                self._check_greeting(late.pop(greeting), greeting)
            # Resources may have been lost, so that the remaining workers never start.
            fits, short = self._count_affordable()
            if len(self._staff) > fits:
                why = short
                break
        for worker in late.values():
            self._end(worker)
        name = type(self).__name__
        if not self._staff:
            self.close()
            raise RuntimeError(
                f"{name} has no workers left ({why}): what they import takes longer, resources were lost, or others use "
                "them; a search with a checkpoint can be resumed"
            )
        if len(self._staff) < self.workers:
            what = f"{name} goes on with {len(self._staff)} of {self.workers} workers: {why}"
            warnings.warn(EvaluationWarning(what), stacklevel=5)
            self.workers = len(self._staff)

    def _replace(self, worker: int) -> None:
        """End a worker, whatever it does, and start another in its place if resources suffice."""
        self._end(worker)
        self._launch(worker)
        self._greet([worker])

    def evaluate(self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: Mapping[int, float]) -> Values:
        """Iterate over (index, fitness) of every member that is not known, in the order in which evaluations end.

        Args:
            fitness: A function of one member.
            rows: `Search.rows`, which returns members by their indices.
            seeds: The seed of each member's evaluation.
            known: The fitness of members that need not be evaluated.
        """
        todo = [i for i in range(len(seeds)) if i not in known]
        if not todo:
            return
        draft = self._prepare(fitness)
        faults = Faults(self.retries, len(todo))
        if draft is not None:
            todo = yield from self._evaluate_slices(fitness, seeds, todo)
        queue, busy = _Queue(todo, bool(getattr(draft, "antithetic", False))), _Busy()
        with self._replacing_on_error(busy):
            while queue.members or busy:
                for worker in self._list_free(busy)[: len(queue.members)]:
                    member = queue.take(worker, busy, alone=len(self._staff) == 1)
                    what = rows(member, member + 1)[0] if draft is None else (self._draft, member)
                    self._assign(busy, worker, what, [member], seeds[member])
                for worker, (member,), value, why in self._await_answers(busy):
                    if why is not None and faults.should_retry(member, why):
                        queue.put_back(member, worker)
                    else:
                        yield member, math.nan if value is None else value
        faults.check()

    def _prepare(self, fitness: RowFitness) -> Search | None:
        """Start workers that are missing, send the fitness and the draft of the generation to all that lack them.

        Returns:
            The draft: workers store the model, and draw members from it and their indices; None if members are sent.
        """
        search = fitness.search if isinstance(fitness, ModuleFitness) else None
        draft = None if search is None else search.draft()
        current = self._fitness is fitness
        if not current:
            self._sent, self._fitness = self._send(fitness), fitness
        self._draft = self._publish(None if draft is None else pack(draft))
        free = [number for number in range(self.workers) if number not in self._staff]
        new = free[: self.workers - len(self._staff)]
        for worker in new:
            self._launch(worker)
        self._greet(new if current else list(self._staff))
        return draft

    def _list_free(self, busy: _Busy) -> list[int]:
        """Return the workers that have no task."""
        return [number for number in self._staff if number not in busy]

    def _assign(self, busy: _Busy, worker: int, what: Any, members: list[int], seed: int) -> None:
        """Have a worker evaluate members, with `timeout` seconds for each."""
        deadline = monotonic() + (math.inf if self.timeout is None else self.timeout * len(members))
        busy[worker] = _Task(members, self._submit(worker, what, seed), deadline)

    def _await_answers(self, busy: _Busy) -> Iterator[tuple[int, list[int], Any, str | None]]:
        """Wait until a task ends, and yield (worker, members, answer, error) of all that did, or are late.

        The answer of a worker that died or was late is None; the worker is replaced.
        """
        soonest = min(task.deadline for task in busy.values())
        seconds = None if soonest == math.inf else max(0.0, soonest - monotonic())
        wait([task.future for task in busy.values()], seconds, FIRST_COMPLETED)
        for worker, (members, future, deadline) in list(busy.items()):
            if not future.done() and deadline > monotonic():
                continue
            del busy[worker]
            why = f"no answer within {self.timeout} seconds"
            if future.done():
                death = future.exception()
                if death is None:
                    yield worker, members, *future.result()
                    continue
                why = f"its worker died ({death!r})"
            self._replace(worker)
            yield worker, members, None, why

    @contextmanager
    def _replacing_on_error(self, busy: _Busy) -> Iterator[None]:
        """Replace the workers that are still busy if the evaluation ends early, because their answers are not needed."""
        try:
            yield
        except BaseException:
            for worker in busy.keys() & self._staff.keys():
                self._replace(worker)
            raise

    def _evaluate_slices(
        self, fitness: RowFitness, seeds: Sequence[int], todo: list[int]
    ) -> Generator[tuple[int, float], None, list[int]]:
        """Evaluate members that differ by noise of low rank, in slices: each worker uses one product for its slice.

        Returns:
            The members that were not evaluated: those of workers that died or were late, all if the noise is not of low rank
            or torch can't vectorise the fitness.
        """
        if not (isinstance(fitness, ModuleFitness) and fitness.shares_products()):
            return todo
        size = min(_SLICE, -(-len(todo) // self.workers))
        size += size % 2  # mirrored members are neighbours and share their noise
        slices = [list(todo[start : start + size]) for start in range(0, len(todo), size)]
        busy, left = _Busy(), list[int]()
        with self._replacing_on_error(busy):
            while slices or busy:
                for worker in self._list_free(busy)[: len(slices)]:
                    members = slices.pop(0)
                    self._assign(busy, worker, (self._draft, members), members, seeds[members[0]])
                for _, members, values, why in self._await_answers(busy):
                    if why is None:
                        yield from zip(members, values, strict=True)
                        continue
                    left += members
                    # After a death `evaluate` tries the members one by one; a refusal concerns all slices.
                    if values is not None:
                        for rest in slices:
                            left += rest
                        slices = []
                        fitness.refuse(why)
        return sorted(left)

    def close(self) -> None:
        """End the workers."""
        for worker in list(self._staff):
            self._end(worker)
        self._fitness = self._sent = None
        self._draft = self._publish(None)


class _Queue:
    """The members that wait for a worker, and the workers on which they failed.

    Args:
        members: The members.
        mirrored: Whether members come in mirrored pairs, which share their noise.
    """

    def __init__(self, members: list[int], mirrored: bool) -> None:
        self.members, self.mirrored = members, mirrored
        self._failed_on: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def take(self, worker: int, busy: _Busy, alone: bool) -> int:
        """Remove and return the next member for a worker.

        Args:
            worker: The number of the worker.
            busy: The tasks of the others.
            alone: Whether there are no others; else a member is not given to the worker on which it failed.
        """
        choice = [i for i in self.members if alone or self._failed_on.get(i) != worker] or self.members
        if self.mirrored:
            # First the mirror image of the worker's last member, whose noise it stores, then one of no busy pair.
            others = [i for task in busy.values() for i in task.members]
            pair = [i for i in choice if i ^ 1 == self._last.get(worker)]
            choice = pair or [i for i in choice if i ^ 1 not in others] or choice
        member = self._last[worker] = choice[0]
        self.members.remove(member)
        return member

    def put_back(self, member: int, worker: int) -> None:
        """Put a member that failed on a worker in front."""
        self._failed_on[member] = worker
        self.members.insert(0, member)


class Worker:
    """The object in another process that stores the fitness and evaluates members."""

    fitness: Any = None

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def learn(self, fitness: RowFitness) -> None:
        """Store the fitness."""
        self.fitness, self.last = fitness, dict[Any, Tensor]()

    def evaluate(self, what: Any, seed: int) -> tuple[float, str | None]:
        """Return the fitness of a row and None, or NaN and a traceback."""
        # Arrays from an object store are read-only, of which torch would warn, so the row is copied.
        row = torch.from_numpy(what.copy()) if isinstance(what, np.ndarray) else what
        return answer(self.fitness, row, seed)

    def make(self, draft: tuple[Search, dict[str, Any]], member: int | list[int], seed: int) -> tuple[Any, str | None]:
        """Evaluate members of a draft, which are drawn here.

        Args:
            draft: The packed draft of the generation.
            member: The index of a member, or a list of indices of members that are evaluated together.
            seed: The seed of the evaluation.

        Returns:
            The fitness, or a list of them, and the error, if there was one.
        """
        search: Any = draft[0]
        # The arrays may be read-only, of which torch warns; the search does not write to them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            search.state.update((name, torch.from_numpy(array)) for name, array in draft[1].items())
        if search.antithetic:
            search._noise.last = self.last
        self.fitness.search = search
        if isinstance(member, list):
            return self._evaluate_together(member, seed)
        return answer(self.fitness.evaluate_member, member, seed)

    def _evaluate_together(self, members: list[int], seed: int) -> tuple[list[float], str | None]:
        """Return the fitness of members by one product for all of them, or an empty list and why that failed."""
        torch.manual_seed(seed)
        try:
            with torch.no_grad():
                return self.fitness.evaluate_together(members).tolist(), None
        except (RuntimeError, ValueError, TypeError) as error:
            return [], str(error).strip().splitlines()[0]


def pack(draft: Search) -> tuple[Search, dict[str, Any]]:
    """Return a draft without its tensors, and the tensors as arrays, which are pickled and read without a copy."""
    arrays = {name: value.numpy() for name, value in draft.state.items() if isinstance(value, Tensor)}
    for name in arrays:
        del draft.state[name]
    return draft, arrays
