"""The statistics of a race: medians and quartiles over seeds, and performance profiles over problems.

Reference: Dolan and Moré, "Benchmarking optimization software with performance profiles", Mathematical Programming 91 (2002).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._run import RunReason, drop_infinite
from ._scores import choose_winners, find_cost

if TYPE_CHECKING:
    from ._results import Results

TOLERANCES = (1e-1, 1e-3, 1e-6)
QUARTILES = {"median": 0.5, "lower": 0.25, "upper": 0.75}
POINTS = 90


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value below which a part q of the values lie, interpolated linearly. Infinite values are allowed.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0, 4.0], 0.75), quantile([1.0, math.inf], 0.9)
    (2.0, 3.0, inf)
    """
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low, part = ordered[math.floor(position)], position - math.floor(position)
    if not part:
        return low
    high = ordered[math.ceil(position)]
    return high if math.isinf(high) else low + part * (high - low)


def _group_runs(results: Results) -> Iterable[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Yield each problem with each contender, and their runs."""
    for problem in results.header["problems"]:
        for contender in results.header["contenders"]:
            runs = [r for r in results.runs if (r["problem"], r["source"]) == (problem["name"], contender["source"])]
            yield problem, contender, runs


def read_final(run: dict[str, Any]) -> float:
    """Return the final value of a run; infinity if it has none, crashed or was killed."""
    broken = RunReason(run["reason"]) in (RunReason.CRASHED, RunReason.KILLED)
    return math.inf if run["value"] is None or broken else float(run["value"])


def summary(results: Results) -> list[dict[str, Any]]:
    """Return one row per problem and contender; in a tuned race of the best settings, with ``"chains"`` by seed.

    Returns:
        Rows with the median, the quartiles and the best of the final values, the medians of evaluations and seconds, how many
        runs reached the optimum or the target (None where neither is known) or failed, and how often each reason ended one.
    """
    rows = []
    for problem, contender, runs in _group_runs(choose_winners(results)):
        if not runs:
            continue
        optimum = problem["optimum"] if problem.get("exact", True) else None
        has_goal = results.header.get("target") is not None or optimum is not None
        values = [read_final(run) for run in runs]
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
                "reached": reasons[str(RunReason.REACHED)] + reasons[str(RunReason.TARGET)] if has_goal else None,
                "failed": sum(RunReason(run["reason"]).failed for run in runs),
                "reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
                **({"chains": {run["seed"]: run["chain"] for run in runs}} if "chain" in runs[0] else {}),
            }
        )
    return rows


def _find_best_at(history: list[list[Any]], column: int, x: float) -> float:
    """Return the best value of a run after x evaluations (column 0 of its history) or x seconds (column 1)."""
    position = bisect_right(history, x, key=lambda point: point[column])
    value = history[position - 1][2] if position else None
    return math.inf if value is None else float(value)


def _make_grid(low: float, high: float, whole: bool) -> list[float]:
    """Return points between two limits at equal ratios; with `whole` they are rounded to integers."""
    if high <= low:
        return [low]
    points = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    return sorted({round(x) for x in points}) if whole else points


def curves(results: Results, problem: str) -> list[dict[str, Any]]:
    """Return, for one problem, the median and the quartiles over seeds against evaluations and against seconds.

    A run that has ended keeps its last value until the longest run of the same contender ends.

    Args:
        results: The race.
        problem: Its problem.

    Returns:
        For each contender that ran, its label and, under ``"evaluations"`` and ``"seconds"``, lists x, median, lower, upper.
    """
    rows = []
    for entry, contender, runs in _group_runs(choose_winners(results)):
        histories = [run["history"] for run in runs if len(run["history"]) > 1]
        if entry["name"] != problem or not histories:
            continue
        curve: dict[str, Any] = {"label": contender["label"], "source": contender["source"], "seeds": len(histories)}
        for key, column in (("evaluations", 0), ("seconds", 1)):
            high = max(history[-1][column] for history in histories)
            low = 1 if column == 0 else max(1e-5, min(history[1][1] for history in histories))
            grid = _make_grid(low, high, column == 0)
            levels = [[_find_best_at(history, column, x) for history in histories] for x in grid]
            curve[key] = {"x": [float(f"{x:.5g}") for x in grid]}
            for name, q in QUARTILES.items():
                curve[key][name] = [drop_infinite(quantile(level, q)) for level in levels]
        rows.append(curve)
    return rows


def costs(results: Results, tolerance: float, by: str = "evaluations") -> dict[str, list[float]]:
    """Return the costs until runs have reduced the loss by all but a part `tolerance` of the largest known reduction.

    The largest known reduction is from the value at the start to the least known value: the optimum, or the best of this race.

    Args:
        results: The race; of a tuned race the best settings.
        tolerance: The part of the reduction that may be missing.
        by: What counts as cost, "evaluations" or "seconds" of the processor.

    Returns:
        For each contender, by its source, the costs over all problems and seeds; infinity for runs that did not get there.
    """
    results = choose_winners(results)
    table: dict[str, list[float]] = {contender["source"]: [] for contender in results.header["contenders"]}
    values = {problem["name"]: [problem["optimum"]] for problem in results.header["problems"]}
    for run in results.runs:
        values[run["problem"]].append(run["value"])
    index, keys = {results.key(run): run["history"] for run in results.runs}, results.keys()
    for problem, source, seed in keys:
        history = index.get((problem, source, seed), [])
        cost = None
        if history and history[0][2] is not None:
            least = min((value for value in values[problem] if value is not None), default=0.0)
            goal = least + tolerance * (history[0][2] - least)
            cost = find_cost(history, goal, by)
        table[source].append(math.inf if cost is None else cost)
    return table


def profiles(results: Results, tolerance: float, by: str = "evaluations") -> list[dict[str, Any]]:
    """Return performance profiles: the part of problems that a contender solved within r times the best contender's cost.

    Args:
        results: The race.
        tolerance: The part of the reduction of the loss that may be missing when a problem counts as solved; see `costs`.
        by: What counts as cost, "evaluations" or "seconds".

    Returns:
        For each contender its label, and the corners of its staircase: ratios r and parts between 0 and 1.
    """
    table = costs(results, tolerance, by)
    columns = list(zip(*table.values(), strict=True))
    best = [min(column) for column in columns]
    rows = []
    for contender in results.header["contenders"]:
        pairs = zip(table[contender["source"]], best, strict=True)
        ratios = sorted(cost / least for cost, least in pairs if math.isfinite(cost))
        x, y = [1.0], [0.0]
        for count, ratio in enumerate(ratios, 1):
            if ratio > x[-1]:
                x.append(ratio)
                y.append(y[-1])
            y[-1] = count / len(best)
        rows.append({"label": contender["label"], "source": contender["source"], "x": x, "y": y})
    return rows
