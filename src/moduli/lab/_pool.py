"""Runs in worker processes, several at a time; a run that crashes or hangs does not affect the others.

A worker is a process that imports once what runs need, and then does one job after another. A run that kills its process, or
that hangs, ends its worker, and a new worker replaces it.

A job is one run, or several that are done together, as the members of one population; if they can't be, each becomes a job.
"""

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

from ..evolve import Ray
from ._stacked_run import CannotStackError
from ._worker import Job, RunWorker, Task, describe_failure, do_job, encode, execute, execute_job

Messages = Generator[tuple[int, dict[str, Any]], None, None]

# Seconds between two checks of workers that send no message.
LOOK_EVERY = 0.5


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
    for task in tasks:  # raise for tasks that can't be pickled before anything runs
        encode([task], limits)
    pool = _WorkerPool(tasks, limits, jobs, chains)
    try:
        while pool.waiting or any(worker.job for worker in pool.workers):
            yield from pool.send_jobs(workers)
            yield from pool.receive()
    finally:
        pool.close()


class _WorkerPool:
    """Worker processes, and the jobs that wait for one.

    Args:
        tasks: The runs.
        limits: The limits of each run.
        jobs: The numbers of the tasks of each job.
        chains: Chains that each worker runs before its first job.
    """

    def __init__(
        self, tasks: Sequence[Task], limits: dict[str, Any], jobs: Sequence[Job], chains: Sequence[str]
    ) -> None:
        self.tasks, self.limits, self.chains = tasks, limits, list(chains)
        self.waiting = list(jobs)[::-1]
        self.workers: list[RunWorker] = []

    def send_jobs(self, most: int) -> Messages:
        """Send waiting jobs to idle workers, and yield their start; workers are started until there are `most`."""
        idle = [worker for worker in self.workers if not worker.job]
        while len(idle) < len(self.waiting) and len(self.workers) < most:
            idle.append(RunWorker(self.chains, self.limits["seconds"]))
            self.workers.append(idle[-1])
        for worker in idle[: len(self.waiting)]:
            job = self.waiting.pop()
            worker.send(job, encode([self.tasks[number] for number in job], self.limits))
            yield from ((number, {"pid": worker.process.pid}) for number in job)

    def receive(self) -> Messages:
        """Wait for messages of workers for at most `LOOK_EVERY` seconds, and yield those that concern tasks."""
        ready = wait([worker.connection for worker in self.workers], LOOK_EVERY)
        for worker in list(self.workers):
            if worker.connection not in ready:
                worker.kill_if_asleep()
                continue
            job, message = worker.job, worker.receive()
            if message is None:
                yield from self._remove(worker)
            elif "split" in message:
                self._split(job)
            elif "records" in message:
                yield from zip(job, message["records"], strict=True)
            elif message:
                yield from ((number, message) for number in job)

    def _remove(self, worker: RunWorker) -> Messages:
        """Remove a worker that died, and yield the records of the tasks that failed with it; queue the others again."""
        self.workers.remove(worker)
        job, record = worker.job, worker.end()
        if worker.tried is not None:  # the chain's own runs report the reason; the other runs do not need it
            self.chains = [chain for chain in self.chains if chain != worker.tried]
            self.waiting.append(job)
            return
        if not worker.began:  # a worker that can't start fails every time: no job can be done
            job += tuple(number for each in reversed(self.waiting) for number in each)
            self.waiting.clear()
        elif len(job) > 1:  # one of the runs ended the process: do each alone to see which
            self._split(job)
            return
        yield from ((number, record) for number in job)

    def _split(self, job: Job) -> None:
        """Queue each run of a job as a separate job."""
        self.waiting += [(number,) for number in reversed(job)]

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.process.kill()
            worker.end()


def _execute_on(executor: Any, tasks: Sequence[Task], limits: dict[str, Any], jobs: Sequence[Job]) -> Messages:
    """Do all jobs on an executor, and yield their messages; a run for which it raises an error counts as crashed."""
    submit = _find_submit(executor)
    waiting = {submit(encode([tasks[number] for number in job], limits)): job for job in jobs}
    yield from ((number, {"pid": os.getpid()}) for job in jobs for number in job)
    while waiting:
        for future in wait_for_futures(list(waiting), return_when=FIRST_COMPLETED).done:
            job = waiting.pop(future)
            try:
                message = future.result()
            except Exception as error:  # noqa: BLE001 - whatever an executor raises is the result of the run
                message = {"records": [describe_failure(f"{type(error).__name__}: {error}")]} if len(job) == 1 else {}
            if "records" in message:
                yield from zip(job, message["records"], strict=True)
            else:
                waiting |= {submit(encode([tasks[number]], limits)): (number,) for number in job}


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
