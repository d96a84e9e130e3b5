"""Runs in worker processes, several at a time; a run that crashes or hangs does not affect the others.

A worker is a process that imports once what runs need, and then does one job after another. A run that kills its process, or
that hangs, ends its worker, and a new worker replaces it. A run counts as hung if its process uses more processor time than its
limit, or sleeps for as long. Waiting for the processor on a busy machine is neither.

A job is one run, or several that are done together, as the members of one population; if they can't be, each becomes a job.
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
# Seconds beyond the time limit that a run checks itself, after which its process is killed: the run may never check.
GRACE = 3.0
# Seconds between two checks of workers that send no message.
LOOK_EVERY = 0.5


def execute(
    problem: str | Problem,
    runner: str | Contender,
    seed: int,
    limits: dict[str, Any],
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Do one run in this process, and return its record.

    Args:
        problem: A name, ``FILE.py:name``, or a problem.
        runner: A chain as text, or a contender.
        seed: The seed.
        limits: ``budget`` (None for that of the problem), ``seconds``, ``target``, and ``threads`` of torch.
        progress: Called now and then with (evaluations, best value).
    """
    (record,) = execute_job([(problem, runner, seed)], limits, progress)
    return record


def execute_job(
    tasks: Sequence[Task], limits: dict[str, Any], progress: Callable[[int, float], None] | None = None
) -> list[dict[str, Any]]:
    """Do one run, or several of one problem together, in this process, and return their records.

    Args:
        tasks: The runs.
        limits: As for `execute`.
        progress: Called now and then with (evaluations, best value).

    Raises:
        CannotStackError: If several runs can't be done together.
    """
    spec, runner, seed = tasks[0]
    problem = load_problem(spec) if isinstance(spec, str) else spec
    budget = problem.budget if limits["budget"] is None else limits["budget"]
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(limits["threads"])
    options = {"seconds": limits["seconds"], "target": limits["target"], "progress": progress}
    try:
        if len(tasks) == 1:
            return [run(problem, contender(runner), seed, budget=budget, **options)]
        contenders = [contender(runner) for _, runner, _ in tasks]
        return run_stacked(problem, contenders, [seed for *_, seed in tasks], budget=budget, **options)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def _encode(tasks: Sequence[Task], limits: dict[str, Any]) -> bytes:
    """Return a job as bytes; they are unpickled, so only processes that this one starts may receive them."""
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
    """Return the groups, and each run in no group as a separate job, sorted by their first runs."""
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
    """Do all tasks in worker processes, and yield their messages; closing the generator ends the processes.

    Args:
        tasks: The runs: problem, contender and seed.
        limits: The limits of each run, as for `execute`.
        workers: How many at a time; 0 does them in this process, one after another.
        chains: Chains that each worker runs before its first job, so that the seconds of runs include no imports or compilation.
        groups: The numbers of tasks that are done together where they can be.
        executor: Does the tasks in place of workers: an executor of `concurrent.futures` with processes, or `evolve.Ray`.

    Yields:
        The number of a task, and a message. One with ``"reason"`` is the record of a finished run. One with ``"evaluations"``
        reports its progress, one with ``"pid"`` its start.
    """
    jobs = _list_jobs(len(tasks), groups)
    if executor is not None:
        yield from _execute_on(executor, tasks, limits, jobs)
    elif workers == 0:
        for job in jobs:
            yield from _execute_in_this_process(tasks, limits, job)
    else:
        yield from _execute_in_workers(tasks, limits, jobs, workers, chains)


def _execute_in_this_process(tasks: Sequence[Task], limits: dict[str, Any], job: Job) -> Messages:
    """Do a job in this process, and yield its messages as `execute_all` does."""
    yield from ((number, {"pid": os.getpid()}) for number in job)
    try:
        records = execute_job([tasks[number] for number in job], limits)
    except CannotStackError:
        records = [execute(*tasks[number], limits) for number in job]
    yield from zip(job, records, strict=True)


