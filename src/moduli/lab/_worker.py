"""One worker process of a race, and the jobs that it does.

A run counts as hung if its process uses more processor time than its limit, or sleeps for as long. Waiting for the processor on
a busy machine is neither.
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ._contender import Contender, contender
from ._process import ProcessWatch
from ._reference import load_problem
from ._run import WAITING, RunReason, drop_infinite, run
from ._stacked_run import CannotStackError, run_stacked
from .problems import Problem

Task = tuple[str | Problem, str | Contender, int]
Job = tuple[int, ...]

STARTUP = 300.0
"""How many seconds a worker has to import what runs need."""
WARMUP = 60.0
"""How many seconds a worker has to try one chain, before it is ended and another one starts without that chain."""
# Seconds beyond the time limit that a run checks itself, after which its process is killed: the run may never check.
GRACE = 3.0


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


def encode(tasks: Sequence[Task], limits: dict[str, Any]) -> bytes:
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


def describe_failure(detail: str, reason: RunReason = RunReason.CRASHED, trace: str = "") -> dict[str, Any]:
    """Return the record of a run that returned none."""
    unknown = dict.fromkeys(("gradients", "steps", "seconds", "digest"))
    outcome = {"reason": str(reason), "detail": detail, "traceback": trace}
    return {**outcome, "value": None, "evaluations": 0, "history": [], **unknown}


class RunWorker:
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
        start += "signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2])); from moduli.lab._worker import work; work()"
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
        return {**describe_failure(detail, reason, trace), **last}


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
