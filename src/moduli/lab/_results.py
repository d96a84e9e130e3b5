"""The file of a race and its statistics; long, since both read the same records.

It has one line that says what is raced, then one line per finished run.

A line is appended in one write when its run has ended, so whatever kills the race leaves all finished runs. A last line that
was cut short is dropped when the file is next read. The statistics are medians and quartiles over seeds, and performance
profiles over problems.

Reference: Dolan and Moré, "Benchmarking optimization software with performance profiles", Mathematical Programming 91 (2002).
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from .._html import write_frame, write_html_table
from .._texts import cut, shorten
from ..io import CheckpointError, make_directory, read_bytes, write_bytes
from ._run import RunReason, drop_infinite
from ._scores import choose_winners, find_cost
from .problems import Problem

RunKey = tuple[Any, ...]
COLUMNS = (
    "problem", "contender", "source", "seed", "reason", "value", "evaluations", "gradients", "steps", "seconds", "detail",
)  # fmt: skip

FORMAT = 2
TOLERANCES = (1e-1, 1e-3, 1e-6)
QUARTILES = {"median": 0.5, "lower": 0.25, "upper": 0.75}
POINTS = 90

# The keys that every header, and every run, must have.
_HEADER = {
    "command", "started", "seeds", "budget", "seconds", "threads", "versions", "machine", "contenders", "problems",
}  # fmt: skip
_NUMBERS = ("value", "evaluations", "gradients", "steps", "seconds")
_RUN = {*COLUMNS, "history", "traceback"}


class ResultsError(ValueError):
    """A file that holds no race, or another race than the one to be continued.

    >>> print(ResultsError("race.jsonl holds no race"))
    race.jsonl holds no race
    """


def environment() -> dict[str, Any]:
    """Return the versions and the machine, as the header of a race has them.

    >>> sorted(environment())
    ['machine', 'versions']
    """
    from .._version import __version__

    versions = {"moduli": __version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
    system, processor = f"{platform.system()} {platform.release()}", platform.processor() or platform.machine()
    return {
        "versions": {**versions, "python": platform.python_version()},
        "machine": {"system": system, "processor": processor, "cores": os.cpu_count()},
    }


@dataclass(repr=False)
class Results:
    """The header of a race, and the runs that have finished.

    Attributes:
        header: What is raced, by whom, how: everything needed to do it again, with versions and machine.
        runs: The records of finished runs.
        problems: The problems by name, of a race that ran here. Reading a file loads none: it would run the file that the
            results name.

    Example:
        >>> from moduli.lab import race
        >>> results = race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, budget=50, workers=0)
        >>> results.header["seeds"], results.runs[0]["evaluations"]
        ([0], 48)
    """

    header: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    problems: dict[str, Problem] = field(default_factory=dict, repr=False, compare=False)

    def plot(self) -> Any:
        """Draw the race as `picture` does; needs matplotlib (extra `plot`). The figure is returned, not shown."""
        from ._report import picture

        return picture(self)

    def __repr__(self) -> str:
        title, rows = self._list_cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([title, *lines])

    def _repr_html_(self) -> str:
        title, (heads, *rows) = self._list_cells()
        return write_frame(title, write_html_table(heads, rows))

    def _list_cells(self) -> tuple[str, list[list[str]]]:
        """Return a title, and the texts of a table with the medians of each problem and contender."""
        heads = ["problem", "contender", "median", "evaluations", "reached", "runs"]
        rows = [[_write_cell(row[head]) for head in heads] for row in summary(self)]
        return f"Results: {len(self.runs)} of {len(self.keys())} runs", [heads, *rows]

    @staticmethod
    def key(run: dict[str, Any]) -> RunKey:
        """Return the unique key of a run: problem, contender and seed, and in a tuned race the number of the setting."""
        key = run["problem"], run["source"], run["seed"]
        return key if run.get("setting") is None else (*key, run["setting"])

    def keys(self) -> list[RunKey]:
        """Return the keys of all runs of the race, finished or not: each contender as it is written, then its settings."""
        header = self.header
        settings = header.get("settings") or [[]] * len(header["contenders"])
        keys: list[RunKey] = []
        pairs = list(zip(header["contenders"], settings, strict=True))
        for problem, (contender, contender_settings) in product(header["problems"], pairs):
            key = problem["name"], contender["source"]
            keys += [(*key, seed) for seed in sorted(header["seeds"])]
            keys += [(*key, setting["seed"], at) for at, setting in enumerate(contender_settings)]
        return keys

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Results:
        """Read a file.

        Args:
            path: The file.

        Raises:
            ResultsError: When it holds no race, or was written by a later version of the format.
        """
        header: dict[str, Any] | None = None
        runs: dict[tuple[str, str, int], dict[str, Any]] = {}
        try:
            data = read_bytes(path)
        except CheckpointError as error:
            raise ResultsError(str(error)) from None
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line, parse_float=_parse_finite, parse_constant=_parse_finite)
                missing = (_HEADER if record["kind"] == "race" else _RUN) - record.keys()
                if missing:
                    raise ValueError(f"it has no {min(missing)!r}")
                if record["kind"] == "run":
                    RunReason(record["reason"])
                    wrong = [name for name in _NUMBERS if not isinstance(record[name], int | float | None)]
                    if wrong or not isinstance(record["history"], list):
                        raise TypeError(f"its {[*wrong, 'history'][0]!r} is no {'number' if wrong else 'list'}")
                    runs[cls.key(record)] = record
                elif record["format"] > FORMAT:
                    raise ValueError(f"it has format {shorten(record['format'])}; this moduli reads up to {FORMAT}")
                else:
                    header = record
                    cls(header).keys()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ResultsError(f"line {number} of {path} is no line of a race ({cut(str(error), 300)})") from error
        if header is None:
            raise ResultsError(f"{path} holds no race")
        results = cls(header)
        results.take(runs.values())
        return results

    def take(self, runs: Iterable[dict[str, Any]]) -> None:
        """Replace `runs` by those of these runs that belong to the race, in the order of `keys`."""
        index = {self.key(run): run for run in runs}
        self.runs = [index[key] for key in self.keys() if key in index]

    @property
    def complete(self) -> bool:
        """Whether every run has finished."""
        return len(self.runs) == len(self.keys())

    def to_json(self) -> dict[str, Any]:
        """Return one object with the header, the runs, and the summary per problem and contender."""
        return {**self.header, "complete": self.complete, "runs": self.runs, "summary": summary(self)}


def _parse_finite(text: str) -> float:
    """Return a number of the file; raise ValueError if it is not finite."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no finite number")
    return float(text)


