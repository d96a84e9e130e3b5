"""The file of a race: one line that says what is raced, then one line per finished run.

A line is appended in one write when its run has ended, so whatever kills the race leaves all finished runs. A last line that
was cut short is dropped when the file is next read.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from ..io import make_directory, write_bytes
from ._meter import RunReason
from .problems import Problem

COLUMNS = (
    "problem", "contender", "source", "seed", "reason", "value", "evaluations", "gradients", "steps", "seconds", "detail",
)  # fmt: skip

FORMAT = 1

# What every reader of results relies on: types, and lists and mappings of them. A key with a question mark may be missing.
_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_PLACES = {"path?": [[_NUMBER]], "cloud?": [[[_NUMBER]]], "generations?": [_NUMBER]}
_HEADER: Any = {
    "format": int, "command": [str], "started": str, "seeds": [int], "budget": _MAYBE, "seconds": _NUMBER, "threads": int,
    "target?": _MAYBE, "versions": dict, "machine": dict, "contenders": [{"source": str, "label": str}],
    "problems": [
        {
            "name": str, "reference": str, "optimum": _MAYBE, "exact": bool, "tolerance": _NUMBER, "noisy": bool,
            "window": (list, type(None)), "minimisers": [[_NUMBER]],
        }
    ],
}  # fmt: skip
_RUN: Any = {
    "problem": str, "contender": str, "source": str, "seed": int, "reason": str, "detail": str, "traceback": str, "value": _MAYBE,
    "evaluations": _NUMBER, "gradients": _MAYBE, "steps": _MAYBE, "seconds": _MAYBE, "history": [[_MAYBE]], **_PLACES,
}  # fmt: skip


class ResultsError(ValueError):
    """A file that holds no race, or another race than the one to be continued.

    >>> print(ResultsError("race.jsonl holds no race"))
    race.jsonl holds no race
    """


def environment() -> dict[str, Any]:
    """Versions and machine.

    >>> sorted(environment())
    ['machine', 'versions']
    """
    from .._version import __version__

    return {
        "versions": {
            "moduli": __version__,
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
        },
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # only Linux has this file; the name of the architecture serves elsewhere
    return platform.processor() or platform.machine()


@dataclass
class Results:
    """What a race is, and the runs that have finished.

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

    @staticmethod
    def key(run: dict[str, Any]) -> tuple[str, str, int]:
        """What makes a run this run and no other."""
        return run["problem"], run["source"], run["seed"]

    def keys(self) -> set[tuple[str, str, int]]:
        """The keys of all runs that the race is made of, finished or not."""
        head = self.header
        return {
            (problem["name"], contender["source"], seed)
            for problem in head["problems"]
            for contender in head["contenders"]
            for seed in head["seeds"]
        }

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
        data = Path(path).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line, parse_float=_finite, parse_constant=_finite)
                kind = record["kind"]
                if kind == "race" and record["format"] > FORMAT:
                    raise ResultsError(f"{path} has format {record['format']}; this moduli reads up to {FORMAT}")
                if kind == "race":
                    header = _check_header(record)
                elif kind == "run":
                    runs[cls.key(record)] = _check_run(record)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, ResultsError):
                    raise
                raise ResultsError(f"line {number} of {path} is no line of a race ({error})") from error
        if header is None:
            raise ResultsError(f"{path} holds no race")
        results = cls(header)
        wanted = results.keys()
        results.runs = [run for key, run in runs.items() if key in wanted]
        results.sort()
        return results

    def sort(self) -> None:
        """Put runs in the order of the header, whatever order they finished in."""
        problems = {problem["name"]: i for i, problem in enumerate(self.header["problems"])}
        contenders = {contender["source"]: i for i, contender in enumerate(self.header["contenders"])}
        self.runs.sort(key=lambda run: (problems[run["problem"]], contenders[run["source"]], run["seed"]))

    @property
    def complete(self) -> bool:
        """Whether every run has finished."""
        return len(self.runs) == len(self.keys())

    def to_json(self) -> dict[str, Any]:
        """One object with everything: the header, the runs, and the summary per problem and contender."""
        from ._statistics import summary

        return {**self.header, "complete": self.complete, "runs": self.runs, "summary": summary(self)}


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no finite number")
    return float(text)


