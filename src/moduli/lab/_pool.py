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
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ._contender import Contender, contender
from ._reference import load_problem
from ._run import RunReason, drop_infinite, run
from .problems import Problem

Task = tuple[str | Problem, str | Contender, int]

STARTUP = 300.0
"""How many seconds a worker has to import what runs need."""
# Beyond the time that a run gives itself: for one that never comes back to ask what time it is.
GRACE = 3.0


def execute(
    problem: str | Problem,
    runner: str | Contender,
    seed: int,
    limits: dict[str, Any],
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Do one run, here.

    Args:
        problem: A name, ``FILE.py:name``, or a problem.
        runner: A chain as text, or a contender.
        seed: The seed.
        limits: ``budget`` (None for what the problem says), ``seconds``, ``target``, and ``threads`` of torch.
        progress: Called now and then with (evaluations, best value).
    """
    course = load_problem(problem) if isinstance(problem, str) else problem
    budget = course.budget if limits["budget"] is None else limits["budget"]
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(limits["threads"])
    try:
        ends = {"seconds": limits["seconds"], "target": limits["target"], "progress": progress}
        return run(course, contender(runner), seed, budget=budget, **ends)
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(state)


def _encode(task: Task, limits: dict[str, Any]) -> bytes:
    """As bytes, for a process that this one starts, and for no other."""
    problem, runner, _ = task
    try:
        data = pickle.dumps((*task, limits))
        if b"__main__" in data:
            raise TypeError("it is defined in the program itself, which other processes do not know")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"{getattr(runner, 'label', runner)} on {getattr(problem, 'name', problem)}"
        remedy = "define it in a file that can be imported, or race in this process with workers=0"
        raise TypeError(f"{what} cannot be sent to another process; {remedy} ({error})") from error
    return data


def execute_all(
    tasks: Sequence[Task], limits: dict[str, Any], workers: int, chains: Sequence[str] = ()
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Do all tasks, so many at a time, each in another process; none of them survives this generator.

    Args:
        tasks: The runs: problem, contender and seed.
        limits: Of each run, as for `execute`.
        workers: How many at a time; 0 does them in this process, one after another.
        chains: What workers try before the first run: what they import and compile is not among the seconds of a run.

    Yields:
        The number of a task, and a message. One with ``"reason"`` is the record of a finished run. One with ``"evaluations"``
        only tells how far it is, one with ``"pid"`` that it began.
    """
    if workers == 0:
        for number, task in enumerate(tasks):
            yield number, {"pid": os.getpid()}
            yield number, execute(*task, limits)
        return
    orders = [_encode(task, limits) for task in tasks]  # what cannot be sent is refused before anything runs
    waiting = list(range(len(tasks)))[::-1]
    team: list[_RunWorker] = []
    try:
        while waiting or any(worker.number is not None for worker in team):
            idle = [worker for worker in team if worker.number is None]
            while len(idle) < len(waiting) and len(team) < workers:
                idle.append(_RunWorker(chains, limits["seconds"]))
                team.append(idle[-1])
            for worker in idle[: len(waiting)]:
                number = waiting.pop()
                worker.order(number, orders[number])
                yield number, {"pid": worker.process.pid}
            ready = wait([worker.connection for worker in team])
            for worker in [each for each in team if each.connection in ready]:
                numbers, message = [worker.number], worker.receive()
                if message is None:
                    team.remove(worker)
                    message = worker.bury()
                    if not worker.began:  # what could not begin would not the next time either
                        numbers += waiting[::-1]
                        waiting.clear()
                yield from ((number, message) for number in numbers if message and number is not None)
    finally:
        for worker in team:
            worker.process.kill()
            worker.bury()


class _RunWorker:
    """A process, the pipe that it is ordered and tells by, and the file that its errors go to."""

    def __init__(self, chains: Sequence[str], seconds: float) -> None:
        self.number: int | None = None
        self.last: dict[str, Any] = {}
        self.began = False
        # Without a name: nothing is left, whatever ends this process.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `bury` closes it
        self.connection, other = multiprocessing.Pipe()
        start = "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
        # What hangs, in C or in an import, is ended by the system.
        start += "signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2])); from moduli.lab._pool import work; work()"
        arguments = [json.dumps(sys.path), str(STARTUP), str(other.fileno()), str(seconds), *chains]
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

    def order(self, number: int, task: bytes) -> None:
        """Have a run done."""
        self.number, self.last = number, {}
        self.errors.seek(0)
        self.errors.truncate()
        with contextlib.suppress(OSError):  # it died; `receive` sees that next
            self.connection.send_bytes(task)

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
    _, _, _, descriptor, seconds, *chains = sys.argv
    faulthandler.enable()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for chain in chains:
        execute("sphere-10", chain, 0, {"budget": 1, "seconds": STARTUP, "threads": 1, "target": None})
    owner: Connection[Any, Any] = Connection(int(descriptor))

    def tell(evaluations: int, value: float) -> None:
        owner.send({"evaluations": evaluations, "value": drop_infinite(value)})

    owner.send({})
    with contextlib.suppress(EOFError, ConnectionError):  # the owner is gone
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            task = owner.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, float(seconds) + GRACE)
            problem, runner, seed, limits = pickle.loads(task)
            owner.send(execute(problem, runner, seed, limits, tell))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