def _execute_in_workers(
    tasks: Sequence[Task], limits: dict[str, Any], jobs: Sequence[Job], workers: int, chains: Sequence[str]
) -> Messages:
    """Do jobs in at most so many worker processes, and yield their messages as `execute_all` does."""
    for number, _ in enumerate(tasks):  # raise for tasks that can't be pickled before anything runs
        _encode([tasks[number]], limits)
    waiting, chains = list(jobs)[::-1], list(chains)
    pool: list[_RunWorker] = []
    try:
        while waiting or any(worker.job for worker in pool):
            idle = [worker for worker in pool if not worker.job]
            while len(idle) < len(waiting) and len(pool) < workers:
                idle.append(_RunWorker(chains, limits["seconds"]))
                pool.append(idle[-1])
            for worker in idle[: len(waiting)]:
                job = waiting.pop()
                worker.send(job, _encode([tasks[number] for number in job], limits))
                yield from ((number, {"pid": worker.process.pid}) for number in job)
            ready = wait([worker.connection for worker in pool], LOOK_EVERY)
            for worker in list(pool):
                if worker.connection not in ready:
                    worker.kill_if_asleep()
                    continue
                job, message = worker.job, worker.receive()
                if message is None:
                    pool.remove(worker)
                    message = worker.end()
                    if (
                        worker.tried is not None
                    ):  # the chain's own runs report the reason; the other runs do not need it
                        chains = [chain for chain in chains if chain != worker.tried]
                        waiting.append(job)
                        continue
                    if not worker.began:  # a worker that can't start fails every time: no job can be done
                        job += tuple(number for each in reversed(waiting) for number in each)
                        waiting.clear()
                    elif len(job) > 1:  # one of the runs ended the process: do each alone to see which
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
        for worker in pool:
            worker.process.kill()
            worker.end()


def _execute_on(executor: Any, tasks: Sequence[Task], limits: dict[str, Any], jobs: Sequence[Job]) -> Messages:
    """Do all jobs on an executor, and yield their messages; a run for which it raises an error counts as crashed."""
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
    """Return a function that submits a job as bytes, and returns its future."""
    if isinstance(executor, Ray):
        remote = import_module("ray").remote(**{"num_cpus": 1, **executor.options})(do_job)
        return lambda data: remote.remote(data).future()
    if isinstance(executor, ThreadPoolExecutor) or not callable(getattr(executor, "submit", None)):
        fact = f"executor is a {type(executor).__name__}"
        remedy = "give one of concurrent.futures that has processes, or evolve.Ray(); workers= has a pool of its own"
        raise TypeError(f"{fact}; runs need processes, because each has its own random numbers: {remedy}")
    return lambda data: executor.submit(do_job, data)


def do_job(data: bytes, progress: Callable[[int, float], None] | None = None) -> dict[str, Any]:
    """Do a job that arrives as bytes.

    Args:
        data: The job, encoded by `execute_all`.
        progress: Called now and then with (evaluations, best value).

    Returns:
        The records of its runs under ``"records"``; or, under ``"split"``, why they can't be done together.
    """
    tasks, limits = pickle.loads(data)
    try:
        return {"records": execute_job(tasks, limits, progress)}
    except CannotStackError as error:
        return {"split": str(error)}


def _describe_failure(detail: str, reason: RunReason = RunReason.CRASHED, trace: str = "") -> dict[str, Any]:
    """Return the record of a run that returned none."""
    unknown = dict.fromkeys(("gradients", "steps", "seconds", "digest"))
    outcome = {"reason": str(reason), "detail": detail, "traceback": trace}
    return {**outcome, "value": None, "evaluations": 0, "history": [], **unknown}


