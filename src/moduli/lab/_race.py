"""Races of every contender on every problem from every seed; and the default race, which takes less than two minutes."""

import contextlib
import importlib.util
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from torch import nn

from ._contender import Contender, contender
from ._grammar import ParsedChain
from ._pool import execute_all
from ._reference import as_problem, load_problem
from ._results import FORMAT, Results, environment, start_file, to_line
from ._tuning import RangeSpec, Setting, check_ranges, make_settings, read_ranges
from ._worker import Task
from .problems import Problem, SampledProblem

Spec = str | ParsedChain | Contender | Callable[[nn.Module], Any]
Listener = Callable[[str, Task, dict[str, Any]], None]


DEFAULT_PROBLEMS = ("rosenbrock", "rastrigin", "kinked-valley", "noisy-20", "bands", "ground-state", "spirals")
"""The problems of the default race; none of them needs an extra."""

DEFAULT_BUDGET = 600
"""How many evaluations a run of the default race has."""

# Labels and chains, with the settings of their pages in the documentation: first order, matrices, quasi-Newton, trust regions,
# without gradients, populations, gradients in a population (docs/population-optimizers.md), and torch for comparison.
DEFAULT_FIELD = (
    ("gradient descent", "ClipNorm(1) | LR(0.02)"),
    ("Nesterov", "ClipNorm(1) | NAG(0.9) | LR(0.01)"),
    ("Adam", "Adam | LR(0.1)"),
    ("Lion", "Lion | LR(0.01)"),
    ("SOAP", "SOAP | LR(0.1)"),
    ("BFGS", "BFGS | StrongWolfe"),
    ("L-BFGS", "LBFGS | StrongWolfe"),
    ("trust region", "TrustCG(BFGS(inverse=False))"),
    ("CMA-ES", "CMAES(sigma=0.5)"),
    ("swarm", "Population(16, spread=0.5) | PSO"),
    (
        "Adam in a swarm",
        "Population(8, spread=0.5) | ClipNorm(1) | Adam | LR(0.1) | PSO(inertia=0.3, cognitive=0.1, social=0.1)",
    ),
    ("torch L-BFGS", "torch.LBFGS(line_search_fn='strong_wolfe')"),
)
"""The contenders of the default race: label, and chain."""


def default_field() -> list[Contender]:
    """Return the contenders of the default race.

    >>> "Adam" in [entry.label for entry in default_field()]
    True
    """
    return [contender(chain, label=label) for label, chain in DEFAULT_FIELD]


def race(
    problems: Iterable[str | Problem | Callable[..., Any]],
    contenders: Iterable[Spec],
    *,
    seeds: int | Sequence[int] = 3,
    budget: int | None = None,
    seconds: float = 30.0,
    workers: int | None = None,
    threads: int = 1,
    target: float | None = None,
    file: str | os.PathLike[str] | None = None,
    resume: bool = False,
    command: list[str] | None = None,
    listen: Listener | None = None,
    tune: int | None = None,
    ranges: Mapping[str, RangeSpec] | None = None,
    stack: bool = True,
    executor: Any = None,
) -> Results:
    """Run every contender on every problem from every seed.

    With `tune` every contender also gets that many settings: quasi-random numbers in the ranges that its links declare, the same
    points for all, dealt to the seeds in equal parts. Each seed is a study of which the best setting counts; the chains as they
    are written run besides, to show how much tuning helped. The settings of a chain run together as the members of a population
    where that gives the steps that each would take alone.

    Runs are done in other processes, each with a fixed number of threads. One that crashes, hangs or diverges is a row of
    the results like any other. The numbers of a run depend on its problem, contender, seed, budget and threads only, not on
    what runs beside it, so `workers` changes how long a race takes and nothing else.

    Args:
        problems: Names (`moduli.lab.problems.names()`), ``FILE.py:name``, problems, or functions that return a loss
            (see `as_problem`).
        contenders: Chains as text, or functions from a model to an optimizer; see `contender`.
        seeds: How many, counted from 0, or which.
        budget: Evaluations per run; without it, what each problem says.
        seconds: The time limit of a run.
        workers: How many runs at a time; without it, one per core. With 0 all runs are done in this process, one after
            another: then nothing protects the race from a run that hangs or kills its process.
        threads: How many threads each run has.
        target: A run that comes as low as this has solved its problem, and ends; without it, at the optimum of the problem,
            where one is known.
        file: Where finished runs are kept, a line each. Whatever ends the race, they stay.
        resume: Keep the runs that `file` has, and do the others.
        command: The command that does this race again, for the report.
        listen: Called with ``"begin"``, ``"progress"`` or ``"end"``, the task and its message; ``"finished"`` counts the runs
            that the race has, those before a resume included.
        tune: How many settings each contender gets, a multiple of the number of seeds: 15 are five for each of three studies.
        ranges: With `tune`, ranges in place of those that are declared, and numbers that stay as they are, by name:
            ``{"lr": (1e-4, 1e-1), "Adam.beta1": 0.9}``.
        stack: With `tune`, whether settings of a chain may run as members of one population. Numbers are then those of separate
            runs to rounding.
        executor: Does the runs in place of `workers`, with the same numbers: an executor of `concurrent.futures` that has
            processes (also those of other packages, for several machines), or `evolve.Ray`. It does not end runs that hang.

    Raises:
        ChainSyntaxError: When a contender is no chain.
        UnknownProblemError: When there is no such problem.
        ModuleNotFoundError: When a problem needs a package that is not installed.
        ResultsError: When `file` is to be continued but holds something else.

    >>> results = race(["rosenbrock"], ["torch.SGD(lr=0.001)", "torch.LBFGS(line_search_fn='strong_wolfe')"], seeds=2)
    >>> [run["reason"] for run in results.runs]
    ['budget spent', 'budget spent', 'reached the optimum', 'reached the optimum']
    """
    parsed_contenders = [contender(spec) for spec in _list_parts(contenders)]
    loaded_problems = [_load_problem_spec(spec) for spec in _list_parts(problems)]
    numbers, ranges = _list_seeds(seeds), read_ranges(ranges or {})
    _check_parts(loaded_problems, parsed_contenders, numbers)
    limits = _read_limits(budget, seconds, threads, target)
    tune = None if tune is None else operator.index(tune)
    settings = _make_all_settings(parsed_contenders, tune, numbers, ranges)
    header = {
        **_describe_race(command, loaded_problems, parsed_contenders),
        "seeds": numbers,
        **limits,
        **environment(),
        **_describe_tuning(tune, ranges, settings),
    }
    results = Results(header, problems={problem.name: problem for _, problem in loaded_problems})
    workers = _count_processors() if workers is None else workers
    chains = _list_warmup_chains(parsed_contenders)
    with open(os.devnull, "wb") if file is None else start_file(results, file, resume) as stream:
        tasks, records = _list_tasks(results, loaded_problems, parsed_contenders, settings)
        groups = _group_tasks(tasks, records, dict(loaded_problems)) if tune is not None and stack else []
        with contextlib.closing(execute_all(tasks, limits, workers, chains, groups, executor)) as messages:
            for number, message in messages:
                record = {**records[number], **message}
                event = _name_event(message)
                if event == "end":
                    results.runs.append(record)
                    stream.write(to_line(record))
                if listen is not None:
                    listen(event, tasks[number], {**record, "finished": len(results.runs)})
    results.take(results.runs)
    return results


