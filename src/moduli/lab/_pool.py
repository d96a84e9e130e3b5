"""Runs in processes of their own, several at a time, and none of them able to stop the others."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ._reasons import Reason
from ._tasks import Task

__all__ = ["Pool"]

STARTUP = 300.0
"""How many seconds the server has to import what runs need."""


def _end(number: int, _: Any) -> None:
    sys.exit(128 + number)


class Pool:
    """So many runs at a time, each in a process of its own.

    Args:
        workers: How many at a time.
        preload: Modules that are imported before the first run.
    """

    def __init__(self, workers: int, preload: Sequence[str] = ()) -> None:
        if not hasattr(os, "fork"):
            raise OSError("runs in processes of their own need fork, which this system does not have: use workers=0")
        self.workers = workers
        self.preload = tuple(preload)
        self.folder = tempfile.TemporaryDirectory(prefix="moduli-race-")
        self.server: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.pending = b""
        self.began = 0.0
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Pool:
        # Being asked to end is no reason to leave processes and files behind.
        with contextlib.suppress(ValueError):  # only the main thread is asked
            for name in ("SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                    self.handlers[number] = signal.signal(number, _end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every run that is under way, and the server."""
        self._stop()
        self.folder.cleanup()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers.clear()

    def _stop(self) -> None:
        if self.server is None:
            return
        server, self.server = self.server, None
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            # One that still imports has no children to end, and would only notice in seconds.
            server.wait(5 if self.ready else 0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from moduli.lab._server import serve; serve()"
        )
        environment = dict(os.environ)
        # numpy's libraries start their threads when they are imported, and threads do not survive a fork.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = "1"
        self.pending, self.ready, self.began = b"", False, time.monotonic()
        return subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), *self.preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the race, which then ends its runs in its own way
        )

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Do all tasks. Yields (number of the task, message).

        A message with ``"reason"`` is the record of a finished run. One with ``"evaluations"`` only tells how far it is,
        one with ``"pid"`` that it began. An empty one, with number -1, comes when nothing happened for a while.
        """
        waiting = list(range(len(tasks)))[::-1]
        running: dict[int, dict[str, Any]] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                number = waiting.pop()
                running[number] = {}
                self._order(number, tasks[number])
            lines = self._read(0.25)
            late = not self.ready and time.monotonic() - self.began > STARTUP
            if lines is None or late:
                # The server itself died, or hangs on an import: what ran in it has no other witness.
                self._stop()
                what = f"did not start within {STARTUP:g} seconds" if late else "died"
                for number in list(running):
                    last = running.pop(number)
                    yield (
                        number,
                        self._record(
                            number, last, Reason.HUNG if late else Reason.KILLED, f"the server of processes {what}"
                        ),
                    )
                continue
            if not lines:
                yield -1, {}
            for message in lines:
                if "ready" in message:
                    self.ready = True
                    continue
                number = message["id"]
                if "status" in message:
                    yield number, self._ended(number, running.pop(number), message["status"])
                else:
                    running[number] |= message
                    yield number, message

    def _order(self, number: int, task: Task) -> None:
        if self.server is None:
            self.server = self._start()
        base = Path(self.folder.name) / str(number)
        base.with_suffix(".task").write_bytes(task.encode())
        order = {key: str(base.with_suffix(f".{key}")) for key in ("task", "out", "err")}
        line = json.dumps({"id": number, "seconds": task.seconds, **order}).encode() + b"\n"
        if self.server.stdin is None:
            raise OSError("the server of processes has no input")
        try:
            self.server.stdin.write(line)
            self.server.stdin.flush()
        except BrokenPipeError:
            return  # it died; `run` sees its output end and tells

    def _read(self, timeout: float) -> list[dict[str, Any]] | None:
        if self.server is None or self.server.stdout is None:
            return None
        descriptor = self.server.stdout.fileno()
        if not select.select([descriptor], [], [], timeout)[0]:
            return []
        data = os.read(descriptor, 65536)
        if not data:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _ended(self, number: int, last: dict[str, Any], status: int) -> dict[str, Any]:
        out = Path(self.folder.name) / f"{number}.out"
        if status == 0 and out.exists():
            record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return record
        if status == -signal.SIGALRM:
            return self._record(number, last, Reason.HUNG, "it did not come back within its time")
        if status < 0:
            return self._record(number, last, Reason.KILLED, f"by {signal.Signals(-status).name}")
        error = self._error(number).strip()
        detail = error.splitlines()[-1] if error else f"it ended with code {status}"
        return self._record(number, last, Reason.CRASHED, detail)

    def _error(self, number: int) -> str:
        path = Path(self.folder.name) / f"{number}.err"
        return path.read_text(encoding="utf-8", errors="replace")[-8000:] if path.exists() else ""

    def _record(self, number: int, last: dict[str, Any], reason: Reason, detail: str) -> dict[str, Any]:
        """The record of a run that could not write its own: with what it told on its way."""
        evaluations, value = last.get("evaluations", 0), last.get("value")
        return {
            "reason": str(reason),
            "detail": detail,
            "traceback": self._error(number),
            "value": value,
            "evaluations": evaluations,
            "gradients": None,
            "steps": None,
            "seconds": None,
            "digest": None,
            "history": [],
        }
