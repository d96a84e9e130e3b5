"""The results of a race with their uncertainty: best settings, ranks and profiles with intervals, ties, sensitivity.

A **study** is a seed with its settings. It counts by its best setting, and a contender by the median of its studies. A race that
was not tuned has studies of one setting. The rules follow AlgoPerf. A run is scored by the evaluations or seconds that it took to
reach the goal of its problem; runs that did not reach it rank after all that did, by how much they reduced the loss.

Intervals are those of a bootstrap: studies are drawn again with replacement, the same for all contenders because they share
seeds, and within each its settings. The problems stay as they are. Two contenders are tied unless one has the better mean rank in
at least 97.5 % of the draws.

References:
    G. E. Dahl et al., "Benchmarking neural network training algorithms", 2023 (AlgoPerf).
    E. D. Dolan, J. J. Moré, "Benchmarking optimization software with performance profiles", 2002.
    R. Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice", NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from ._results import Results
from ._run import drop_infinite
from ._scores import GOAL, UNSOLVED, choose_winners, find_goals, score_run
from ._statistics import read_final

Array = NDArray[Any]
LARGEST_RATIO = 4.0
"""Profiles end at this multiple of the best contender's cost, as those of AlgoPerf."""
DRAWS = 1000
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Standing:
    """The rank and the profile of a contender over all problems.

    Attributes:
        contender: Its label.
        source: Its chain.
        rank: Its mean rank over problems; 1 is the best.
        rank_interval: The interval that 95 % of the draws of the bootstrap are in.
        solved: The part of problems that it solved within four times the cost of the best: its profile at tau = 4.
        solved_interval: The interval of `solved`, from the same draws.
        profile: The mean of its profile from tau = 1 to 4, on a logarithmic axis: the score of AlgoPerf.
        profile_interval: The interval of `profile`, from the same draws.
        tied: The labels of contenders that it is tied with.
    """

    contender: str
    source: str
    rank: float
    rank_interval: tuple[float, float]
    solved: float
    solved_interval: tuple[float, float]
    profile: float
    profile_interval: tuple[float, float]
    tied: tuple[str, ...]


def _tabulate(results: Results, tolerance: float, by: str) -> Array:
    """Return the scores as (problem, contender, study, setting), with infinity where there is no run."""
    goals, header = find_goals(results, tolerance), results.header
    tuned = bool(header.get("tune"))
    problems = {problem["name"]: at for at, problem in enumerate(header["problems"])}
    sources = {contender["source"]: at for at, contender in enumerate(header["contenders"])}
    seeds = {seed: at for at, seed in enumerate(sorted(header["seeds"]))}
    rows: dict[tuple[int, int, int], list[float]] = {}
    for run in results.runs:
        if (run.get("setting") is not None) == tuned:
            key = problems[run["problem"]], sources[run["source"]], seeds[run["seed"]]
            rows.setdefault(key, []).append(score_run(run, goals[run["problem"]], by))
    width = max(map(len, rows.values()), default=1)
    table = numpy.full((len(problems), len(sources), len(seeds), width), math.inf)
    for key, scores in rows.items():
        # A contender with nothing to tune has fewer settings: they are repeated, each as often.
        table[key] = [scores[at % len(scores)] for at in range(width)]
    return table


def _find_ranks(costs: Array) -> Array:
    """Return the ranks along the last axis, from 1; equal costs share the mean of their ranks."""
    less = (costs[..., None, :] < costs[..., :, None]).sum(-1)
    same = (costs[..., None, :] == costs[..., :, None]).sum(-1)
    ranks: Array = less + (same + 1) / 2
    return ranks


def _find_profiles(costs: Array, ratios: Array) -> Array:
    """Return the parts of problems that are solved within each ratio of the best, from (..., problem, contender)."""
    best = costs.min(-1, keepdims=True)
    solved = costs < UNSOLVED
    with numpy.errstate(invalid="ignore"):
        relative = numpy.where(solved, costs / best, math.inf)
    parts: Array = (relative[..., None] <= ratios * (1 + 1e-12)).mean(-3)
    return parts


