"""Runs in other processes, several at a time, and none of them able to stop the others.

A worker is a process that imports once what runs need, and then does one run after another. A run that kills its process, or
that hangs, ends its worker, and another takes its place.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .. import kernels
from . import catalogue
from ._contender import Contender, contender
from ._reference import load_problem
from ._run import RunReason, drop_infinite, run
from .problems import Problem, get

STARTUP = 300.0
"""How many seconds a worker has to import what runs need."""
# Beyond the time that a run gives itself: for one that never comes back to ask what time it is.
GRACE = 3.0


@dataclass(frozen=True)
class Task:
    """One run to do.

    Attributes:
        problem: A name, ``FILE.py:name``, or a problem.
        contender: A chain as text, or a contender.
        seed: The seed.
        budget: How many evaluations; None for what the problem says.
        seconds: How long.
        threads: How many threads torch has.
        target: The value that ends it; None for the optimum of the problem.
    """

    problem: str | Problem
    contender: str | Contender
    seed: int
    budget: int | None
    seconds: float
    threads: int
    target: float | None = None

    def encode(self) -> bytes:
        """As bytes, for a process that this one starts, and for no other."""
        try:
            data = pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"{self._refusal} ({error})") from error
        if b"__main__" in data:
            raise TypeError(f"{self._refusal}: it is defined in the program itself, which other processes do not know")
        return data

    @property
    def _refusal(self) -> str:
        problem = self.problem if isinstance(self.problem, str) else self.problem.name
        label = self.contender if isinstance(self.contender, str) else self.contender.label
        remedy = "define it in a file that can be imported, or race in this process with workers=0"
        return f"{label} on {problem} cannot be sent to another process; {remedy}"


def resolve(problem: str | Problem) -> Problem:
    """The problem itself."""
    if isinstance(problem, Problem):
        return problem
    return load_problem(problem) if ".py:" in problem or problem.endswith(".py") else get(problem)


def execute(task: Task, progress: Callable[[int, float], None] | None = None) -> dict[str, Any]:
    """Do one run, here."""
    problem = resolve(task.problem)
    budget = problem.budget if task.budget is None else task.budget
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(task.threads)
    try:
        runner = contender(task.contender) if isinstance(task.contender, str) else task.contender
        return run(
            problem, runner, task.seed, budget=budget, seconds=task.seconds, target=task.target, progress=progress
        )
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(state)


class RunPool:
    """So many runs at a time, each in another process; none survives this one.

    Args:
        workers: How many at a time.
        preload: Modules that are imported before the first run.
    """

    def __init__(self, workers: int, preload: Sequence[str] = ()) -> None:
        self.workers, self.preload = workers, tuple(preload)
        self.team: list[_RunWorker] = []

    def close(self) -> None:
        """End every run that is under way, and the workers."""
        for worker in self.team:
            worker.process.kill()
            worker.bury()
        self.team = []

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Do all tasks. Yields (number of the task, message).

        A message with ``"reason"`` is the record of a finished run. One with ``"evaluations"`` only tells how far it is,
        one with ``"pid"`` that it began. An empty one, with number -1, comes when nothing happened for a while.
        """
        waiting = list(range(len(tasks)))[::-1]
        while waiting or any(worker.number is not None for worker in self.team):
            idle = [worker for worker in self.team if worker.number is None]
            while len(idle) < len(waiting) and len(self.team) < self.workers:
                idle.append(_RunWorker(self.preload))
                self.team.append(idle[-1])
            for worker in idle[: len(waiting)]:
                number = waiting.pop()
                worker.order(number, tasks[number])
                yield number, {"pid": worker.process.pid}
            ready = wait([worker.connection for worker in self.team], 0.25)
            if not ready:
                yield -1, {}
            for worker in [each for each in self.team if each.connection in ready]:
                numbers, message = [worker.number], worker.receive()
                if message is None:
                    self.team.remove(worker)
                    message = worker.bury()
                    if not worker.began:  # what could not begin would not the next time either
                        numbers += waiting[::-1]
                        waiting.clear()
                yield from ((number, message) for number in numbers if message and number is not None)


class _RunWorker:
    """A process, the pipe that it is ordered and tells by, and the file that its errors go to."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.number: int | None = None
        self.last: dict[str, Any] = {}
        self.began = False
        # Without a name: nothing is left, whatever ends this process.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `bury` closes it
        self.connection, other = multiprocessing.Pipe()
        start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from moduli.lab._pool import work; work()"
        arguments = [json.dumps(sys.path), str(other.fileno()), str(STARTUP), *preload]
        # numpy's libraries would start as many threads as there are cores.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            env={**os.environ, **single},
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C is for the race, which then ends its runs in its own way
        )
        other.close()

    def order(self, number: int, task: Task) -> None:
        """Have a run done."""
        self.number, self.last = number, {}
        self.errors.seek(0)
        self.errors.truncate()
        with contextlib.suppress(OSError):  # it died; `receive` sees that next
            self.connection.send((task.seconds, task.encode()))

    def receive(self) -> dict[str, Any] | None:
        """What it tells; nothing when it has only begun, None when it has died."""
        try:
            message: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            return None
        self.began = True
        self.last |= message
        if "reason" in message:
            self.number = None
        return message

    def bury(self) -> dict[str, Any]:
        """End it; the record of the run that died with it, with what it told on its way."""
        self.connection.close()
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:  # a run may have closed the pipe, and go on
            self.process.kill()
            code = self.process.wait()
        with self.errors:
            self.errors.seek(0)
            trace = self.errors.read().decode(errors="replace")[-8000:]
        reason, detail = RunReason.CRASHED, (trace.strip().splitlines() or [f"it ended with code {code}"])[-1]
        if code == -signal.SIGALRM:
            late = "it did not come back within its time"
            reason, detail = RunReason.HUNG, late if self.began else f"it did not start within {STARTUP:g} seconds"
        elif code < 0:
            reason, detail = RunReason.KILLED, f"by {signal.Signals(-code).name}"
        unknown = dict.fromkeys(("gradients", "steps", "seconds", "digest"))
        known = {"value": self.last.get("value"), "evaluations": self.last.get("evaluations", 0), "history": []}
        return {"reason": str(reason), "detail": detail, "traceback": trace, **known, **unknown}


def work() -> None:
    """Import once what runs need, do the tasks that arrive, and end with their owner."""
    _, _, descriptor, startup, *preload = sys.argv
    # What hangs, in C or in an import, is ended by the system.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(startup))
    faulthandler.enable()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _prepare(preload)
    owner: Connection[Any, Any] = Connection(int(descriptor))

    def tell(evaluations: int, value: float) -> None:
        owner.send({"evaluations": evaluations, "value": drop_infinite(value)})

    owner.send({})
    with contextlib.suppress(EOFError, ConnectionError):  # the owner is gone
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds, task = owner.recv()
            signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
            owner.send(execute(pickle.loads(task), tell))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _prepare(preload: Sequence[str]) -> None:
    """Do once what every run would do at its beginning, and count among its seconds."""
    if "torch.optim" in preload:
        torch.compiler.disable(_prepare)  # type: ignore[no-untyped-call]  # it imports torch's compiler, as they do
    for name in preload:
        with contextlib.suppress(ImportError):  # the run that needs it says so
            __import__(name)
    catalogue.entries()
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")  # what is wrong with compiler or settings is told by the run that needs them
        kernels.explain()
