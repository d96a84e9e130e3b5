"""`Workers`: the part of an executor that hands members to workers and survives their faults."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._base import Search
from ._executor import Executor, Faults, KnownValues, Listener, RowFitness, Rows, evaluate_seeded
from ._noise import DirectionMemory


class Answer(NamedTuple):
    """What came back from a worker: a value, or why there is none; a dead worker has to be replaced."""

    worker: int
    value: float
    error: str | None = None
    dead: bool = False


class Workers(Executor):
    """Hands one member at a time to each of a number of workers.

    A member whose worker dies, takes longer than `timeout` seconds, or raises is given to another worker (`retries` times),
    then has the fitness NaN; each time an `EvaluationWarning` names it.
    """

    def __init__(self, workers: int, timeout: float | None, retries: int, threads: int, start_timeout: float) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout}: give seconds, or None")
        if retries < 0:
            raise ValueError(f"retries={retries} can't be negative")
        if not start_timeout > 0:
            raise ValueError(f"start_timeout={start_timeout}: give seconds")
        self.workers, self.timeout, self.retries = workers, timeout, retries
        self.threads, self.start_timeout = threads, start_timeout
        # What the workers know, as it was given and as it is sent, and what each has been asked.
        self._fitness: RowFitness | None = None
        self._sent: Any = None
        self._running: dict[int, Any] = {}

    @abstractmethod
    def _prepare(self, fitness: RowFitness, draft: Search | None) -> None:
        """Make sure that every worker runs and knows the fitness, and can reach the draft of the generation."""

    @abstractmethod
    def _ids(self) -> Sequence[int]:
        """The workers that there are."""

    @abstractmethod
    def _submit(self, worker: int, member: int, row: Tensor | None, seed: int) -> None:
        """Give a member to a worker that has nothing to do: its row, or None for one that the worker makes of the draft."""

    @abstractmethod
    def _collect(self, busy: Sequence[int], seconds: float | None) -> list[Answer]:
        """Wait for an answer of any of the busy workers, at most so long."""

    @abstractmethod
    def _replace(self, worker: int) -> None:
        """End a worker, whatever it does, and start another in its place, where that is possible."""

    def evaluate(
        self, fitness: RowFitness, rows: Rows, seeds: Sequence[int], known: KnownValues, report: Listener
    ) -> dict[int, float]:
        """The fitness of every member that is not known, by index; `report` hears of each as it comes."""
        todo = deque(i for i in range(len(seeds)) if i not in known)
        found: dict[int, float] = {}
        if not todo:
            return found
        # Workers hold the model. Where members are made of seeds, these are all that is sent to them.
        make_draft = getattr(fitness, "draft", None)
        draft = None if make_draft is None else make_draft()
        mirrored = getattr(draft, "antithetic", False)
        last: dict[int, int] = {}
        self._prepare(fitness, draft)
        faults = Faults(self.retries, len(todo))
        failed_on: dict[int, int] = {}
        busy: dict[int, tuple[int, float]] = {}
        try:
            while todo or busy:
                for worker in self._ids():
                    if worker not in busy and todo:
                        if mirrored:
                            others = {member for each, (member, _) in busy.items() if each != worker}
                            _bring_forward(todo, last.get(worker, -1), others)
                        member = last[worker] = self._take_next(todo, failed_on, worker)
                        busy[worker] = member, monotonic() + (math.inf if self.timeout is None else self.timeout)
                        row = rows(member, member + 1)[0] if draft is None else None
                        self._submit(worker, member, row, seeds[member])
                soonest = min(deadline for _, deadline in busy.values())
                wait = None if soonest == math.inf else max(0.0, soonest - monotonic())
                answers = self._collect(list(busy), wait)
                late = {worker for worker, (_, deadline) in busy.items() if deadline <= monotonic()}
                for worker in late - {answer.worker for answer in answers}:
                    answers.append(Answer(worker, math.nan, f"no answer within {self.timeout} seconds", True))
                for answer in answers:
                    member, _ = busy.pop(answer.worker)
                    if answer.dead:
                        self._replace(answer.worker)
                    if answer.error is not None and faults.should_retry(member, answer.error):
                        failed_on[member] = answer.worker
                        todo.appendleft(member)
                        continue
                    found[member] = answer.value
                    report(member, answer.value)
        except BaseException:
            # What the workers are doing is of no use any more.
            for worker in busy:
                self._replace(worker)
            raise
        faults.check()
        return found

    def _take_next(self, todo: deque[int], failed_on: dict[int, int], worker: int) -> int:
        """The next member for this worker: one that did not fail there, if there is such a one."""
        for _ in range(len(todo)):
            if len(self._ids()) == 1 or failed_on.get(todo[0]) != worker:
                break
            todo.rotate(-1)
        return todo.popleft()


def _bring_forward(todo: deque[int], last: int, others: set[int]) -> None:
    """Put the mirror image of a worker's last member first, or else one whose mirror image no other worker is at."""
    mirror = last ^ 1
    if last < 0 or mirror not in todo:
        mirror = next((member for member in todo if member ^ 1 not in others), todo[0])
    todo.remove(mirror)
    todo.appendleft(mirror)


def pack(draft: Search) -> tuple[Search, dict[str, Any]]:
    """A draft without its tensors, and these as arrays, which travel and are read without a copy."""
    arrays = {name: value.cpu().numpy() for name, value in draft.state.items() if isinstance(value, Tensor)}
    for name in arrays:
        del draft.state[name]
    return draft, arrays


def unpack(draft: Search, arrays: dict[str, np.ndarray[Any, Any]]) -> Search:
    """The draft again. Its tensors may be memory that can't be written to, and are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        draft.state.update((name, torch.from_numpy(array)) for name, array in arrays.items())
    return draft


def evaluate_draft(fitness: Any, draft: Search, member: int, seed: int, memory: DirectionMemory) -> float:
    """The fitness of a member that is made here; of mirrored ones the second is made of the noise of the first."""
    draft.remember(memory)
    fitness.parts = draft.parts
    return evaluate_seeded(lambda index: fitness.member(index, draft.rows), member, seed)
