"""`Pool`: processes that share memory with this one."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, resource_tracker, shared_memory
from typing import Any

import torch
from torch import Tensor

from ._executor import seeded
from ._workers import Answer, Workers

__all__ = ["Pool"]


class Pool(Workers):
    """A pool of processes. Members travel through shared memory, one row for each worker.

    The fitness is sent once; it has to be something that pickle finds by name (a function at the top of a module), unless
    `start="fork"`. A program that uses the pool has its work under `if __name__ == "__main__":`. Close the pool, or use it
    in a `with`.

    Args:
        workers: How many processes; by default as many as there are processors.
        timeout: Seconds that one member may take; None waits forever.
        retries: How often a member that failed is tried again elsewhere.
        start: `"forkserver"` (the default, where there is one), `"spawn"` or `"fork"`. `"fork"` starts at once and takes any
            function, but is unsafe in a process with threads.
        threads: How many threads torch uses in each worker.
        start_timeout: Seconds that a worker may take to start, imports included.

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
    ) -> None:
        super().__init__(workers or os.cpu_count() or 1, timeout, retries)
        if not start_timeout > 0:
            raise ValueError(f"start_timeout={start_timeout}: give seconds")
        self.start_timeout = start_timeout
        methods = multiprocessing.get_all_start_methods()
        start = start or ("forkserver" if "forkserver" in methods else "spawn")
        if start not in methods:
            raise ValueError(f"start={start!r} is unknown here; there are {', '.join(methods)}")
        self.start, self.threads = start, threads
        self._context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            # Workers are then forked from a process that has imported torch already.
            self._context.set_forkserver_preload(["torch"])
        self._staff: dict[int, tuple[Any, Any]] = {}
        self._fitness: Callable[[Tensor], Any] | None = None
        self._pickled: bytes | None = None
        self._memory: shared_memory.SharedMemory | None = None
        self._slots: Tensor | None = None

    def _prepare(self, fitness: Callable[[Tensor], Any], example: Tensor) -> None:
        if self._fitness is not fitness or not _fits(self._slots, example):
            _leave_if_imported()
            self.close()
            self._fitness = fitness
            if self.start != "fork":
                try:
                    self._pickled = pickle.dumps(fitness)
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise TypeError(
                        f"the fitness can't be sent to other processes ({error}); define it at the top level of a module, "
                        "or use Pool(start='fork')"
                    ) from error
            size = max(1, self.workers * example.numel() * example.element_size())
            # Started before the workers, so that all of them share it and none cleans up for itself.
            resource_tracker.ensure_running()
            self._memory = shared_memory.SharedMemory(create=True, size=size)
            flat = torch.frombuffer(self._memory.buf, dtype=torch.uint8, count=size)
            self._slots = flat.view(example.dtype).view(self.workers, example.numel())
        started = [worker for worker in range(self.workers) if worker not in self._staff]
        for worker in started:
            self._launch(worker)
        for worker in started:
            self._greet(worker)

    def _launch(self, worker: int) -> None:
        if self._memory is None or self._slots is None:
            raise RuntimeError("the pool has not been prepared")
        ours, theirs = self._context.Pipe()
        fitness = self._fitness if self.start == "fork" else self._pickled
        where = self._memory.name, worker, self._slots.shape[1], self._slots.dtype
        # A forked worker inherits our ends of all pipes. While it holds its own, it never hears that we are gone.
        ends = [ours, *(pipe for _, pipe in self._staff.values())] if self.start == "fork" else []
        process = self._context.Process(target=_work, args=(theirs, ends, fitness, where, self.threads), daemon=True)
        process.start()
        theirs.close()
        self._staff[worker] = process, ours

    def _greet(self, worker: int) -> None:
        """Wait until a worker is ready: to start is not part of the time that a member may take."""
        process, pipe = self._staff[worker]
        if not pipe.poll(self.start_timeout):
            self.close()
            raise RuntimeError(
                f"a worker did not start within {self.start_timeout} seconds; what it imports (the module of the fitness) "
                "hangs, or start_timeout is too short"
            )
        with suppress(EOFError, OSError):  # it is dead then, which `_collect` notices
            pipe.recv()
            return
        process.join(10)
        if process.exitcode == _UNGUARDED:
            self.close()
            raise RuntimeError(
                "the workers import this program, which starts a search again when it is imported; put what it runs under "
                '`if __name__ == "__main__":`'
            )

    def _submit(self, worker: int, member: int, row: Tensor, seed: int) -> None:
        if self._slots is None:
            raise RuntimeError("the pool has not been prepared")
        self._slots[worker] = row
        with suppress(OSError):  # it is dead then, which `_collect` notices
            self._staff[worker][1].send(seed)

    def _collect(self, busy: Sequence[int], seconds: float | None) -> list[Answer]:
        pipes = {self._staff[w][1]: w for w in busy}
        watched = [*pipes, *(self._staff[w][0].sentinel for w in busy)]
        ready = set(connection.wait(watched, seconds))
        answers = []
        for pipe, worker in pipes.items():
            process = self._staff[worker][0]
            if pipe not in ready and process.sentinel not in ready:
                continue
            try:
                if not pipe.poll():
                    raise EOFError
                value, error = pipe.recv()
                answers.append(Answer(worker, value, error))
            except (EOFError, OSError):
                process.join(1)
                answers.append(Answer(worker, math.nan, f"its worker died (exit code {process.exitcode})", True))
        return answers

    def _replace(self, worker: int) -> None:
        self._end(worker)
        self._launch(worker)
        self._greet(worker)

    def _end(self, worker: int) -> None:
        process, pipe = self._staff.pop(worker)
        pipe.close()
        process.kill()
        process.join()
        process.close()

    def close(self) -> None:
        """End the workers and give the shared memory back."""
        for worker in list(self._staff):
            self._end(worker)
        self._slots = self._fitness = self._pickled = None
        if self._memory is not None:
            _released(self._memory)
            self._memory = None

    def __del__(self) -> None:
        if getattr(self, "_staff", None) or getattr(self, "_memory", None):
            self.close()