def _check_header(record: dict[str, Any]) -> dict[str, Any]:
    _check_shape(record, _HEADER, "the race")
    for problem in record["problems"]:
        if problem["window"] is not None:
            _check_shape(problem["window"], [_NUMBER], "window")
            if len(problem["window"]) != 4:
                raise ValueError("a window has four sides")
    return record


def _check_run(record: dict[str, Any]) -> dict[str, Any]:
    _check_shape(record, _RUN, "a run")
    RunReason(record["reason"])
    for point in record["history"]:
        if len(point) != 3 or None in point[:2]:
            raise ValueError("a point of a history is a number of evaluations, seconds and a value")
    if ("cloud" in record) != ("generations" in record):
        raise ValueError("a cloud has generations")
    return record


def _check_shape(value: Any, shape: Any, what: str) -> None:
    """Refuse what is not as others rely on.

    Raises:
        TypeError: If it is something else.
        ValueError: If something is missing, or a number has no float.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise TypeError(f"{what} is no mapping")
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name in value:
                _check_shape(value[name], inner, name)
            elif name == key:
                raise ValueError(f"{what} has no {name!r}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise TypeError(f"{what} is no list")
        for each in value:
            _check_shape(each, shape[0], what)
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        raise TypeError(f"{what} is {type(value).__name__}")
    elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{what} is no finite number")


def flat_rows(results: Results) -> list[dict[str, Any]]:
    """One row per run, made of numbers and texts only: for tables.

    >>> from moduli.lab import race
    >>> row = flat_rows(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, budget=50, workers=0))[0]
    >>> row["problem"], row["seed"], row["evaluations"]
    ('sphere-10', 0, 48)
    """
    return [{name: run.get(name) for name in COLUMNS} for run in results.runs]


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
    check_table(path)
    text = io.StringIO()
    if path.suffix == ".csv":
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat_rows(results))
    else:
        text.writelines(json.dumps(row, allow_nan=False) + "\n" for row in flat_rows(results))
    make_directory(path.parent)
    write_bytes(path, text.getvalue().encode())
    return path


def check_table(path: Path) -> None:
    """Refuse a name that says no format.

    >>> check_table(Path("runs.csv"))
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise ResultsError(f"{path} says no format: a table ends in .csv or .jsonl")


class Writer:
    """Appends to the file of a race.

    Args:
        path: The file, or None to keep nothing.
        header: What is raced.
        resume: Whether to keep what is there, if it is the same race.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: dict[str, Any], resume: bool = False) -> None:
        self.descriptor: int | None = None
        self.results = Results(header)
        if path is None:
            return
        path = Path(path)
        if resume and path.exists() and path.stat().st_size:
            wanted = self.results.keys()
            self.results.runs = [run for run in self._same(path, header).runs if Results.key(run) in wanted]
            self.results.sort()
        # A new file takes the place of the old one only when all that is kept is on the disk.
        make_directory(path.parent)
        write_bytes(path, b"".join(_line(record) for record in (header, *self.results.runs)))
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    @staticmethod
    def _same(path: Path, header: dict[str, Any]) -> Results:
        old = Results.read(path)
        for key in ("budget", "seconds", "threads", "target"):
            if old.header.get(key) != header[key]:
                raise ResultsError(
                    f"{path} holds a race with {key} {old.header.get(key)}, this one has {header[key]}: its runs cannot be "
                    "compared. Give the same, or another file"
                )
        return old

    def append(self, run: dict[str, Any]) -> None:
        """Keep a finished run."""
        self.results.runs.append(run)
        if self.descriptor is not None:
            os.write(self.descriptor, _line(run))

    def close(self) -> Results:
        """Close the file and give the results, sorted."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.results.sort()
        return self.results


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