def standings(results: Results, tolerance: float = GOAL, draws: int = DRAWS, by: str = "evaluations") -> list[Standing]:
    """Rank the contenders of a race, with bootstrap intervals.

    Args:
        results: The race, tuned or not.
        tolerance: The part of the reduction to the least known value that may be missing when a problem counts as solved.
        draws: How many draws the bootstrap has.
        by: What a run is scored by: the "evaluations" until its problem is solved, or the "seconds" of the processor. Seconds
            of runs that were members of a population are their share, less than alone.

    Returns:
        One for each contender, the best first.

    >>> from moduli.lab import race
    >>> results = race(["sphere-10"], ["torch.SGD(lr=0.1)", "torch.SGD(lr=1e-4)"], seeds=3, budget=60, workers=0)
    >>> best, other = standings(results)
    >>> best.contender, best.rank, best.solved, best.tied, other.solved
    ('torch.SGD(lr=0.1)', 1.0, 1.0, (), 0.0)
    """
    table = _tabulate(results, tolerance, by)
    _, contenders, studies, settings = table.shape
    ratios = numpy.geomspace(1.0, LARGEST_RATIO, 61)
    costs = numpy.median(table.min(-1), -1)  # (problem, contender)
    ranks, profile = _find_ranks(costs).mean(0), _find_profiles(costs, ratios)
    generator = numpy.random.default_rng(0)
    drawn_ranks = numpy.empty((draws, contenders))
    drawn_profiles = numpy.empty((draws, contenders, len(ratios)))
    for draw in range(draws):
        study: Array = generator.integers(studies, size=(studies,))
        setting: Array = generator.integers(settings, size=(studies, settings))
        sample = numpy.median(table[:, :, study[:, None], setting].min(-1), -1)
        drawn_ranks[draw], drawn_profiles[draw] = _find_ranks(sample).mean(0), _find_profiles(sample, ratios)
    labels = [contender["label"] for contender in results.header["contenders"]]
    rows = []
    for at, contender in enumerate(results.header["contenders"]):
        tied = tuple(
            label
            for other, label in enumerate(labels)
            if other != at and _are_tied(drawn_ranks[:, at], drawn_ranks[:, other])
        )
        rows.append(
            Standing(
                contender["label"],
                contender["source"],
                round(float(ranks[at]), 4),
                _find_interval(drawn_ranks[:, at]),
                round(float(profile[at, -1]), 4),
                _find_interval(drawn_profiles[:, at, -1]),
                round(float(profile[at].mean()), 4),
                _find_interval(drawn_profiles[:, at].mean(-1)),
                tied,
            )
        )
    return sorted(rows, key=lambda row: row.rank)


def _are_tied(a: Array, b: Array) -> bool:
    """Whether neither of two contenders has the smaller rank in enough draws of the bootstrap."""
    return max(float((a < b).mean()), float((b < a).mean())) < INTERVAL[1]


def _find_interval(values: Array) -> tuple[float, float]:
    """Return the quantiles `INTERVAL` of the draws of a bootstrap."""
    low, high = numpy.quantile(values, INTERVAL)
    return round(float(low), 4), round(float(high), 4)


# -- tuning -----------------------------------------------------------------------------------------------------------


def chosen_settings(results: Results) -> list[dict[str, Any]]:
    """Return the settings that tuning chose: one row for each problem, contender and study.

    Args:
        results: A tuned race.

    Returns:
        Rows with the problem, the contender, the seed, the chain with the chosen numbers, these by name, and the value.
    """
    keys = ("problem", "contender", "seed", "chain", "values", "value", "evaluations")
    return [{key: run.get(key) for key in keys} for run in choose_winners(results).runs if "chain" in run]


def tuning_gains(results: Results) -> list[dict[str, Any]]:
    """Return how much tuning helped: for each problem and contender the median value as written, and of the best settings.

    Args:
        results: A tuned race.

    Returns:
        Rows with ``"written"`` and ``"tuned"``, medians over studies or None where there is no number; ``"helped"`` is whether
        the second is less by more than a thousandth.
    """
    written = [run for run in results.runs if run.get("setting") is None]
    tuned = choose_winners(results).runs
    rows = []
    for problem in results.header["problems"]:
        for contender in results.header["contenders"]:
            key = problem["name"], contender["source"]
            before, after = (
                [read_final(run) for run in runs if (run["problem"], run["source"]) == key] for runs in (written, tuned)
            )
            if before and after:
                a, b = float(numpy.median(before)), float(numpy.median(after))
                names = {"problem": problem["name"], "contender": contender["label"], "source": contender["source"]}
                helped = b < a - 1e-3 * abs(a) if math.isfinite(a) else math.isfinite(b)
                rows.append({**names, "written": drop_infinite(a), "tuned": drop_infinite(b), "helped": helped})
    return rows


def sensitivity(results: Results, problem: str, number: str | None = None) -> list[dict[str, Any]]:
    """Return the final value against one tuned number, for each contender that has it.

    Args:
        results: A tuned race.
        problem: Its problem.
        number: The name of the number, ``"lr"`` or ``"Adam.beta1"``; without it, each contender's step size, or the first number
            of a contender that has none.

    Returns:
        For each contender its label, the name of the number, and lists x and y in the order of x; None in y where a run has no
        finite value.
    """
    rows = []
    for contender in results.header["contenders"]:
        runs = [
            run
            for run in results.runs
            if (run["problem"], run["source"]) == (problem, contender["source"]) and run.get("values")
        ]
        name = _find_number(list(runs[0]["values"]), number) if runs else None
        if name is None:
            continue
        points = sorted(((run["values"][name], run["value"]) for run in runs), key=lambda point: point[0])
        x, y = [point[0] for point in points], [point[1] for point in points]
        rows.append({"label": contender["label"], "source": contender["source"], "number": name, "x": x, "y": y})
    return rows


def _find_number(names: Sequence[str], wanted: str | None) -> str | None:
    """Return the tuned number of this name, its full name or its last part; without one, the step size or the first."""
    steps = ("lr", "learning_rate") if wanted is None else (wanted,)
    for name in names:
        if name in steps or name.rpartition(".")[2].partition("#")[0] in steps:
            return name
    return names[0] if wanted is None and names else None