_UNGUARDED = 77
"""The exit code of a worker that was asked for a pool while it imported the program."""


def _leave_if_imported() -> None:
    """End this process, if it is a worker that imports a program without a guard: it would start workers of its own."""
    # multiprocessing gives the program this name in its workers, instead of "__main__".
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            os._exit(_UNGUARDED)
        frame = frame.f_back


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, also in the middle of a fitness that never ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _fits(slots: Tensor | None, example: Tensor) -> bool:
    return slots is not None and slots.dtype == example.dtype and slots.shape[1] == example.numel()


def _released(memory: shared_memory.SharedMemory) -> None:
    with suppress(BufferError):  # a row is still looked at somewhere; the mapping goes when that does
        memory.close()
    memory.unlink()


def _work(
    pipe: Any, inherited: Sequence[Any], fitness: Any, where: tuple[str, int, int, torch.dtype], threads: int
) -> None:
    """What a worker does: evaluate the row in its slot whenever a seed arrives, until whoever started it is gone."""
    for end in inherited:
        end.close()
    # Ctrl-C reaches the whole group of processes; who started the workers decides what becomes of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    name, slot, dim, dtype = where
    memory = shared_memory.SharedMemory(name=name)
    row = torch.frombuffer(memory.buf, dtype=dtype, count=dim, offset=slot * dim * dtype.itemsize)
    broken: str | None = None
    try:
        fitness = pickle.loads(fitness) if isinstance(fitness, bytes) else fitness
    except Exception:  # noqa: BLE001 - told to whoever asks
        broken = traceback.format_exc()
    pipe.send("ready")
    while True:
        try:
            seed = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (math.nan, broken) if broken else (seeded(fitness, row, seed), None)
        except Exception:  # noqa: BLE001 - whatever a fitness raises concerns one member only
            answer = math.nan, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)
