"""`Ray`: actors on a Ray cluster."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._base import Search
from ._executor import EvaluationWarning, RowFitness, answer, evaluate_seeded
from ._noise import DirectionMemory
from ._workers import Answer, Workers, evaluate_draft, pack, unpack


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
        fits, why = self._affordable()
        if fits < 1:
            raise ValueError(f"{why}; ask for less, or add a node")
        super().__init__(fits if workers is None else workers, timeout, retries, threads, start_timeout)
        if self.workers > fits:
            _warn(f"Ray: {why}, which is enough for {fits} workers of the {workers} asked for")
            self.workers = fits
        self._draft: Any = None
        self._actors: dict[int, Any] = {}

    def _affordable(self) -> tuple[int, str]:
        """How many actors the cluster has the resources for now, and what they are short of."""
        options = self.options
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        there = self._ray.cluster_resources()
        most = [(int(there.get(kind, 0) // need), kind, need) for kind, need in asked.items() if need]
        if not most:
            return int(there.get("CPU", 1)), "the Ray cluster has its processors"
        fits, kind, need = min(most)
        return fits, f"an actor needs {need} {kind}, and the Ray cluster has {there.get(kind, 0):g}"

    def _prepare(self, fitness: RowFitness, draft: Search | None) -> None:
        self._draft = None if draft is None else self._ray.put(pack(draft))
        unused = (number for number in itertools.count() if number not in self._actors)
        new = [self._launch(next(unused)) for _ in range(self.workers - len(self._actors))]
        if self._fitness is not fitness:
            self._fitness, self._sent = fitness, self._ray.put(fitness)
            new = list(self._actors)
        self._tell(new)

    def _launch(self, worker: int) -> int:
        actor = self._ray.remote(**{"num_cpus": 1, **self.options})(_Actor)
        self._actors[worker] = actor.remote(self.threads)
        return worker

    def _tell(self, workers: list[int]) -> None:
        """Give the fitness to actors and wait until they have it: to start is not part of the time of a member."""
        late = {self._actors[worker].learn.remote(self._sent): worker for worker in workers}
        if not late:
            return
        why, end = f"not all started within {self.start_timeout} seconds", monotonic() + self.start_timeout
        while late and monotonic() < end:
            # One that died meanwhile is noticed by `_collect`.
            for reference in self._ray.wait(list(late), num_returns=len(late), timeout=1.0)[0]:
                del late[reference]
            # A lost node takes a while to be known of; there is no room for as many then, and nothing to wait for.
            fits, short = self._affordable()
            if len(self._actors) > fits:
                why = short
                break
        for worker in late.values():
            self._ray.kill(self._actors.pop(worker))
        self._check_staff(why)

    def _check_staff(self, why: str) -> None:
        """Go on with fewer workers than there were, or end where there are none."""
        if not self._actors:
            self.close()
            raise RuntimeError(
                f"Ray has no workers left ({why}): the cluster has lost resources, or others use them; a search with a "
                "checkpoint can be resumed"
            )
        if len(self._actors) < self.workers:
            _warn(f"Ray goes on with {len(self._actors)} of {self.workers} workers: {why}")
            self.workers = len(self._actors)

    def _ids(self) -> Sequence[int]:
        return list(self._actors)

    def _submit(self, worker: int, member: int, row: Tensor | None, seed: int) -> None:
        actor = self._actors[worker]
        if row is None:
            self._running[worker] = actor.make.remote(self._draft, member, seed)
            return
        # NumPy arrays go through the object store without pickling; tensors would be copied several times.
        array = row.detach().cpu().contiguous()
        plain = array.numpy() if array.dtype != torch.bfloat16 else array.view(torch.int16).numpy()
        self._running[worker] = actor.evaluate.remote(plain, str(array.dtype), seed)

    def _collect(self, busy: Sequence[int], seconds: float | None) -> list[Answer]:
        waiting = {self._running[w]: w for w in busy}
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=seconds)
        answers = []
        for reference in ready:
            worker = waiting[reference]
            try:
                value, error = self._ray.get(reference)
                answers.append(Answer(worker, value, error))
            except self._ray.exceptions.RayError as error:
                answers.append(Answer(worker, math.nan, f"its worker died ({type(error).__name__})", True))
        return answers

    def _replace(self, worker: int) -> None:
        self._ray.kill(self._actors.pop(worker))
        self._running.pop(worker, None)
        fits, why = self._affordable()
        if len(self._actors) < fits:
            self._tell([self._launch(worker)])
        else:
            self._check_staff(why)

    def close(self) -> None:
        """End the actors. Ray itself goes on."""
        while self._actors:
            self._ray.kill(self._actors.popitem()[1])
        self._running.clear()
        self._fitness = self._sent = self._draft = None


class _Actor:
    """What runs on Ray: evaluates one member at a time."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.memory = DirectionMemory()

    def learn(self, fitness: RowFitness) -> None:
        self.fitness = fitness

    def evaluate(self, array: np.ndarray[Any, Any], dtype: str, seed: int) -> tuple[float, str | None]:
        # What the object store gives is read-only, and torch would warn of it; a row is copied once, here.
        row = torch.from_numpy(np.array(array)).view(getattr(torch, dtype.removeprefix("torch.")))
        return answer(evaluate_seeded, self.fitness, row, seed)

    def make(self, draft: tuple[Search, dict[str, Any]], member: int, seed: int) -> tuple[float, str | None]:
        # The arrays stay in the object store, from where all actors of this machine read them.
        return answer(evaluate_draft, self.fitness, unpack(*draft), member, seed, self.memory)


def _warn(what: str) -> None:
    warnings.warn(EvaluationWarning(what), stacklevel=4)
