"""What many runs say together: medians and quartiles over seeds, and performance profiles over problems.

Reference: Dolan and Moré, "Benchmarking optimization software with performance profiles", Mathematical Programming 91 (2002).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ._results import Results
from ._run import RunReason, drop_infinite

TOLERANCES = (1e-1, 1e-3, 1e-6)
QUARTILES = {"median": 0.5, "lower": 0.25, "upper": 0.75}
POINTS = 90


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a part q of the values lie below, linear between two of them. Infinite values are allowed.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0, 4.0], 0.75), quantile([1.0, math.inf], 0.9)
    (2.0, 3.0, inf)
    """
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low, part = ordered[math.floor(place)], place - math.floor(place)
    if not part:
        return low
    high = ordered[math.ceil(place)]
    return high if math.isinf(high) else low + part * (high - low)


def _groups(results: Results) -> Iterable[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    for problem in results.header["problems"]:
        for contender in results.header["contenders"]:
            runs = [r for r in results.runs if (r["problem"], r["source"]) == (problem["name"], contender["source"])]
            yield problem, contender, runs


def _value(run: dict[str, Any]) -> float:
    broken = RunReason(run["reason"]) in (RunReason.CRASHED, RunReason.KILLED)
    return math.inf if run["value"] is None or broken else float(run["value"])


def summary(results: Results) -> list[dict[str, Any]]:
    """One row per problem and contender.

    Returns:
        Rows with the median, the quartiles and the best of the final values, the medians of evaluations and seconds, how many
        runs reached the optimum or the target (None where neither is known) or failed, and how often each reason ended one.
    """
    rows = []
    for problem, contender, runs in _groups(results):
        if not runs:
            continue
        optimum = problem["optimum"] if problem.get("exact", True) else None
        known = results.header.get("target") is not None or optimum is not None
        values = [_value(run) for run in runs]
        reasons = Counter(run["reason"] for run in runs)
        seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
        rows.append(
            {
                "problem": problem["name"],
                "contender": contender["label"],
                "source": contender["source"],
                "runs": len(runs),
                **{name: drop_infinite(quantile(values, q)) for name, q in QUARTILES.items()},
                "best": drop_infinite(min(values)),
                "evaluations": quantile([run["evaluations"] for run in runs], 0.5),
                "seconds": quantile(seconds, 0.5) if seconds else None,
                "reached": reasons[str(RunReason.REACHED)] + reasons[str(RunReason.TARGET)] if known else None,
                "failed": sum(RunReason(run["reason"]).failed for run in runs),
                "reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
            }
        )
    return rows


def _find_best_at(history: list[list[Any]], column: int, x: float) -> float:
    """The best value of a run when x evaluations, or seconds, had passed."""
    place = bisect_right(history, x, key=lambda point: point[column])
    value = history[place - 1][2] if place else None
    return math.inf if value is None else float(value)


def _grid(low: float, high: float, whole: bool) -> list[float]:
    if high <= low:
        return [low]
    points = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    return sorted({round(x) for x in points}) if whole else points


def curves(results: Results, problem: str) -> list[dict[str, Any]]:
    """For one problem, the median and the quartiles over seeds against evaluations and against seconds.

    A run that has ended keeps its last value until the longest run of the same contender ends.

    Args:
        results: The race.
        problem: Its problem.

    Returns:
        For each contender that ran, its label and, under ``"evaluations"`` and ``"seconds"``, lists x, median, lower, upper.
    """
    found = []
    for about, contender, runs in _groups(results):
        histories = [run["history"] for run in runs if len(run["history"]) > 1]
        if about["name"] != problem or not histories:
            continue
        curve: dict[str, Any] = {"label": contender["label"], "source": contender["source"], "seeds": len(histories)}
        for key, column in (("evaluations", 0), ("seconds", 1)):
            high = max(history[-1][column] for history in histories)
            low = 1 if column == 0 else max(1e-5, min(history[1][1] for history in histories))
            grid = _grid(low, high, column == 0)
            levels = [[_find_best_at(history, column, x) for history in histories] for x in grid]
            curve[key] = {"x": [float(f"{x:.5g}") for x in grid]}
            for name, q in QUARTILES.items():
                curve[key][name] = [drop_infinite(quantile(level, q)) for level in levels]
        found.append(curve)
    return found


def costs(results: Results, tolerance: float) -> dict[str, list[float]]:
    """For each contender, over all problems and seeds, the evaluations until all but a part `tolerance` of the way was done.

    The way is from the value at the start to the least known value, the optimum or that of a run of this race; infinity where
    a run did not get there.
    """
    table: dict[str, list[float]] = {contender["source"]: [] for contender in results.header["contenders"]}
    known = {problem["name"]: [problem["optimum"]] for problem in results.header["problems"]}
    for run in results.runs:
        known[run["problem"]].append(run["value"])
    index, wanted = {Results.key(run): run["history"] for run in results.runs}, results.keys()
    for problem, source, seed in wanted:
        history = index.get((problem, source, seed), [])
        cost = math.inf
        if history and history[0][2] is not None:
            least = min((value for value in known[problem] if value is not None), default=0.0)
            goal = least + tolerance * (history[0][2] - least)
            cost = next((max(1, e) for e, _, v in history if v is not None and v <= goal), math.inf)
        table[source].append(cost)
    return table


def profiles(results: Results, tolerance: float) -> list[dict[str, Any]]:
    """Performance profiles: for each contender, the part of problems that it solved within r times the best contender's cost.

    Args:
        results: The race.
        tolerance: When a problem counts as solved: all but this part of the way from the start to the least known value.

    Returns:
        For each contender its label, and the corners of its staircase: ratios r and parts between 0 and 1.
    """
    table = costs(results, tolerance)
    columns = list(zip(*table.values(), strict=True))
    best = [min(column) for column in columns]
    found = []
    for contender in results.header["contenders"]:
        pairs = zip(table[contender["source"]], best, strict=True)
        ratios = sorted(cost / least for cost, least in pairs if math.isfinite(cost))
        x, y = [1.0], [0.0]
        for count, ratio in enumerate(ratios, 1):
            if ratio > x[-1]:
                x.append(ratio)
                y.append(y[-1])
            y[-1] = count / len(best)
        found.append({"label": contender["label"], "source": contender["source"], "x": x, "y": y})
    return found
