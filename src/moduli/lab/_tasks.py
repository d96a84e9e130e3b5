"""What is sent to a process of its own, and what is done there."""

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._contender import Contender, contender
from ._meter import RunReason
from ._reference import load_problem
from ._run import run
from .problems import Problem, get


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
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{self.what} cannot be sent to another process ({error}). Define it at the top of an importable file, give "
                "a chain or FILE.py:name instead, or race in this process with workers=0"
            ) from error

    @property
    def what(self) -> str:
        """Problem, contender and seed, for people."""
        problem = self.problem if isinstance(self.problem, str) else self.problem.name
        label = self.contender if isinstance(self.contender, str) else self.contender.label
        return f"{label} on {problem}, seed {self.seed}"


def resolve(problem: str | Problem) -> Problem:
    """The problem itself."""
    if isinstance(problem, Problem):
        return problem
    return load_problem(problem) if ".py:" in problem or problem.endswith(".py") else get(problem)


def execute(task: Task, progress: Callable[[int, float], None] | None = None) -> dict[str, Any]:
    """Do one run, here."""
    problem = resolve(task.problem)
    budget = problem.budget if task.budget is None else task.budget
    with _threads(task.threads):
        runner = contender(task.contender) if isinstance(task.contender, str) else task.contender
        return run(
            problem, runner, task.seed, budget=budget, seconds=task.seconds, target=task.target, progress=progress
        )


def record_without_run(last: dict[str, Any], reason: RunReason, detail: str, trace: str = "") -> dict[str, Any]:
    """The record of a run that could not give its own: with what it told on its way."""
    unknown = dict.fromkeys(("gradients", "steps", "seconds", "digest"))
    known = {"value": last.get("value"), "evaluations": last.get("evaluations", 0), "history": []}
    return {"reason": str(reason), "detail": detail, "traceback": trace, **known, **unknown}


@contextlib.contextmanager
def _threads(count: int) -> Any:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(state)
