"""The process that processes come from.

It imports everything once and then, for each line on its standard input, forks a child that does one run. So every run
has a process of its own, begins from the same state whatever ran before, and costs milliseconds to start. Nothing is ever
computed in the server itself: no thread of torch or OpenMP exists when it forks.

A line in is ``{"id", "task", "out", "err", "seconds"}``, where `task` is a file to read; lines out are ``{"id", "pid"}``,
``{"id", "evaluations", "value"}`` and, when a child ended, ``{"id", "status"}``. A line is shorter than what a pipe writes at
once, so those of several children never mix. When the input ends, because its owner closed it or died, so do all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

__all__ = ["serve"]

# Beyond the time that a run gives itself: for one that never comes back to ask what time it is.
GRACE = 3.0


def serve() -> None:
    """Fork a child for each line, tell when children end, and end with the input."""
    _prepare()
    children: dict[int, int] = {}
    # A child that ends writes to this pipe through the handler, which wakes the loop below.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A race that was interrupted closes both pipes at once: whichever is noticed first, all is over.
    with contextlib.suppress(BrokenPipeError):
        _tell({"ready": os.getpid()})
        _loop(children, wake_read)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _loop(children: dict[int, int], wake: int) -> None:
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(children)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(order)
                children[pid] = order["id"]
                _tell({"id": order["id"], "pid": pid})


def _prepare() -> None:
    """Do once what every child would do at its beginning. Nothing is computed with torch."""
    import torch

    from .. import kernels
    from . import _tasks, catalogue  # noqa: F401 - what children need is imported before they exist

    # torch's own optimizers import its compiler when they are made; that second would be counted in every run.
    torch.compiler.disable(_prepare)  # type: ignore[no-untyped-call]
    for name in ("moduli.m", "moduli.presets", "moduli.optim", "moduli.population", *sys.argv[1:]):
        _import(name)
    catalogue.entries()
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")  # what is wrong with compiler or settings is said by whoever needs them
        kernels.explain()
    # A collection in a child would write into every object there is, and so copy all of this process's memory.
    gc.collect()
    gc.freeze()


def _import(name: str) -> None:
    try:
        __import__(name)
    except ImportError:
        return  # whoever needs it says so, in the row of its run


def _reap(children: dict[int, int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _tell({"id": children.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def _tell(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _child(order: dict[str, Any]) -> None:
    """Do one run and never return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The alarm kills, wherever the child is: no handler, no return to Python needed.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, order["seconds"] + GRACE)
        error = os.open(order["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        report = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(error, 1)
        os.dup2(error, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        faulthandler.enable(file=sys.stderr)
        code = _work(order, report)
    except BaseException:  # noqa: BLE001 - what comes out here is read from the error file
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work(order: dict[str, Any], report: int) -> int:
    from ._tasks import execute

    def progress(evaluations: int, value: float) -> None:
        known = value if math.isfinite(value) else None
        os.write(report, json.dumps({"id": order["id"], "evaluations": evaluations, "value": known}).encode() + b"\n")

    task = pickle.loads(Path(order["task"]).read_bytes())
    record = execute(task, progress)
    out = Path(order["out"])
    part = out.with_suffix(".part")
    part.write_text(json.dumps(record), encoding="utf-8")
    part.rename(out)
    return 0


if __name__ == "__main__":
    serve()
