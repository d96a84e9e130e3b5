"""`Pool`: processes of `concurrent.futures` on this machine."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._base import Search
from ._executor import RowFitness, answer, evaluate_seeded
from ._noise import DirectionMemory
from ._workers import Answer, Workers, evaluate_draft, pack, unpack


class Pool(Workers):
    """A pool of processes, each an executor of `concurrent.futures` of its own, so that one can be lost alone.

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
        max_tasks_per_child: How many members a process evaluates before another takes its place; not with `"fork"`.

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
        methods = multiprocessing.get_all_start_methods()
        start = start or ("forkserver" if "forkserver" in methods else "spawn")
        if start not in methods:
            raise ValueError(f"start={start!r} is unknown here; there are {', '.join(methods)}")
        if max_tasks_per_child is not None and (start == "fork" or max_tasks_per_child < 1):
            raise ValueError(
                f"max_tasks_per_child={max_tasks_per_child} with start={start!r}: give at least 1, and no fork"
            )
        self.start, self.max_tasks_per_child = start, max_tasks_per_child
        self._context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            # Workers are then forked from a process that has imported torch already.
            self._context.set_forkserver_preload(["torch"])
        self._staff: dict[int, tuple[ProcessPoolExecutor, Any, Any]] = {}
        self._draft: Path | None = None

    def _prepare(self, fitness: RowFitness, draft: Search | None) -> None:
        if self._fitness is not fitness:
            _leave_if_imported()
            self.close()
            self._fitness = self._sent = fitness
            if self.start != "fork":
                try:
                    self._sent = pickle.dumps(fitness)
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise TypeError(
                        f"the fitness can't be sent to other processes ({error}); define it at the top level of a module, "
                        "or use Pool(start='fork')"
                    ) from error
        self._forget_draft()
        if draft is not None:
            shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            number, name = tempfile.mkstemp(prefix="moduli-draft-", dir=shared)
            self._draft = Path(name)
            with os.fdopen(number, "wb") as file:
                pickle.dump(pack(draft), file, protocol=5)
        started = {worker: self._launch(worker) for worker in range(self.workers) if worker not in self._staff}
        for worker, greeting in started.items():
            self._greet(worker, greeting)

    def _launch(self, worker: int) -> Future[Any]:
        pid = self._context.Value("q", 0, lock=False)
        executor = ProcessPoolExecutor(
            1,
            mp_context=self._context,
            initializer=_begin,
            initargs=(pid, self._sent, self.threads),
            max_tasks_per_child=self.max_tasks_per_child,
        )
        before = multiprocessing.active_children()
        greeting = executor.submit(_load)
        # To be able to end it while it starts, when it has not said yet who it is.
        process = next(child for child in multiprocessing.active_children() if child not in before)
        self._staff[worker] = executor, process, pid
        return greeting

    def _greet(self, worker: int, greeting: Future[Any]) -> None:
        """Wait until a worker is ready: to start is not part of the time that a member may take."""
        try:
            greeting.result(self.start_timeout)
        except TimeoutError:
            self.close()
            raise RuntimeError(
                f"a worker did not start within {self.start_timeout} seconds: what it imports, or the fitness, takes longer"
            ) from None
        except BrokenProcessPool as error:
            code = _await_exit_code(self._staff[worker][1])
            self.close()
            if code == _UNGUARDED:
                raise RuntimeError(
                    "the workers import this program, which starts a search again when it is imported; put what it runs under "
                    '`if __name__ == "__main__":`'
                ) from None
            raise RuntimeError(f"a worker ended while it started, with exit code {code}") from error
        except Exception as error:
            self.close()
            raise TypeError(
                f"the fitness can't be loaded in another process ({type(error).__name__}: {error})"
            ) from error

    def _ids(self) -> Sequence[int]:
        return list(self._staff)

    def _submit(self, worker: int, member: int, row: Tensor | None, seed: int) -> None:
        what: Any = (str(self._draft), member) if row is None else row.detach().cpu().clone()
        try:
            self._running[worker] = self._staff[worker][0].submit(answer, _evaluate, what, seed)
        except BrokenProcessPool as error:  # it died since its last answer
            self._running[worker] = Future()
            self._running[worker].set_exception(error)

    def _collect(self, busy: Sequence[int], seconds: float | None) -> list[Answer]:
        done, _ = wait([self._running[worker] for worker in busy], seconds, FIRST_COMPLETED)
        answers = []
        for worker in busy:
            if self._running[worker] in done:
                future = self._running.pop(worker)
                error = future.exception()
                if error is None:
                    answers.append(Answer(worker, *future.result()))
                else:
                    answers.append(Answer(worker, math.nan, f"its worker died ({type(error).__name__})", True))
        return answers

    def _replace(self, worker: int) -> None:
        self._end(worker)
        self._greet(worker, self._launch(worker))

    def _end(self, worker: int) -> None:
        executor, process, pid = self._staff.pop(worker)
        self._running.pop(worker, None)
        # A process that hangs is not asked, it is killed; the executor then lets go of it.
        process.kill()
        if pid.value not in (0, process.pid):  # one that took its place, by max_tasks_per_child
            with suppress(ProcessLookupError):
                os.kill(pid.value, signal.SIGKILL)
        executor.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """End the workers."""
        for worker in list(self._staff):
            self._end(worker)
        self._fitness = self._sent = None
        self._forget_draft()

    def _forget_draft(self) -> None:
        if self._draft is not None:
            self._draft.unlink(missing_ok=True)
            self._draft = None

    def __del__(self) -> None:
        if getattr(self, "_staff", None) or getattr(self, "_draft", None):
            self.close()


_UNGUARDED = 77
"""The exit code of a worker that was asked for a pool while it imported the program."""


def _await_exit_code(process: Any, seconds: float = 10) -> int | None:
    """The exit code of a process that ended, which the executor's own thread may be collecting.

    The one that comes second to `waitpid` learns nothing from it, and has to wait until the other has written the code down.
    """
    end = time.monotonic() + seconds
    process.join(seconds)
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    return process.exitcode  # type: ignore[no-any-return]


def _leave_if_imported() -> None:
    """End this process, if it is a worker that imports a program without a guard: it would start workers of its own."""
    # multiprocessing gives the program this name in its workers, instead of "__main__".
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(_UNGUARDED)
        frame = frame.f_back


class _Worker:
    """What a worker knows: the fitness, which is pickled until it is needed, and the generation that it has read."""

    fitness: Any = None
    draft: tuple[str, Any] | None = None
    memory = DirectionMemory()


def _begin(pid: Any, fitness: Any, threads: int) -> None:
    # Ctrl-C reaches the whole group of processes; who started the workers decides what becomes of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _Worker.fitness, _Worker.draft, pid.value = fitness, None, os.getpid()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, also in the middle of a fitness that never ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _load() -> None:
    if isinstance(_Worker.fitness, bytes):
        _Worker.fitness = pickle.loads(_Worker.fitness)


def _evaluate(what: Any, seed: int) -> float:
    """The fitness of a row, or of a member of the generation in a file."""
    _load()
    if isinstance(what, Tensor):
        return evaluate_seeded(_Worker.fitness, what, seed)
    path, member = what
    if _Worker.draft is None or _Worker.draft[0] != path:
        _Worker.draft = None  # the last one, before there are two
        _Worker.draft = path, unpack(*pickle.loads(Path(path).read_bytes()))
    return evaluate_draft(_Worker.fitness, _Worker.draft[1], member, seed, _Worker.memory)
