"""`Ray`: actors on a Ray cluster."""

from __future__ import annotations

import importlib
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._executor import EvaluationWarning, seeded
from ._workers import Answer, Workers

__all__ = ["Ray"]


class Ray(Workers):
    """Actors on Ray, here or on a cluster. Needs the extra: `pip install moduli[ray]`.

    Members travel as flat NumPy arrays through the object store, from which an actor reads them without a copy. The fitness
    is sent once. Ray is started with its defaults unless `ray.init` was called before. Where the cluster has not the
    resources for so many actors there are fewer, and a warning; where it has them for none, an error.

    Args:
        workers: How many actors; by default as many as the cluster has processors.
        timeout: Seconds that one member may take; None waits forever.
        retries: How often a member that failed is tried again elsewhere.
        threads: How many threads torch uses in each actor.
        start_timeout: Seconds that actors may take to start; a cluster that lost the resources for them is an error then.
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
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        if not start_timeout > 0:
            raise ValueError(f"start_timeout={start_timeout}: give seconds")
        super().__init__(self._affordable(workers, options), timeout, retries)
        self.threads, self.options, self.start_timeout = threads, options, start_timeout
        self._fitness: Callable[[Tensor], Any] | None = None
        self._sent: Any = None
        self._actors: dict[int, Any] = {}
        self._running: dict[int, Any] = {}

    def _affordable(self, workers: int | None, options: dict[str, Any]) -> int:
        """How many actors the cluster has the resources for, at most as many as were asked for."""
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        there = self._ray.cluster_resources()
        most = [(int(there.get(kind, 0) // need), kind, need) for kind, need in asked.items() if need]
        if not most:
            return workers or int(there.get("CPU", 1))
        fits, kind, need = min(most)
        if fits < 1:
            raise ValueError(
                f"an actor needs {need} {kind}, and the Ray cluster has {there.get(kind, 0):g}; ask for less, or add a node"
            )
        if workers is not None and workers > fits:
            warnings.warn(
                f"Ray has {there.get(kind, 0):g} {kind}, which is enough for {fits} workers of the {workers} asked for",
                EvaluationWarning,
                stacklevel=3,
            )
        return min(workers or fits, fits)

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
        told = [actor.learn.remote(self._sent) for actor in actors]
        try:
            self._ray.get(told, timeout=self.start_timeout)
        except self._ray.exceptions.RayActorError:
            return  # it is dead then, which `_collect` notices
        except self._ray.exceptions.GetTimeoutError as error:
            self.close()
            raise RuntimeError(
                f"actors did not start within {self.start_timeout} seconds: the cluster has lost resources, or others use "
                "them; a search with a checkpoint can be resumed"
            ) from error

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
