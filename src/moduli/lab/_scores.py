"""Scores of runs, by which the best setting of a study is chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy

from ._run import RunReason

if TYPE_CHECKING:
    from ._results import Results

GOAL = 0.05
"""A run has solved its problem when all but this part of the reduction from its start to the least known value is done."""
UNSOLVED = 1e12
"""Runs that did not reach their goal have at least this score."""


def find_goals(results: Results, tolerance: float = GOAL) -> dict[str, float]:
    """Return the value that runs on each problem must reach: the target of the race, or one near the least known value.

    Args:
        results: The race.
        tolerance: The part of the reduction from the median start to the least known value that may be missing.
    """
    target = results.header.get("target")
    goals = {}
    for problem in results.header["problems"]:
        runs = [run for run in results.runs if run["problem"] == problem["name"] and run["history"]]
        starts = [run["history"][0][2] for run in runs if run["history"][0][2] is not None]
        values = [value for value in (problem["optimum"], *(run["value"] for run in runs)) if value is not None]
        if target is not None or not starts or not values:
            goals[problem["name"]] = -math.inf if target is None else float(target)
            continue
        least = min(values)
        goals[problem["name"]] = least + tolerance * (float(numpy.median(starts)) - least)
    return goals


def find_shift(results: Results, problem: Mapping[str, Any]) -> tuple[float, str]:
    """Return the number to subtract from values on a logarithmic axis, and the label of the differences.

    It is the optimum, if it is known; else zero, or the least value of the race if that is not above zero.

    Args:
        results: The race, with all settings.
        problem: The problem, as the header of the race has it.
    """
    if problem["exact"] and problem["optimum"] is not None:
        return problem["optimum"], "loss above the optimum" if problem["optimum"] else "loss"
    runs = [run for run in results.runs if run["problem"] == problem["name"]]
    least = min((value for run in runs for *_, value in run["history"] if value is not None), default=1.0)
    return (0.0, "loss") if least > 0 else (least, "loss above the least value")


def shift_values(values: Iterable[float | None], problem: Mapping[str, Any], shift: float) -> list[float]:
    """Return values minus a shift; NaN for those that a logarithmic axis can't have.

    Args:
        values: The values.
        problem: Their problem. Above a known optimum they are at least 1e-16, since differences below are rounding.
        shift: The number from `find_shift`.
    """
    least = 1e-16 if problem["exact"] and problem["optimum"] is not None else 0.0
    shifted = [math.nan if value is None else max(value - shift, least) for value in values]
    return [value if value > 0 else math.nan for value in shifted]


def find_cost(history: list[list[Any]], goal: float, by: str) -> float | None:
    """Return the evaluations, or the seconds, until a run reached its goal; None if it did not.

    Args:
        history: The evaluations, seconds and best value of the run at some points.
        goal: The value that it must reach.
        by: "evaluations" or "seconds".
    """
    if by not in ("evaluations", "seconds"):
        raise ValueError(f"by={by!r}; a race is judged by 'evaluations' or by 'seconds'")
    point = next((point for point in history if point[2] is not None and point[2] <= goal), None)
    if point is None:
        return None
    return float(max(1, point[0])) if by == "evaluations" else max(float(point[1]), 1e-6)


def score_run(run: dict[str, Any], goal: float, by: str = "evaluations") -> float:
    """Return the cost of a run until it reached its goal; for one that did not, a score above that of all that did.

    Args:
        run: The record of a run.
        goal: The value that it must reach.
        by: What counts, "evaluations" or "seconds" of the processor.
    """
    broken = RunReason(run["reason"]) in (RunReason.CRASHED, RunReason.KILLED, RunReason.HUNG)
    if run["value"] is None or broken or not run["history"]:
        return math.inf
    cost = find_cost(run["history"], goal, by)
    if cost is not None:
        return cost
    start = run["history"][0][2]
    gap = 1.0 if start is None or not start > goal else (run["value"] - goal) / (start - goal)
    return UNSOLVED * (1.0 + min(gap, 1e6))


def choose_winners(results: Results) -> Results:
    """Return the race of the best setting of each study; a race that was not tuned is returned unmodified.

    Args:
        results: The race.
    """
    if not results.header.get("tune"):
        return results
    goals = find_goals(results)
    best: dict[tuple[str, str, int], tuple[float, float, dict[str, Any]]] = {}
    for run in results.runs:
        if run.get("setting") is None:
            continue
        key = run["problem"], run["source"], run["seed"]
        value = math.inf if run["value"] is None else run["value"]
        score = score_run(run, goals[run["problem"]]), value, run
        if key not in best or score[:2] < best[key][:2]:
            best[key] = score
    header = {key: value for key, value in results.header.items() if key not in ("tune", "settings", "ranges")}
    winners = replace(results, header=header, runs=[])
    winners.take({**run, "setting": None} for _, _, run in best.values())
    return winners
