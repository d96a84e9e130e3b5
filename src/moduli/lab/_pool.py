"""Runs in processes of their own, several at a time, and none of them able to stop the others."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ._meter import RunReason
from ._tasks import Task, record_without_run

STARTUP = 300.0
"""How many seconds the server has to import what runs need."""


class RunPool:
    """So many runs at a time, each in a process of its own.

    The processes are forks of a server (`moduli.lab._server`), which ends them and itself when this process closes its
    connection or dies.

    Args:
        workers: How many at a time.
        preload: Modules that are imported before the first run.
    """

    def __init__(self, workers: int, preload: Sequence[str] = ()) -> None:
        if not hasattr(os, "fork"):
            raise OSError("runs in processes of their own need fork, which this system does not have: use workers=0")
        self.workers = workers
        self.preload = tuple(preload)
        self.server: subprocess.Popen[bytes] | None = None
        self.ready = False

    def close(self) -> None:
        """End every run that is under way, and the server."""
        if self.server is None:
            return
        server, self.server = self.server, None
        self.connection.close()
        try:
            # One that still imports has no children to end, and would only notice in seconds.
            server.wait(5 if self.ready else 0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _start(self) -> None:
        self.connection, other = multiprocessing.Pipe()
        start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from moduli.lab._server import serve; serve()"
        arguments = [json.dumps(sys.path), str(other.fileno()), str(STARTUP), *self.preload]
        # numpy's libraries start their threads when they are imported, and threads do not survive a fork.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.server = subprocess.Popen(
            [sys.executable, "-c", start, *arguments],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **single},
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C is for the race, which then ends its runs in its own way
        )
        other.close()
        self.ready, self.began = False, time.monotonic()

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Do all tasks. Yields (number of the task, message).

        A message with ``"reason"`` is the record of a finished run. One with ``"evaluations"`` only tells how far it is,
        one with ``"pid"`` that it began. An empty one, with number -1, comes when nothing happened for a while.
        """
        waiting = list(range(len(tasks)))[::-1]
        running: dict[int, dict[str, Any]] = {}
        while waiting or running:
            if self.server is None:
                self._start()
            while self.ready and waiting and len(running) < self.workers:
                number = waiting.pop()
                running[number] = {}
                self._order(number, tasks[number])
            try:
                arrived = self.connection.recv() if self.connection.poll(0.25) else None
                reason, fact = RunReason.KILLED, ""
            except (EOFError, OSError):
                reason, fact = RunReason.KILLED, "the server of processes died"
            if not self.ready and time.monotonic() - self.began > STARTUP:
                reason, fact = RunReason.HUNG, f"the server of processes did not start within {STARTUP:g} seconds"
            if fact:
                # What ran in it has no other witness. One that could not begin would not the next time either.
                running |= {} if self.ready else {number: {} for number in waiting}
                waiting = waiting if self.ready else []
                self.close()
                yield from ((number, record_without_run(last, reason, fact)) for number, last in running.items())
                running.clear()
                continue
            if arrived is None:
                yield -1, {}
                continue
            number, message = arrived
            if number < 0:
                self.ready = True
                continue
            if "reason" in message:
                del running[number]
            else:
                running[number] |= message
            yield number, message

    def _order(self, number: int, task: Task) -> None:
        try:
            self.connection.send((number, task.seconds, task.encode()))
        except OSError:
            return  # the server died; `run` sees that next
