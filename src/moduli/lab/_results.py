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

from .._html import write_frame, write_html_table
from .._texts import cut, shorten
from ..io import CheckpointError, make_directory, read_bytes, write_bytes
from ._run import RunReason
from ._statistics import summary
from .problems import Problem

RunKey = tuple[Any, ...]
COLUMNS = (
    "problem", "contender", "source", "seed", "reason", "value", "evaluations", "gradients", "steps", "seconds", "detail",
)  # fmt: skip

FORMAT = 2

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


def _write_cell(value: Any) -> str:
    """Return a text, or a number in four digits; "-" for None."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"
