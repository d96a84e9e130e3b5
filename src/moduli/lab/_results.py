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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from ..io import make_directory, write_bytes
from ._run import RunReason
from .problems import Problem

COLUMNS = (
    "problem", "contender", "source", "seed", "reason", "value", "evaluations", "gradients", "steps", "seconds", "detail",
)  # fmt: skip

FORMAT = 1

# What every reader of results relies on.
_HEADER = {
    "command", "started", "seeds", "budget", "seconds", "threads", "versions", "machine", "contenders", "problems",
}  # fmt: skip
_RUN = {*COLUMNS, "history", "traceback"}


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

    versions = {"moduli": __version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
    system, processor = f"{platform.system()} {platform.release()}", platform.processor() or platform.machine()
    return {
        "versions": {**versions, "python": platform.python_version()},
        "machine": {"system": system, "processor": processor, "cores": os.cpu_count()},
    }


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

    def keys(self) -> list[tuple[str, str, int]]:
        """The keys of all runs that the race is made of, finished or not."""
        problems, contenders = self.header["problems"], self.header["contenders"]
        found = product(problems, contenders, sorted(self.header["seeds"]))
        return [(problem["name"], contender["source"], seed) for problem, contender, seed in found]

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
                missing = (_HEADER if record["kind"] == "race" else _RUN) - record.keys()
                if missing:
                    raise ValueError(f"it has no {min(missing)!r}")
                if record["kind"] == "run":
                    RunReason(record["reason"])
                    runs[cls.key(record)] = record
                elif record["format"] > FORMAT:
                    raise ValueError(f"it has format {record['format']}; this moduli reads up to {FORMAT}")
                else:
                    header = record
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ResultsError(f"line {number} of {path} is no line of a race ({error})") from error
        if header is None:
            raise ResultsError(f"{path} holds no race")
        results = cls(header)
        results.take(runs.values())
        return results

    def take(self, runs: Iterable[dict[str, Any]]) -> None:
        """Hold those of these runs that the race is made of, in its order, whatever order they finished in."""
        index = {self.key(run): run for run in runs}
        self.runs = [index[key] for key in self.keys() if key in index]

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
    if path.suffix not in (".csv", ".jsonl"):
        raise ResultsError(f"{path} says no format: a table ends in .csv or .jsonl")
    rows, text = flat_rows(results), io.StringIO()
    if path.suffix == ".csv":
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    make_directory(path.parent)
    write_bytes(path, text.getvalue().encode() or b"".join(map(to_line, rows)))
    return path


def start_file(results: Results, path: str | os.PathLike[str], resume: bool) -> BinaryIO:
    """Write the file of a race to the end of which finished runs are to be written, and open it.

    Args:
        results: The race; with `resume` it takes the runs that the file has.
        path: The file.
        resume: Whether to keep what is there, if it is the same race.
    """
    path, header = Path(path), results.header
    if resume and path.exists() and path.stat().st_size:
        old = Results.read(path)
        for key in ("budget", "seconds", "threads", "target"):
            if old.header.get(key) != header[key]:
                fact = f"{path} holds a race with {key} {old.header.get(key)}, this one has {header[key]}"
                raise ResultsError(f"{fact}: its runs cannot be compared. Give the same, or another file")
        results.take(old.runs)
    # A new file takes the place of the old one only when all that is kept is on the disk.
    make_directory(path.parent)
    write_bytes(path, b"".join(to_line(record) for record in (header, *results.runs)))
    return path.open("ab", buffering=0)


def to_line(record: dict[str, Any]) -> bytes:
    """A line of the file."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
