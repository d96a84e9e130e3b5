"""`Ray`: actors on a Ray cluster."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._executor import seeded
from ._workers import Answer, Workers

__all__ = ["Ray"]


class Ray(Workers):
    """Actors on Ray, here or on a cluster. Needs the extra: `pip install moduli[ray]`.

    Members travel as flat NumPy arrays through the object store, from which an actor reads them without a copy. The fitness
    is sent once. Ray is started with its defaults unless `ray.init` was called before.

    Args:
        workers: How many actors; by default as many as the cluster has processors.
        timeout: Seconds that one member may take; None waits forever.
        retries: How often a member that failed is tried again elsewhere.
        threads: How many threads torch uses in each actor.
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
        **options: Any,
    ) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Ray is not installed; use `pip install moduli[ray]`", name="ray") from error
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        super().__init__(workers or int(self._ray.cluster_resources().get("CPU", 1)), timeout, retries)
        self.threads, self.options = threads, options
        self._fitness: Callable[[Tensor], Any] | None = None
        self._sent: Any = None
        self._actors: dict[int, Any] = {}
        self._running: dict[int, Any] = {}

    def _prepare(self, fitness: Callable[[Tensor], Any], example: Tensor) -> None:
        told = [self._launch(worker) for worker in range(self.workers) if worker not in self._actors]
        if self._fitness is not fitness:
            self._fitness, self._sent = fitness, self._ray.put(fitness)
            told = list(self._actors.values())
        self._tell(told)

    def _launch(self, worker: int) -> Any:
        actor = self._ray.remote(**{"num_cpus": 1, **self.options})(_Actor)
        self._actors[worker] = actor.remote(self.threads)
        return self._actors[worker]

    def _tell(self, actors: list[Any]) -> None:
        """Give the fitness to actors and wait until they have it: to start is not part of the time of a member."""
        with suppress(self._ray.exceptions.RayActorError):  # it is dead then, which `_collect` notices
            self._ray.get([actor.learn.remote(self._sent) for actor in actors])

    def _submit(self, worker: int, member: int, row: Tensor, seed: int) -> None:
        # NumPy arrays go through the object store without pickling; tensors would be copied several times.
        array = row.detach().cpu().contiguous()
        plain = array.numpy() if array.dtype != torch.bfloat16 else array.view(torch.int16).numpy()
        self._running[worker] = self._actors[worker].evaluate.remote(plain, str(array.dtype), seed)

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
        self._tell([self._launch(worker)])

    def close(self) -> None:
        """End the actors. Ray itself goes on."""
        while self._actors:
            self._ray.kill(self._actors.popitem()[1])
        self._running.clear()
        self._fitness = self._sent = None


class _Actor:
    """What runs on Ray: evaluates one member at a time."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def learn(self, fitness: Callable[[Tensor], Any]) -> None:
        self.fitness = fitness

    def evaluate(self, array: np.ndarray[Any, Any], dtype: str, seed: int) -> tuple[float, str | None]:
        # What the object store gives is read-only, and torch would warn of it; a row is copied once, here.
        row = torch.from_numpy(np.array(array)).view(getattr(torch, dtype.removeprefix("torch.")))
        try:
            return seeded(self.fitness, row, seed), None
        except Exception:  # noqa: BLE001 - whatever a fitness raises concerns one member only
            return math.nan, traceback.format_exc()
