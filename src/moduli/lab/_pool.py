"""Runs in other processes, several at a time, and none of them able to stop the others.

A worker is a process that imports once what runs need, and then does one run after another. A run that kills its process, or
that hangs, ends its worker, and another takes its place. A run hangs if its process has used more processor time than it may, or
sleeps as long without using any; a process that waits for its turn on a busy machine does neither.

A job is a run, or several that are tried together, as the members of a population; where that can't be done, each is a job.
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
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..evolve import Ray
from ._contender import Contender, contender
from ._process import ProcessWatch
from ._reference import load_problem
from ._run import WAITING, RunReason, drop_infinite, run
from ._stacked_run import CannotStackError, run_stacked
from .problems import Problem

Task = tuple[str | Problem, str | Contender, int]
Job = tuple[int, ...]
Messages = Generator[tuple[int, dict[str, Any]], None, None]

STARTUP = 300.0
"""How many seconds a worker has to import what runs need."""
WARMUP = 60.0
"""How many seconds a worker has to try one chain, before it is ended and another one starts without that chain."""
# Beyond the time that a run gives itself: for one that never comes back to ask what time it is.
GRACE = 3.0
# Seconds between two looks at workers that say nothing.
LOOK_EVERY = 0.5


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
    (record,) = execute_job([(problem, runner, seed)], limits, progress)
    return record


def execute_job(
    tasks: Sequence[Task], limits: dict[str, Any], progress: Callable[[int, float], None] | None = None
) -> list[dict[str, Any]]:
    """Do one run, or several of one problem together, here.

    Args:
        tasks: The runs.
        limits: As for `execute`.
        progress: Called now and then with (evaluations, best value).

    Raises:
        CannotStackError: If several runs can't be done together.
    """
    problem, runner, seed = tasks[0]
    course = load_problem(problem) if isinstance(problem, str) else problem
    budget = course.budget if limits["budget"] is None else limits["budget"]
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(limits["threads"])
    ends = {"seconds": limits["seconds"], "target": limits["target"], "progress": progress}
    try:
        if len(tasks) == 1:
            return [run(course, contender(runner), seed, budget=budget, **ends)]
        field = [contender(runner) for _, runner, _ in tasks]
        return run_stacked(course, field, [seed for *_, seed in tasks], budget=budget, **ends)
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(state)


def _encode(tasks: Sequence[Task], limits: dict[str, Any]) -> bytes:
    """Return a job as bytes, for a process that this one starts, and for no other."""
    problem, runner, _ = tasks[0]
    try:
        data = pickle.dumps((list(tasks), limits))
        if b"__main__" in data:
            raise TypeError("it is defined in the program itself, which other processes do not know")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"{getattr(runner, 'label', runner)} on {getattr(problem, 'name', problem)}"
        remedy = "define it in a file that can be imported, or race in this process with workers=0"
        raise TypeError(f"{what} cannot be sent to another process; {remedy} ({error})") from error
    return data


def _list_jobs(count: int, groups: Sequence[Sequence[int]]) -> list[Job]:
    """Return the groups, and every other run as a job of its own, by their first runs."""
    grouped = {number for group in groups for number in group}
    return sorted([*map(tuple, groups), *((number,) for number in range(count) if number not in grouped)])


def execute_all(
    tasks: Sequence[Task],
    limits: dict[str, Any],
    workers: int,
    chains: Sequence[str] = (),
    groups: Sequence[Sequence[int]] = (),
    executor: Any = None,
) -> Messages:
    """Do all tasks, so many at a time, each in another process; none of them survives this generator.

    Args:
        tasks: The runs: problem, contender and seed.
        limits: Of each run, as for `execute`.
        workers: How many at a time; 0 does them in this process, one after another.
        chains: What workers try before the first run: what they import and compile is not among the seconds of a run.
        groups: Numbers of tasks that are tried together.
        executor: Who does them instead: an executor of `concurrent.futures` with processes, or `evolve.Ray`.

    Yields:
        The number of a task, and a message. One with ``"reason"`` is the record of a finished run. One with ``"evaluations"``
        only tells how far it is, one with ``"pid"`` that it began.
    """
    jobs = _list_jobs(len(tasks), groups)
    if executor is not None:
        yield from _execute_by(executor, tasks, limits, jobs)
    elif workers == 0:
        for job in jobs:
            yield from _execute_here(tasks, limits, job)
    else:
        yield from _execute_elsewhere(tasks, limits, jobs, workers, chains)


def _execute_here(tasks: Sequence[Task], limits: dict[str, Any], job: Job) -> Messages:
    yield from ((number, {"pid": os.getpid()}) for number in job)
    try:
        records = execute_job([tasks[number] for number in job], limits)
    except CannotStackError:
        records = [execute(*tasks[number], limits) for number in job]
    yield from zip(job, records, strict=True)


def _execute_elsewhere(
    tasks: Sequence[Task], limits: dict[str, Any], jobs: Sequence[Job], workers: int, chains: Sequence[str]
) -> Messages:
    for number, _ in enumerate(tasks):  # what cannot be sent is refused before anything runs
        _encode([tasks[number]], limits)
    waiting, chains = list(jobs)[::-1], list(chains)
    team: list[_RunWorker] = []
    try:
        while waiting or any(worker.job for worker in team):
            idle = [worker for worker in team if not worker.job]
            while len(idle) < len(waiting) and len(team) < workers:
                idle.append(_RunWorker(chains, limits["seconds"]))
                team.append(idle[-1])
            for worker in idle[: len(waiting)]:
                job = waiting.pop()
                worker.order(job, _encode([tasks[number] for number in job], limits))
                yield from ((number, {"pid": worker.process.pid}) for number in job)
            ready = wait([worker.connection for worker in team], LOOK_EVERY)
            for worker in list(team):
                if worker.connection not in ready:
                    worker.end_if_stuck()
                    continue
                job, message = worker.job, worker.receive()
                if message is None:
                    team.remove(worker)
                    message = worker.bury()
                    if worker.tried is not None:  # its own runs will say why; those of others are done without it
                        chains = [chain for chain in chains if chain != worker.tried]
                        waiting.append(job)
                        continue
                    if not worker.began:  # what could not begin would not the next time either
                        job += tuple(number for each in reversed(waiting) for number in each)
                        waiting.clear()
                    elif len(job) > 1:  # one of its runs; alone, each is found out
                        waiting += [(number,) for number in reversed(job)]
                        continue
                    yield from ((number, message) for number in job)
                elif "split" in message:
                    waiting += [(number,) for number in reversed(job)]
                elif "records" in message:
                    yield from zip(job, message["records"], strict=True)
                elif message:
                    yield from ((number, message) for number in job)
    finally:
        for worker in team:
            worker.process.kill()
            worker.bury()


def _execute_by(executor: Any, tasks: Sequence[Task], limits: dict[str, Any], jobs: Sequence[Job]) -> Messages:
    """Have an executor do all jobs; a job that it fails to do has crashed."""
    submit = _find_submit(executor)
    waiting = {submit(_encode([tasks[number] for number in job], limits)): job for job in jobs}
    yield from ((number, {"pid": os.getpid()}) for job in jobs for number in job)
    while waiting:
        for future in wait_for_futures(list(waiting), return_when=FIRST_COMPLETED).done:
            job = waiting.pop(future)
            try:
                message = future.result()
            except Exception as error:  # noqa: BLE001 - whatever an executor raises is the result of the run
                message = {"records": [_describe_failure(f"{type(error).__name__}: {error}")]} if len(job) == 1 else {}
            if "records" in message:
                yield from zip(job, message["records"], strict=True)
            else:
                waiting |= {submit(_encode([tasks[number]], limits)): (number,) for number in job}


def _find_submit(executor: Any) -> Callable[[bytes], Future[dict[str, Any]]]:
    """Return a function that has a job done and returns its future."""
    if isinstance(executor, Ray):
        remote = import_module("ray").remote(**{"num_cpus": 1, **executor.options})(do_job)
        return lambda order: remote.remote(order).future()
    if isinstance(executor, ThreadPoolExecutor) or not callable(getattr(executor, "submit", None)):
        fact = f"executor is a {type(executor).__name__}"
        remedy = "give one of concurrent.futures that has processes, or evolve.Ray(); workers= has a pool of its own"
        raise TypeError(f"{fact}; runs need processes, because each has its own random numbers: {remedy}")
    return lambda order: executor.submit(do_job, order)


def do_job(order: bytes, progress: Callable[[int, float], None] | None = None) -> dict[str, Any]:
    """Do a job that arrives as bytes.

    Args:
        order: What `execute_all` encoded.
        progress: Called now and then with (evaluations, best value).

    Returns:
        The records of its runs under ``"records"``; or, under ``"split"``, why they can't be done together.
    """
    tasks, limits = pickle.loads(order)
    try:
        return {"records": execute_job(tasks, limits, progress)}
    except CannotStackError as error:
        return {"split": str(error)}


def _describe_failure(detail: str, reason: RunReason = RunReason.CRASHED, trace: str = "") -> dict[str, Any]:
    """Return the record of a run of which nothing came back."""
    unknown = dict.fromkeys(("gradients", "steps", "seconds", "digest"))
    ends = {"reason": str(reason), "detail": detail, "traceback": trace}
    return {**ends, "value": None, "evaluations": 0, "history": [], **unknown}


class _RunWorker:
    """A process, the pipe that it is ordered and tells by, and the file that its errors go to."""

    def __init__(self, chains: Sequence[str], seconds: float) -> None:
        self.seconds = seconds
        self.job: Job = ()
        self.stuck = ""
        self.last: dict[str, Any] = {}
        self.began = False
        self.chains = chains
        #: The chain that it tries before it begins.
        self.tried: str | None = None
        # Without a name: nothing is left, whatever ends this process.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `bury` closes it
        self.connection, other = multiprocessing.Pipe()
        start = "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
        # What hangs, in C or in an import, is ended by the system.
        start += "signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2])); from moduli.lab._pool import work; work()"
        arguments = [json.dumps(sys.path), str(STARTUP), str(other.fileno()), str(WARMUP), *chains]
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
        self.watch = ProcessWatch(self.process.pid, STARTUP)

    def order(self, job: Job, task: bytes) -> None:
        """Have a job done."""
        self.job, self.last = job, {}
        self._watch_job()
        self.errors.seek(0)
        self.errors.truncate()
        with contextlib.suppress(OSError):  # it died; `receive` sees that next
            self.connection.send_bytes(task)

    def _watch_job(self) -> None:
        self.watch = ProcessWatch(self.process.pid, (self.seconds + GRACE) * len(self.job))

    def receive(self) -> dict[str, Any] | None:
        """Return what it tells; nothing when it has only begun, None when it has died."""
        try:
            message: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            return None
        if "tries" in message:
            self.tried = self.chains[message["tries"]]
            self.watch = ProcessWatch(self.process.pid, WARMUP)
            return {}
        if not self.began:
            self.began, self.tried = True, None
            self._watch_job()
        if "records" in message or "split" in message:
            self.job = ()
        else:
            self.last |= message
        return message

    def end_if_stuck(self) -> None:
        """Kill it if it has slept for longer than its job may take."""
        if (self.job or not self.began) and self.watch.has_slept():
            self.stuck = f"it slept for {self.watch.patience:g} seconds"
            self.process.kill()

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
        if self.stuck or code in (-signal.SIGPROF, -signal.SIGALRM):
            late = self.stuck or "it did not come back within its time"
            reason, detail = RunReason.HUNG, late if self.began else f"it did not start within {STARTUP:g} seconds"
        elif code < 0:
            reason, detail = RunReason.KILLED, f"by {signal.Signals(-code).name}"
        last = {"value": self.last.get("value"), "evaluations": self.last.get("evaluations", 0)}
        return {**_describe_failure(detail, reason, trace), **last}


def work() -> None:
    """Import once what runs need, do the tasks that arrive, and end with their owner."""
    _, _, _, descriptor, warmup, *chains = sys.argv
    faulthandler.enable()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    owner: Connection[Any, Any] = Connection(int(descriptor))
    for number, chain in enumerate(chains):
        owner.send({"tries": number})
        signal.setitimer(signal.ITIMER_PROF, float(warmup))
        execute("sphere-10", chain, 0, {"budget": 1, "seconds": STARTUP, "threads": 1, "target": None})

    def tell(evaluations: int, value: float) -> None:
        owner.send({"evaluations": evaluations, "value": drop_infinite(value)})

    owner.send({})
    with contextlib.suppress(EOFError, ConnectionError):  # the owner is gone
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            order = owner.recv_bytes()
            tasks, limits = pickle.loads(order)
            patience = (limits["seconds"] + GRACE) * limits["threads"] * len(tasks)
            # The processor time that it uses, and, where the system does not say that it sleeps, the time of the wall clock.
            signal.setitimer(signal.ITIMER_PROF, patience)
            signal.setitimer(signal.ITIMER_REAL, WAITING * patience)
            owner.send(do_job(order, tell))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