def _name_event(message: dict[str, Any]) -> str:
    """Return the name under which listeners get a message of `execute_all`."""
    return "end" if "reason" in message else "begin" if "pid" in message else "progress"


def _count_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _list_warmup_chains(contenders: Sequence[Contender]) -> list[str]:
    """Return the chains that workers run before their first job; that of torch in place of a factory."""
    return [entry.source if entry.is_chain else "torch.SGD(lr=0.1)" for entry in contenders]


def _describe_race(
    command: list[str] | None, problems: Sequence[tuple[str | Problem, Problem]], contenders: Sequence[Contender]
) -> dict[str, Any]:
    """Return the first entries of the header.

    Args:
        command: The command that does the race again; None for that of this process.
        problems: Pairs of what names a problem for a worker, and the problem.
        contenders: The contenders.
    """
    return {
        "kind": "race",
        "format": FORMAT,
        "command": list(sys.argv) if command is None else command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "problems": [_describe_problem(spec, problem) for spec, problem in problems],
        "contenders": [{"label": entry.label, "source": entry.source} for entry in contenders],
    }


def _describe_tuning(
    tune: int | None, ranges: Mapping[str, RangeSpec], settings: Sequence[list[Setting]]
) -> dict[str, Any]:
    """Return the entries of a tuned race in the header; none without `tune`.

    Args:
        tune: The number of settings of each contender.
        ranges: The ranges that were passed.
        settings: The settings of each contender.
    """
    if tune is None:
        return {}
    entries = [
        [{"chain": each.contender.source, "values": each.values, "seed": each.seed} for each in contender_settings]
        for contender_settings in settings
    ]
    return {"tune": tune, "ranges": json.loads(json.dumps(ranges)), "settings": entries}


def _check_parts(
    problems: Sequence[tuple[Any, Problem]], contenders: Sequence[Contender], seeds: Sequence[int]
) -> None:
    """Raise an error unless there are problems, contenders and seeds, none twice, and what they need is installed."""
    for _, problem in problems:
        for package in {name.partition(".")[0] for name in problem.requires}:
            if importlib.util.find_spec(package) is None:
                fact = f"{problem.name} needs {package}, which is not installed: pip install 'moduli[lab]'"
                raise ModuleNotFoundError(fact, name=package)
    parts: dict[str, list[Any]] = {"problem": [problem.name for _, problem in problems], "seed": list(seeds)}
    for what, keys in {**parts, "contender": [entry.source for entry in contenders]}.items():
        if not keys or len({*keys}) < len(keys):
            hint = "; label closures of one function: lab.contender(function, label=...)" if what == "contender" else ""
            raise ValueError(f"a race needs at least one {what}, and none twice: {', '.join(map(str, keys))}{hint}")


