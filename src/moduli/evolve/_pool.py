"""`Pool`: processes of `concurrent.futures` on this machine."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch import Tensor

from ._base import Search
from ._executor import RowFitness
from ._workers import Worker, Workers


class Pool(Workers):
    """A pool of processes, each in a separate executor of `concurrent.futures`, so that losing one does not break the others.

    The fitness is sent once, members as arrays; of a seed-replayed search over many parameters only the seeds travel, and the
    mean once for each generation. The fitness has to be something that pickle finds by name (a function at the top of a
    module), unless `start="fork"`. A program that uses the pool has its work under `if __name__ == "__main__":`. Close the
    pool, or use it in a `with`.

    Args:
        workers: How many processes; by default as many as there are processors.
        timeout: Seconds that one member may take; None waits forever.
        retries: How often a member that failed is tried again elsewhere.
        start: `"forkserver"` (the default, where there is one), `"spawn"` or `"fork"`. `"fork"` starts at once and takes any
            function, but is unsafe in a process with threads.
        threads: How many threads torch uses in each worker.
        start_timeout: Seconds that a worker may take to start, imports included.
        max_tasks_per_child: How many members a process evaluates before another replaces it; not with `"fork"`.

    Example:
        >>> import torch
        >>> from moduli.evolve import Pool
        >>> with Pool(2, start="fork") as pool:
        ...     pool.map(torch.sum, torch.eye(3))
        tensor([1., 1., 1.], dtype=torch.float64)
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        timeout: float | None = None,
        retries: int = 1,
        start: str | None = None,
        threads: int = 1,
        start_timeout: float = 300.0,
        max_tasks_per_child: int | None = None,
    ) -> None:
        super().__init__(workers or os.cpu_count() or 1, timeout, retries, threads, start_timeout)
        start = start or ("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
        if max_tasks_per_child is not None and (start == "fork" or max_tasks_per_child < 1):
            raise ValueError(f"max_tasks_per_child={max_tasks_per_child} is at least 1, and not with fork")
        self.start, self.max_tasks_per_child = start, max_tasks_per_child
        self._context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            # Workers are then forked from a process that has imported torch already.
            self._context.set_forkserver_preload(["torch"])
        self._evaluated: dict[int, int] = {}

    def _send(self, fitness: RowFitness) -> Any:
        _leave_if_imported()
        self.close()
        if self.start == "fork":
            return fitness
        try:
            return pickle.dumps(fitness)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the fitness can't be sent to other processes ({error}); define it at the top level of a module, "
                "or use Pool(start='fork')"
            ) from error

    def _publish(self, draft: tuple[Search, dict[str, Any]] | None) -> str | None:
        if self._draft is not None:
            Path(self._draft).unlink(missing_ok=True)
        if draft is None:
            return None
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        number, name = tempfile.mkstemp(prefix="moduli-draft-", dir=shared)
        with os.fdopen(number, "wb") as file:
            pickle.dump(draft, file, protocol=5)
        return name

    def _launch(self, worker: int) -> None:
        executor = ProcessPoolExecutor(1, self._context, _begin, (self._sent, self.threads))
        before = multiprocessing.active_children()
        greeting = executor.submit(_load)
        # The process is stored so that it can be killed whatever it does, also while it starts.
        process = next(child for child in multiprocessing.active_children() if child not in before)
        self._staff[worker] = executor, process, greeting
        self._evaluated[worker] = 0

    def _meet(self, worker: int) -> Future[Any]:
        greeting: Future[Any] = self._staff[worker][2]
        return greeting

    def _check_greeting(self, worker: int, greeting: Future[Any]) -> None:
        error = greeting.exception()
        if error is None:
            return
        code = _await_exit_code(self._staff[worker][1]) if isinstance(error, BrokenProcessPool) else None
        self.close()
        if code == _UNGUARDED:
            raise RuntimeError(
                "the workers import this program, which starts a search again when it is imported; put what it runs under "
                '`if __name__ == "__main__":`'
            ) from None
        if code is not None:
            raise RuntimeError(f"a worker ended while it started, with exit code {code}") from error
        raise TypeError(f"the fitness can't be loaded in another process ({type(error).__name__}: {error})") from error

    def _submit(self, worker: int, what: Any, seed: int) -> Future[Any]:
        if self._evaluated[worker] == self.max_tasks_per_child:
            self._replace(worker)
        self._evaluated[worker] += 1
        try:
            future: Future[Any] = self._staff[worker][0].submit(_evaluate, what, seed)
        except BrokenProcessPool as error:  # it died since its last answer
            future = Future()
            future.set_exception(error)
        return future

    def _end(self, worker: int) -> None:
        executor, process, _ = self._staff.pop(worker)
        # The process is killed, because it may hang; the executor then ends without waiting for it.
        process.kill()
        executor.shutdown(wait=True, cancel_futures=True)

    def __del__(self) -> None:
        if getattr(self, "_staff", None) or getattr(self, "_draft", None):
            self.close()


_UNGUARDED = 77
"""The exit code of a worker that would start a pool while it imports the program."""


def _await_exit_code(process: Any, seconds: float = 10) -> int | None:
    """Return the exit code of a process that ended, or None after `seconds`.

    The executor's thread may call `waitpid` first; the code is then known only when that thread has stored it, so it is polled.
    """
    end = time.monotonic() + seconds
    process.join(seconds)
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    return process.exitcode  # type: ignore[no-any-return]


def _leave_if_imported() -> None:
    """End this process if it is a worker that imports a program without a guard, which would start workers recursively."""
    # multiprocessing gives the program this name in its workers, instead of "__main__".
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(_UNGUARDED)
        frame = frame.f_back


class _Here:
    """The state of this process as a worker: the fitness as it was sent, the worker, and the last draft with its path."""

    sent: Any = None
    worker: Worker
    draft: tuple[str, Any] = "", None


def _begin(fitness: Any, threads: int) -> None:
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Here.sent, _Here.worker, _Here.draft = fitness, Worker(threads), ("", None)


def _end_with_parent() -> None:
    """End this process when its parent is gone, also in the middle of a fitness that never ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _load() -> None:
    _Here.worker.learn(pickle.loads(_Here.sent) if isinstance(_Here.sent, bytes) else _Here.sent)


def _evaluate(what: Any, seed: int) -> tuple[float, str | None]:
    """Evaluate a row, or members of the draft in a file: (path, index or indices)."""
    if isinstance(what, Tensor):
        return _Here.worker.evaluate(what, seed)
    path, member = what
    if _Here.draft[0] != path:
        _Here.draft = "", None  # drop the last one first: only one fits in memory
        _Here.draft = path, pickle.loads(Path(path).read_bytes())
    return _Here.worker.make(_Here.draft[1], member, seed)