class _RunWorker:
    """A worker process with the pipe for its jobs and messages, and the file for its output and errors."""

    def __init__(self, chains: Sequence[str], seconds: float) -> None:
        self.seconds = seconds
        self.job: Job = ()
        self.hang_detail = ""
        self.progress: dict[str, Any] = {}
        self.began = False
        self.chains = chains
        #: The chain that the process tries now, before its first job.
        self.tried: str | None = None
        # The file has no name, so nothing remains on the disk, however this process ends.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self.connection, other = multiprocessing.Pipe()
        start = "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
        # The timer ends a process that hangs, also in C code or in an import.
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
            start_new_session=True,  # Ctrl-C goes to the race only, which then ends its workers
        )
        other.close()
        self.watch = ProcessWatch(self.process.pid, STARTUP)

    def send(self, job: Job, data: bytes) -> None:
        """Send a job to the process: the numbers of its tasks are stored, and the encoded tasks are sent."""
        self.job, self.progress = job, {}
        self._watch_job()
        self.errors.seek(0)
        self.errors.truncate()
        with contextlib.suppress(OSError):  # the process has died; the next `receive` returns None
            self.connection.send_bytes(data)

    def _watch_job(self) -> None:
        """Restart the watch, with the time that the job may take."""
        self.watch = ProcessWatch(self.process.pid, (self.seconds + GRACE) * len(self.job))

    def receive(self) -> dict[str, Any] | None:
        """Return the next message: an empty one when the process tries a chain or has started, None when it has died."""
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
            self.progress |= message
        return message

    def kill_if_asleep(self) -> None:
        """Kill the process if it has slept for longer than its job may take."""
        if (self.job or not self.began) and self.watch.has_slept():
            self.hang_detail = f"it slept for {self.watch.patience:g} seconds"
            self.process.kill()

    def end(self) -> dict[str, Any]:
        """End the process, and return the record of the run that it was doing, with the last progress that it reported."""
        self.connection.close()
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:  # a run may have closed the pipe, and still run
            self.process.kill()
            code = self.process.wait()
        with self.errors:
            self.errors.seek(0)
            trace = self.errors.read().decode(errors="replace")[-8000:]
        reason, detail = RunReason.CRASHED, (trace.strip().splitlines() or [f"it ended with code {code}"])[-1]
        if self.hang_detail or code in (-signal.SIGPROF, -signal.SIGALRM):
            sentence = self.hang_detail or "it did not come back within its time"
            reason, detail = RunReason.HUNG, sentence if self.began else f"it did not start within {STARTUP:g} seconds"
        elif code < 0:
            reason, detail = RunReason.KILLED, f"by {signal.Signals(-code).name}"
        last = {"value": self.progress.get("value"), "evaluations": self.progress.get("evaluations", 0)}
        return {**_describe_failure(detail, reason, trace), **last}


def work() -> None:
    """Run as a worker process: import what runs need, do the jobs that arrive, and exit when the parent process is gone."""
    _, _, _, descriptor, warmup, *chains = sys.argv
    faulthandler.enable()
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()
    parent: Connection[Any, Any] = Connection(int(descriptor))
    for number, chain in enumerate(chains):
        parent.send({"tries": number})
        signal.setitimer(signal.ITIMER_PROF, float(warmup))
        execute("sphere-10", chain, 0, {"budget": 1, "seconds": STARTUP, "threads": 1, "target": None})

    def report(evaluations: int, value: float) -> None:
        parent.send({"evaluations": evaluations, "value": drop_infinite(value)})

    parent.send({})
    with contextlib.suppress(EOFError, ConnectionError):  # the parent process is gone
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            data = parent.recv_bytes()
            tasks, limits = pickle.loads(data)
            allowed = (limits["seconds"] + GRACE) * limits["threads"] * len(tasks)
            # The first timer limits processor time. The second one limits wall time, for systems that do not report sleep.
            signal.setitimer(signal.ITIMER_PROF, allowed)
            signal.setitimer(signal.ITIMER_REAL, WAITING * allowed)
            parent.send(do_job(data, report))


def _exit_after(parent: int) -> None:
    """Exit when the parent process is gone: `getppid` then returns another id."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
