"""`Workers`: the part of an executor that hands members to workers and survives their faults."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._base import Search
from ._executor import EvaluationWarning, Executor, Faults, RowFitness, Rows, Values, answer
from ._search import ModuleFitness

# Members that a worker evaluates together at most: their noise is in its memory.
_SLICE = 256


class Workers(Executor):
    """Hands one member at a time to each of a number of workers, and waits for the futures of their answers.

    A member whose worker dies, takes longer than `timeout` seconds, or raises is given to another worker (`retries` times),
    then has the fitness NaN; each time an `EvaluationWarning` names it.
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
        # What the workers know, as it was given and as it is sent; where they find the draft; and the workers by number.
        self._fitness: RowFitness | None = None
        self._sent: Any = None
        self._draft: Any = None
        self._staff: dict[int, Any] = {}

    @abstractmethod
    def _send(self, fitness: RowFitness) -> Any:
        """The fitness as workers are given it."""

    @abstractmethod
    def _publish(self, draft: tuple[Search, dict[str, Any]] | None) -> Any:
        """Where workers find the packed draft of the generation, instead of the one before."""

    @abstractmethod
    def _launch(self, worker: int) -> None:
        """Start a worker under a number."""

    @abstractmethod
    def _meet(self, worker: int) -> Future[Any]:
        """Give the fitness to a worker; done when it has it."""

    def _check_greeting(self, worker: int, greeting: Future[Any]) -> None:
        """Raise if a worker can't be started at all; one that died meanwhile is noticed when it is given a member."""

    @abstractmethod
    def _submit(self, worker: int, what: Any, seed: int) -> Future[Any]:
        """Have a worker evaluate a row, or (draft, member); the future is of (fitness, error)."""

    @abstractmethod
    def _end(self, worker: int) -> None:
        """End a worker, whatever it does, and forget it."""

    def _count_affordable(self) -> tuple[int, str]:
        """How many workers there is room for now, and what they are short of."""
        return self.workers, ""

    def _greet(self, workers: Sequence[int]) -> None:
        """Wait until workers are ready, which is not part of the time of a member.

        Those that are late are given up. It goes on with fewer workers than there were, or ends where there are none.
        """
        late = {self._meet(worker): worker for worker in workers}
        why, end = f"not all started within {self.start_timeout} seconds", monotonic() + self.start_timeout
        while late and monotonic() < end:
            for greeting in wait(late, min(1.0, self.start_timeout)).done:
                self._check_greeting(late.pop(greeting), greeting)
            # There may be no room for as many as before, and nothing to wait for.
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
            warnings.warn(EvaluationWarning(what), stacklevel=4)
            self.workers = len(self._staff)

    def _replace(self, worker: int) -> None:
        """End a worker, whatever it does, and start another in its place, where that is possible."""
        self._end(worker)
        self._launch(worker)
        self._greet([worker])

    def evaluate(self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: Mapping[int, float]) -> Values:
        """The fitness of every member that is not known, (index, number), each as it comes."""
        todo = [i for i in range(len(seeds)) if i not in known]
        if not todo:
            return
        # Workers hold the model. Where members are made of seeds, these are all that is sent to them.
        search = fitness.search if isinstance(fitness, ModuleFitness) else None
        draft = None if search is None else search.draft()
        # Every worker runs, knows the fitness, and can reach the draft of the generation.
        told = self._fitness is fitness
        if not told:
            self._sent, self._fitness = self._send(fitness), fitness
        self._draft = self._publish(None if draft is None else pack(draft))
        free = [number for number in range(self.workers) if number not in self._staff]
        new = free[: self.workers - len(self._staff)]
        for worker in new:
            self._launch(worker)
        self._greet(new if told else list(self._staff))
        faults = Faults(self.retries, len(todo))
        if isinstance(fitness, ModuleFitness) and draft is not None and fitness.shares_products():
            todo = yield from self._evaluate_slices(fitness, seeds, todo)
        failed_on: dict[int, int] = {}
        busy: dict[int, tuple[int, Future[Any], float]] = {}
        last: dict[int, int] = {}
        mirrored = getattr(draft, "antithetic", False)
        try:
            while todo or busy:
                for worker in [number for number in self._staff if number not in busy][: len(todo)]:
                    # One that did not fail there, if there is such a one.
                    choice = [i for i in todo if failed_on.get(i) != worker or len(self._staff) == 1] or todo
                    if mirrored:  # a worker has the noise of its last member, whose mirror image needs the same
                        others = [i for i, _, _ in busy.values()]
                        pair = [i for i in choice if i ^ 1 == last.get(worker)]
                        choice = pair or [i for i in choice if i ^ 1 not in others] or choice
                    member = last[worker] = choice[0]
                    todo.remove(member)
                    what = rows(member, member + 1)[0] if draft is None else (self._draft, member)
                    deadline = monotonic() + (math.inf if self.timeout is None else self.timeout)
                    busy[worker] = member, self._submit(worker, what, seeds[member]), deadline
                soonest = min(deadline for _, _, deadline in busy.values())
                seconds = None if soonest == math.inf else max(0.0, soonest - monotonic())
                wait([future for _, future, _ in busy.values()], seconds, FIRST_COMPLETED)
                for worker, (member, future, deadline) in list(busy.items()):
                    if future.done():
                        dead = future.exception()
                        value, why = future.result() if dead is None else (math.nan, f"its worker died ({dead!r})")
                    elif deadline <= monotonic():
                        dead, value, why = TimeoutError(), math.nan, f"no answer within {self.timeout} seconds"
                    else:
                        continue
                    del busy[worker]
                    if dead is not None:
                        self._replace(worker)
                    if why is not None and faults.should_retry(member, why):
                        failed_on[member] = worker
                        todo.insert(0, member)
                        continue
                    yield member, value
        except BaseException:
            # What the workers are doing is of no use any more.
            for worker in busy.keys() & self._staff.keys():
                self._replace(worker)
            raise
        faults.check()

    def _evaluate_slices(
        self, fitness: ModuleFitness, seeds: Sequence[int], todo: Sequence[int]
    ) -> Generator[tuple[int, float], None, list[int]]:
        """Evaluate members that differ by noise of low rank, each worker its slice of them by one product for all of these.

        Returns:
            The members that are left: those of workers that died or were late, all where torch can't vectorise the fitness.
        """
        size = min(_SLICE, -(-len(todo) // self.workers))
        size += size % 2  # mirrored members are neighbours, and share what is drawn for them
        slices = [list(todo[start : start + size]) for start in range(0, len(todo), size)]
        busy: dict[int, tuple[list[int], Future[Any], float]] = {}
        left: list[int] = []
        try:
            while slices or busy:
                for worker in [number for number in self._staff if number not in busy][: len(slices)]:
                    members = slices.pop(0)
                    deadline = monotonic() + (math.inf if self.timeout is None else self.timeout * len(members))
                    future = self._submit(worker, (self._draft, members), seeds[members[0]])
                    busy[worker] = members, future, deadline
                soonest = min(deadline for _, _, deadline in busy.values())
                seconds = None if soonest == math.inf else max(0.0, soonest - monotonic())
                wait([future for _, future, _ in busy.values()], seconds, FIRST_COMPLETED)
                for worker, (members, future, deadline) in list(busy.items()):
                    if not future.done() and deadline > monotonic():
                        continue
                    del busy[worker]
                    if not future.done() or future.exception() is not None:
                        # Which of them it was is found one by one.
                        self._replace(worker)
                        left += members
                        continue
                    values, why = future.result()
                    if why is None:
                        yield from zip(members, values, strict=True)
                        continue
                    left += members
                    for rest in slices:
                        left += rest
                    slices = []
                    fitness.refuse(why)
        except BaseException:
            for worker in busy.keys() & self._staff.keys():
                self._replace(worker)
            raise
        return sorted(left)

    def close(self) -> None:
        """End the workers."""
        for worker in list(self._staff):
            self._end(worker)
        self._fitness = self._sent = None
        self._draft = self._publish(None)


class Worker:
    """What runs elsewhere: knows the fitness, and evaluates one member at a time."""

    fitness: Any = None

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def learn(self, fitness: RowFitness) -> None:
        """Take the fitness."""
        self.fitness, self.last = fitness, dict[Any, Tensor]()

    def evaluate(self, what: Any, seed: int) -> tuple[float, str | None]:
        """The fitness of a row, and what went wrong."""
        # What an object store gives is read-only, and torch would warn of it; a row is copied once, here.
        row = torch.from_numpy(what.copy()) if isinstance(what, np.ndarray) else what
        return answer(self.fitness, row, seed)

    def make(self, draft: tuple[Search, dict[str, Any]], member: int | list[int], seed: int) -> tuple[Any, str | None]:
        """The same of a member that is made here, of the packed draft; of several that are not made, a list."""
        search: Any = draft[0]
        # They may be memory that can't be written to, and are not.
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
        """The fitness of members by one product for all of them, or why torch can't vectorise it."""
        torch.manual_seed(seed)
        try:
            with torch.no_grad():
                return self.fitness.evaluate_together(members).tolist(), None
        except (RuntimeError, ValueError, TypeError) as error:
            return [], str(error).strip().splitlines()[0]


def pack(draft: Search) -> tuple[Search, dict[str, Any]]:
    """A draft without its tensors, and these as arrays, which travel and are read without a copy."""
    arrays = {name: value.numpy() for name, value in draft.state.items() if isinstance(value, Tensor)}
    for name in arrays:
        del draft.state[name]
    return draft, arrays
