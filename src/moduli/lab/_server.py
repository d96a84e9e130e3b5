"""The process that the processes of a race come from.

It imports everything once and then forks a child for each order. So every run has a process of its own, begins from the same state
whatever ran before, and costs milliseconds to start. Nothing is ever computed in the server itself: no thread of torch or
OpenMP exists when it forks.

An order is ``(number, seconds, task)`` with the task as bytes, which only the child reads: they may run code of the user. Answers
are ``(number, message)`` with the messages of `RunPool.run`; the first one, with number -1, says that all is imported. When the
connection ends, because its owner closed it or died, so do all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from ._meter import RunReason, drop_infinite

# Beyond the time that a run gives itself: for one that never comes back to ask what time it is.
GRACE = 3.0


def serve() -> None:
    """Fork a child for each order, tell what becomes of it, and end with the connection."""
    _, _, descriptor, startup, *preload = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An import that hangs ends here also when the owner, who would end it, is gone.
    signal.setitimer(signal.ITIMER_REAL, float(startup) + 1)
    _prepare(preload)
    signal.setitimer(signal.ITIMER_REAL, 0)
    owner: Connection[Any, Any] = Connection(int(descriptor))
    runs: list[_Child] = []
    try:
        owner.send((-1, {}))
        while True:
            _serve_once(owner, runs)
    except (EOFError, ConnectionError):
        return  # the owner is gone
    finally:
        for run in runs:
            run.process.kill()


def _serve_once(owner: Connection[Any, Any], runs: list[_Child]) -> None:
    sources = {run.reader.fileno(): run for run in runs}
    left = min((run.deadline for run in runs), default=math.inf) - time.monotonic()
    ready = wait([owner.fileno(), *sources], None if math.isinf(left) else max(0.0, left))
    for run in [sources[each] for each in ready if each in sources]:
        message = run.receive()
        if message is None:
            runs.remove(run)
            message = run.finish()
        if message:
            owner.send((run.number, message))
    for run in runs:
        if time.monotonic() > run.deadline:
            run.late = True
            run.process.kill()
            run.deadline = math.inf  # its pipe closes now
    if owner.fileno() in ready:
        number, seconds, task = owner.recv()
        run = _Child(number, seconds, task, owner)
        runs.append(run)
        owner.send((number, {"pid": run.process.pid}))


class _Child:
    """A run under way: its process, the pipe that it tells by, and the file that its errors go to."""

    def __init__(self, number: int, seconds: float, task: bytes, owner: Connection[Any, Any]) -> None:
        self.number, self.deadline, self.late = number, time.monotonic() + seconds + GRACE, False
        self.last: dict[str, Any] = {}
        # Without a name: nothing is left, whatever ends this process.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `finish` closes it
        self.reader, writer = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(task, writer, self.errors, (owner, self.reader)))
        self.process.start()
        writer.close()

    def receive(self) -> dict[str, Any] | None:
        """What it tells; nothing of its record, which counts when the process has ended; None when its pipe has closed."""
        try:
            message: dict[str, Any] = self.reader.recv()
        except EOFError:
            return None
        self.last |= message
        return {} if "reason" in message else message

    def finish(self) -> dict[str, Any]:
        """The record of the run, when its pipe has closed."""
        self.process.join(GRACE)  # a run may have closed the pipe, and go on
        self.process.kill()
        self.process.join()
        self.reader.close()
        with self.errors:
            self.errors.seek(0)
            trace = self.errors.read().decode(errors="replace")[-8000:]
        code = self.process.exitcode or 0
        if code == 0 and "reason" in self.last:
            return self.last
        from ._tasks import record_without_run

        if self.late:
            return record_without_run(self.last, RunReason.HUNG, "it did not come back within its time", trace)
        if code < 0:
            return record_without_run(self.last, RunReason.KILLED, f"by {signal.Signals(-code).name}", trace)
        detail = trace.strip().splitlines()[-1] if trace.strip() else f"it ended with code {code}"
        return record_without_run(self.last, RunReason.CRASHED, detail, trace)


def _work(task: bytes, writer: Connection[Any, Any], errors: IO[bytes], others: Sequence[Connection[Any, Any]]) -> None:
    """Do one run, in the child."""
    for connection in others:
        connection.close()
    os.dup2(errors.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.enable(file=sys.stderr)
    from ._tasks import execute

    def tell(evaluations: int, value: float) -> None:
        writer.send({"evaluations": evaluations, "value": drop_infinite(value)})

    writer.send(execute(pickle.loads(task), tell))


def _prepare(preload: Sequence[str]) -> None:
    """Do once what every child would do at its beginning. Nothing is computed with torch."""
    import torch

    from .. import kernels
    from . import _tasks, catalogue  # noqa: F401 - what children need is imported before they exist

    if "torch.optim" in preload:
        # They import torch's compiler when they are made; that second would be counted in every run.
        torch.compiler.disable(_prepare)  # type: ignore[no-untyped-call]
    for name in ("moduli.m", "moduli.presets", "moduli.optim", "moduli.population", *preload):
        with contextlib.suppress(ImportError):  # the run that needs it says so
            __import__(name)
    catalogue.entries()
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")  # what is wrong with compiler or settings is told by the run that needs them
        kernels.explain()
    # A collection in a child would write into every object there is, and so copy all of this process's memory.
    gc.collect()
    gc.freeze()
