"""`Ray`: actors on a Ray cluster."""

from __future__ import annotations

import importlib
import warnings
from concurrent.futures import Future
from time import monotonic
from typing import Any

import torch

from ._base import Search
from ._executor import EvaluationWarning, RowFitness
from ._workers import Worker, Workers


class Ray(Workers):
    """Actors on Ray, here or on a cluster. Needs the extra: `pip install moduli[ray]`.

    Actors receive the model and the fitness once. For a seed-replayed search over many parameters (`OpenES`, `PGPE`, `ARS`,
    `SNES`, separable `CMAES`) they receive seeds, and the mean once for each generation, which the actors of one machine share;
    members of other searches are sent as flat NumPy arrays through the object store. Ray is started with its defaults unless
    `ray.init` was called before. If the cluster has resources for fewer actors, also after it lost a node, the search
    continues with fewer and warns; if it has resources for none, it raises.

    Args:
        workers: How many actors; by default as many as the cluster has processors.
        timeout: Seconds that one member may take; None waits forever, or until Ray notices that a node is lost.
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

    def launch_actors(self, kind: type, count: int, *args: Any) -> list[Any]:
        """End the workers of the search, because idle actors occupy processors, and start actors of another class.

        Args:
            kind: Their class, with a method `ready`, which returns when an actor has started.
            count: The number of actors; fewer are started if the cluster lacks resources.
            *args: Arguments of the class.

        Returns:
            The actors that started within `start_timeout` seconds.

        Raises:
            RuntimeError: If none started.
        """
        self.close()
        fits, why = self._count_affordable()
        remote = self._ray.remote(**{"num_cpus": 1, **self.options})(kind)
        actors = [remote.remote(*args) for _ in range(min(count, fits))]
        late = {actor.ready.remote(): actor for actor in actors}
        end = monotonic() + self.start_timeout
        while late and (left := end - monotonic()) > 0:
            for greeting in self._ray.wait(list(late), num_returns=len(late), timeout=min(1.0, left))[0]:
                actor = late.pop(greeting)
                try:
                    self._ray.get(greeting)
                except self._ray.exceptions.RayActorError as error:
                    why = f"an actor died while it started ({str(error).splitlines()[0]})"
                    actors.remove(actor)
            # If a node was lost meanwhile, the remaining actors will never start.
            if len(actors) - len(late) >= self._count_affordable()[0]:
                break
        for actor in late.values():
            self._ray.kill(actor)
            actors.remove(actor)
            why = f"it did not start them within {self.start_timeout} seconds, or others use its resources"
        if not actors:
            raise RuntimeError(f"the Ray cluster has room for none of {count} actors: {why}")
        if len(actors) < count:
            what = f"the Ray cluster has room for {len(actors)} of {count} actors: {why}"
            warnings.warn(EvaluationWarning(what), stacklevel=4)
        return actors

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