def _list_parts(parts: Any) -> list[Any]:
    """Return problems, or contenders, as a list; a text is a list of one."""
    return [parts] if isinstance(parts, str) else list(parts)


def _list_seeds(seeds: Any) -> list[int]:
    """Return the seeds as integers of Python, which JSON can store; a number n means the seeds 0 to n - 1."""
    if hasattr(seeds, "__index__") and getattr(seeds, "ndim", 0) == 0:
        return list(range(operator.index(seeds)))
    return [operator.index(seed) for seed in seeds]


def _read_limits(budget: int | None, seconds: float, threads: int, target: float | None) -> dict[str, Any]:
    """Return the limits of a run as numbers of Python; raise ValueError if one is out of range."""
    counts = {"budget": budget, "threads": threads}
    counts = {what: None if number is None else operator.index(number) for what, number in counts.items()}
    for what, number in {"budget": counts["budget"], "number of threads": counts["threads"]}.items():
        if number is not None and number < 1:
            raise ValueError(f"the {what} is at least 1, not {number}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"the seconds of a run are a finite number above zero, not {seconds}")
    if target is not None and not math.isfinite(target):
        raise ValueError(f"the target is a finite number, not {target}")
    return {
        "budget": counts["budget"],
        "seconds": float(seconds),
        "threads": counts["threads"],
        "target": None if target is None else float(target),
    }


def _make_all_settings(
    contenders: Sequence[Contender], tune: int | None, seeds: Sequence[int], ranges: Mapping[str, RangeSpec]
) -> list[list[Setting]]:
    """Return the settings of each contender; none without `tune`."""
    if tune is None:
        if ranges:
            raise ValueError("ranges are those of tuned numbers: give tune=, how many settings each contender gets")
        return [[] for _ in contenders]
    if tune < 1 or tune % len(seeds):
        raise ValueError(
            f"tune is {tune} for {len(seeds)} seeds; each seed is a study with as many settings as the others: give a multiple"
        )
    check_ranges(contenders, ranges)
    return [make_settings(entry, tune, sorted(seeds), ranges) for entry in contenders]


def _list_tasks(
    results: Results,
    problems: Sequence[tuple[str | Problem, Problem]],
    contenders: Sequence[Contender],
    settings: Sequence[list[Setting]],
) -> tuple[list[Task], list[dict[str, Any]]]:
    """Return the tasks that have not been done, and the first entries of their records.

    Args:
        results: The header of the race, and the runs that have been done.
        problems: Pairs of what names a problem for a worker, and the problem.
        contenders: The contenders.
        settings: The settings of each contender.

    Returns:
        Both in the order of `Results.keys`.
    """
    specs = {problem.name: spec for spec, problem in problems}
    indices = {entry.source: at for at, entry in enumerate(contenders)}
    done_keys = {Results.key(run) for run in results.runs}
    tasks: list[Task] = []
    records: list[dict[str, Any]] = []
    for key in results.keys():  # noqa: SIM118 - a method of `Results`
        if key in done_keys:
            continue
        name, source, seed, *number = key
        entry = contenders[indices[source]]
        record = {"kind": "run", "problem": name, "contender": entry.label, "source": source, "seed": seed}
        runner = entry
        if number:
            setting = settings[indices[source]][number[0]]
            runner = setting.contender
            record |= {"setting": setting.number, "chain": runner.source, "values": setting.values}
        tasks.append((specs[name], runner.source if runner.is_chain else runner, seed))  # a chain is sent as text
        records.append(record)
    return tasks, records


def _group_tasks(
    tasks: Sequence[Task], records: Sequence[Mapping[str, Any]], problems: Mapping[Any, Problem]
) -> list[list[int]]:
    """Return groups of tasks that are done together: those of one chain on one problem, as written and with its settings.

    Args:
        tasks: The tasks.
        records: The first entries of their records.
        problems: The problems, by what names them in the tasks.

    Returns:
        The numbers of the tasks of each group.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, ((spec, runner, seed), record) in enumerate(zip(tasks, records, strict=True)):
        if isinstance(runner, str):
            problem = problems[spec]
            if not problem.stacks:
                continue
            shares_seeds = isinstance(problem, SampledProblem) or not problem.noisy
            groups.setdefault((record["problem"], record["source"], None if shares_seeds else seed), []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _load_problem_spec(spec: Any) -> tuple[Any, Problem]:
    """Return what names a problem for a worker (a text, or the problem itself), and the problem."""
    if isinstance(spec, str):
        return spec, load_problem(spec)
    problem = as_problem(spec, getattr(spec, "__name__", "problem"))
    return problem, problem


def _describe_problem(spec: str | Problem, problem: Problem) -> dict[str, Any]:
    """Return the entry of a problem in the header; `spec` is what names it for a worker."""
    reference = spec if isinstance(spec, str) else f"{type(problem).__module__}:{type(problem).__qualname__}"
    keys = ("summary", "tags", "optimum", "exact", "tolerance", "noisy", "dimension", "budget", "window", "minimisers")
    # As in a file that is read again: lists in place of tuples.
    values = json.loads(json.dumps({key: getattr(problem, key) for key in keys}))
    return {"name": problem.name, "reference": reference, **values}
