"""`Workers`: the part of an executor that hands members to workers and survives their faults; `Ray` has actors for that."""

from __future__ import annotations

import importlib
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._base import Search
from ._executor import EvaluationWarning, Executor, Faults, RowFitness, Rows, Values, answer
from ._search import ModuleFitness


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

    def close(self) -> None:
        """End the workers."""
        for worker in list(self._staff):
            self._end(worker)
        self._fitness = self._sent = None
        self._draft = self._publish(None)


class Ray(Workers):
    """Actors on Ray, here or on a cluster. Needs the extra: `pip install moduli[ray]`.

    Actors hold the model and the fitness, which are sent once. Of a seed-replayed search over many parameters (`OpenES`,
    `PGPE`, `ARS`, `SNES`, separable `CMAES`) they get seeds, and the mean once for each generation, which the actors of one
    machine share; members of other searches travel as flat NumPy arrays through the object store. Ray is started with its
    defaults unless `ray.init` was called before. Where the cluster has not the resources for so many actors, also after it
    lost a node, there are fewer, and a warning; where it has them for none, an error.

    Args:
        workers: How many actors; by default as many as the cluster has processors.
        timeout: Seconds that one member may take; None waits forever.
        retries: How often a member that failed is tried again elsewhere.
        threads: How many threads torch uses in each actor.
        start_timeout: Seconds that actors may take to start; those that do not are given up, and none at all is an error.
        **options: Options of the actors: `num_cpus`, `num_gpus`, `resources`, `runtime_env`, and so on.

    Example:
        >>> from moduli.evolve import Ray
        >>> Ray.__name__  # with Ray(8) as executor: search(net, fitness, executor=executor)
        'Ray'
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        timeout: float | None = None,
        retries: int = 1,
        threads: int = 1,
        start_timeout: float = 120.0,
        **options: Any,
    ) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Ray is not installed; use `pip install moduli[ray]`", name="ray") from error
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        self.options = options
        fits, why = self._count_affordable()
        if fits < 1:
            raise ValueError(f"{why}; ask for less, or add a node")
        super().__init__(fits if workers is None else workers, timeout, retries, threads, start_timeout)
        if self.workers > fits:
            what = f"Ray: {why}, which is enough for {fits} workers of the {workers} asked for"
            warnings.warn(EvaluationWarning(what), stacklevel=2)
            self.workers = fits

    def _count_affordable(self) -> tuple[int, str]:
        options = self.options
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        there = self._ray.cluster_resources()
        most = [(int(there.get(kind, 0) // need), kind, need) for kind, need in asked.items() if need]
        if not most:
            return int(there.get("CPU", 1)), "the Ray cluster has its processors"
        fits, kind, need = min(most)
        return fits, f"an actor needs {need} {kind}, and the Ray cluster has {there.get(kind, 0):g}"

    def _send(self, fitness: RowFitness) -> Any:
        return self._ray.put(fitness)

    def _publish(self, draft: tuple[Search, dict[str, Any]] | None) -> Any:
        return None if draft is None else self._ray.put(draft)

    def _launch(self, worker: int) -> None:
        actor = self._ray.remote(**{"num_cpus": 1, **self.options})(Worker)
        self._staff[worker] = actor.remote(self.threads)

    def _meet(self, worker: int) -> Future[Any]:
        return self._staff[worker].learn.remote(self._sent).future()  # type: ignore[no-any-return]

    def _submit(self, worker: int, what: Any, seed: int) -> Future[Any]:
        actor = self._staff[worker]
        if isinstance(what, tuple):
            return actor.make.remote(*what, seed).future()  # type: ignore[no-any-return]
        # NumPy arrays go through the object store without pickling; tensors would be copied several times.
        row = what.detach().cpu().contiguous()
        sent = row if row.dtype == torch.bfloat16 else row.numpy()
        return actor.evaluate.remote(sent, seed).future()  # type: ignore[no-any-return]

    def _end(self, worker: int) -> None:
        self._ray.kill(self._staff.pop(worker))


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

    def make(self, draft: tuple[Search, dict[str, Any]], member: int, seed: int) -> tuple[float, str | None]:
        """The same of a member that is made here, of the packed draft."""
        search: Any = draft[0]
        # They may be memory that can't be written to, and are not.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            search.state.update((name, torch.from_numpy(array)) for name, array in draft[1].items())
        if search.antithetic:
            search._noise.last = self.last
        self.fitness.search = search
        return answer(self.fitness.evaluate_member, member, seed)


def pack(draft: Search) -> tuple[Search, dict[str, Any]]:
    """A draft without its tensors, and these as arrays, which travel and are read without a copy."""
    arrays = {name: value.numpy() for name, value in draft.state.items() if isinstance(value, Tensor)}
    for name in arrays:
        del draft.state[name]
    return draft, arrays