def flat_rows(results: Results) -> list[dict[str, Any]]:
    """Return one row per run, of numbers and texts only: for tables.

    >>> from moduli.lab import race
    >>> row = flat_rows(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, budget=50, workers=0))[0]
    >>> row["problem"], row["seed"], row["evaluations"]
    ('sphere-10', 0, 48)
    """
    columns = get_columns(results)
    return [{name: run.get(name) for name in columns} for run in results.runs]


def get_columns(results: Results) -> tuple[str, ...]:
    """Return the columns of `flat_rows`: a tuned race has the number of the setting and its chain besides."""
    return (*COLUMNS, "setting", "chain") if results.header.get("tune") else COLUMNS


def write_table(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write one row per run: as CSV, or as one JSON object per line if the name ends in ``.jsonl``. pandas reads both.

    Args:
        results: The race.
        path: Where.

    Raises:
        ResultsError: If the name ends in neither.

    >>> from moduli.lab import race
    >>> path = write_table(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, budget=50, workers=0), "runs.csv")
    >>> path.read_text().splitlines()[0]
    'problem,contender,source,seed,reason,value,evaluations,gradients,steps,seconds,detail'
    """
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl"):
        raise ResultsError(f"{path} says no format: a table ends in .csv or .jsonl")
    rows, text = flat_rows(results), io.StringIO()
    if path.suffix == ".csv":
        writer = csv.DictWriter(text, get_columns(results), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return write_file(path, text.getvalue().encode() or b"".join(map(to_line, rows)))


def start_file(results: Results, path: str | os.PathLike[str], resume: bool) -> BinaryIO:
    """Write the file of a race, and open it so that finished runs can be appended.

    Args:
        results: The race; with `resume` the runs of the file are added to it.
        path: The file.
        resume: Whether to keep what is there, if it is the same race.
    """
    path, header = Path(path), results.header
    if resume and path.exists() and path.stat().st_size:
        old = Results.read(path)
        for key in ("budget", "seconds", "threads", "target", "tune", "ranges"):
            if old.header.get(key) != header.get(key):
                fact = f"{path} holds a race with {key} {cut(str(old.header.get(key)), 200)}, this one has {header.get(key)}"
                raise ResultsError(f"{fact}: its runs cannot be compared. Give the same, or another file")
        _check_runs(path, old, results)
        results.take(old.runs)
    # The old file is replaced only when the new one, with all of its runs, is on the disk.
    return write_file(path, b"".join(map(to_line, (header, *results.runs)))).open("ab", buffering=0)


def _check_runs(path: Path, old: Results, new: Results) -> None:
    """Raise ResultsError if runs of a file are those of another problem of the same name, or not of the race at all."""
    references = {problem["name"]: problem.get("reference") for problem in new.header["problems"]}
    for problem in old.header["problems"]:
        name, saved = problem["name"], problem.get("reference")
        if saved != references.get(name, saved):
            fact = f"{path} holds runs on {cut(str(saved), 200)}, this race has {references[name]}"
            raise ResultsError(f"{fact}: another problem called {name!r}. Give another file")
    keys = set(new.keys())
    dropped = next((run for run in old.runs if old.key(run) not in keys), None)
    if dropped is not None:
        what = f"{cut(str(dropped['source']), 200)} on {cut(str(dropped['problem']), 200)}, seed {dropped['seed']}"
        raise ResultsError(f"{path} has a run that this race has not: {what}. It would be removed; give another file")


def write_file(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file, in one piece or not at all, in a directory that is made if it is missing."""
    make_directory(Path(path).parent)
    write_bytes(path, data)
    return Path(path)


def to_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of the file."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"


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


def _write_cell(value: Any) -> str:
    """Return a text, or a number in four digits; "-" for None."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


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
    index, keys = {Results.key(run): run["history"] for run in results.runs}, results.keys()
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
