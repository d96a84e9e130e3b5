"""A race as tables: one of medians with intervals for a paper, the curves as CSV, and all curves as one labelled tensor."""

from __future__ import annotations

import csv
import io
import math
import os
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy
import torch

from ..labels import Tensor, tensor
from ._results import Results, ResultsError, write_file
from ._run import drop_infinite
from ._scores import choose_winners
from ._statistics import read_final, summary

TABLE_FORMS = ("csv", "md", "latex")
"""The forms in which `summary_table` writes a table."""

ENDINGS = {".csv": "csv", ".md": "md", ".tex": "latex"}
DRAWS = 2000
# Points of the grid that `load` puts all curves on; a race of fewer evaluations has one point for each.
POINTS = 400
HEADS = ("problem", "optimizer", "value", "interval", "evaluations", "seconds", "solved")


def summary_table(results: Results, form: str = "md") -> str:
    """Return one row per problem and contender: the median value, its 95% interval, evaluations and seconds.

    The interval is that of a bootstrap over seeds; with three seeds it goes from the least value to the largest. The best value of
    each problem is bold in Markdown and LaTeX, and so is every value whose interval overlaps that of the best.

    Args:
        results: The race; of a tuned race the best setting of each study counts.
        form: ``"csv"``, ``"md"`` or ``"latex"``. LaTeX needs the package ``booktabs``.

    Raises:
        ResultsError: If the form is none of these.

    >>> from moduli.lab import race
    >>> print(summary_table(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=2, workers=0), "csv").splitlines()[0])
    problem,optimizer,value,low,high,evaluations,seconds,solved,runs,best
    """
    if form not in TABLE_FORMS:
        raise ResultsError(f"a table is {', '.join(TABLE_FORMS)}, not {form!r}")
    rows = _list_rows(results)
    if form == "csv":
        text = io.StringIO()
        heads = ("problem", "optimizer", "value", "low", "high", "evaluations", "seconds", "solved", "runs", "best")
        writer = csv.DictWriter(text, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: row[key] for key in heads} for row in rows)
        return text.getvalue()
    cells = [_format_cells(row, form) for row in rows]
    if form == "md":
        lines = [HEADS, ("---", "---", *["---:"] * 5), *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    body = "\n".join(" & ".join(line) + r" \\" for line in cells)
    head = " & ".join(HEADS) + r" \\"
    return (
        "% \\usepackage{booktabs}\n\\begin{tabular}{llrrrrr}\n\\toprule\n"
        f"{head}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
    )


def _list_rows(results: Results) -> list[dict[str, Any]]:
    """Return the rows of `summary` with the interval of each value, and whether it is tied with the best of its problem."""
    winners = choose_winners(results)
    values: dict[tuple[str, str], list[float]] = {}
    for run in winners.runs:
        values.setdefault((run["problem"], run["source"]), []).append(read_final(run))
    rows = []
    for row in summary(winners):
        low, high = _find_interval(values[row["problem"], row["source"]])
        rows.append({**row, "optimizer": row["contender"], "value": row["median"], "low": low, "high": high})
    for row in rows:
        solved = row["reached"]
        row["solved"] = "" if solved is None else solved
        rows_of_problem = [each for each in rows if each["problem"] == row["problem"] and each["value"] is not None]
        best = min(rows_of_problem, key=lambda each: each["value"], default=None)
        row["best"] = best is not None and row["value"] is not None and _overlap(row, best)
    return rows


def _overlap(row: dict[str, Any], best: dict[str, Any]) -> bool:
    """Whether the interval of a value overlaps that of the best one."""
    return row is best or (row["low"] is not None and best["high"] is not None and row["low"] <= best["high"])


def _find_interval(values: list[float]) -> tuple[float | None, float | None]:
    """Return the 95% interval of the median, by drawing runs again with replacement."""
    array = numpy.asarray(values)
    drawn = numpy.random.default_rng(0).integers(len(array), size=(DRAWS, len(array)))
    medians = numpy.sort(numpy.median(array[drawn], 1))
    low, high = medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]
    return drop_infinite(float(low)), drop_infinite(float(high))


def _format_cells(row: dict[str, Any], form: str) -> list[str]:
    """Return the texts of a row in Markdown or LaTeX."""

    def show(value: float | None, digits: int = 4) -> str:
        return "-" if value is None else f"{value:.{digits}g}"

    value = show(row["value"])
    texts = [row["problem"], row["optimizer"]]
    if form == "latex":
        texts = [_escape(text) for text in texts]
        value = rf"\textbf{{{value}}}" if row["best"] else value
    else:
        texts = [text.replace("|", "\\|") for text in texts]
        value = f"**{value}**" if row["best"] else value
    solved = "-" if row["solved"] == "" else f"{row['solved']}/{row['runs']}"
    interval = f"[{show(row['low'], 3)}, {show(row['high'], 3)}]"
    return [*texts, value, interval, show(row["evaluations"], 6), show(row["seconds"], 3), solved]


def _escape(text: str) -> str:
    """Return text in which the special characters of LaTeX are escaped."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
    special |= {"|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}"}
    return "".join(special.get(letter, letter) for letter in text)


def write_summary(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write `summary_table` to a file; its ending says the form: ``.csv``, ``.md`` or ``.tex``.

    Args:
        results: The race.
        path: Where.

    Raises:
        ResultsError: If the name ends in none of these.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise ResultsError(f"{path} says no format: the table of a paper ends in {' or '.join(ENDINGS)}")
    return write_file(path, summary_table(results, ENDINGS[path.suffix]).encode())


def write_curves(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the points of all learning curves as CSV: problem, contender, seed, evaluations, seconds and the best value so far.

    Args:
        results: The race; of a tuned race all settings, with their numbers and chains.
        path: Where.

    Returns:
        The path.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    more = ("setting", "chain") if results.header.get("tune") else ()
    writer.writerow(("problem", "contender", "seed", *more, "evaluations", "seconds", "value"))
    for run in results.runs:
        names = [run.get(key) for key in ("problem", "contender", "seed", *more)]
        writer.writerows((*names, *point) for point in run["history"])
    return write_file(path, text.getvalue().encode())


def load(path: str | os.PathLike[str] | Results) -> Tensor:
    """Return the learning curves of a race as one labelled tensor over problem, contender, seed and evaluation.

    An entry is the best value of the run after that many evaluations; NaN where it had none that is finite, or has not been done. A
    run that ended keeps its last value. All runs have the same grid of evaluations, uniform in the logarithm.

    Args:
        path: The file of the race, or results; of a tuned race the best setting of each study counts.

    Raises:
        ResultsError: When the file holds no race.

    >>> from moduli.lab import race
    >>> curves = load(race(["sphere-10", "levy-10"], ["LR(0.1)", "Adam | LR(0.1)"], seeds=2, budget=30, workers=0))
    >>> curves.names, tuple(curves.shape)
    (('problem', 'contender', 'seed', 'evaluation'), (2, 2, 2, 31))
    >>> best = curves.sel(problem="levy-10", evaluation=30).min("seed")
    """
    results = choose_winners(path if isinstance(path, Results) else Results.read(path))
    header = results.header
    problems = [problem["name"] for problem in header["problems"]]
    labels, sources = (
        [entry["label"] for entry in header["contenders"]],
        [entry["source"] for entry in header["contenders"]],
    )
    if len(set(labels)) < len(labels):
        labels = sources
    seeds = sorted(header["seeds"])
    last = max((run["history"][-1][0] for run in results.runs if run["history"]), default=0)
    grid = (
        list(range(last + 1))
        if last < POINTS
        else [0, *sorted({round(last ** (at / (POINTS - 2))) for at in range(POINTS - 1)})]
    )
    values = torch.full((len(problems), len(labels), len(seeds), len(grid)), math.nan, dtype=torch.float64)
    for run in results.runs:
        at = problems.index(run["problem"]), sources.index(run["source"]), seeds.index(run["seed"])
        values[at] = torch.tensor([_find_value(run["history"], count) for count in grid], dtype=torch.float64)
    return tensor(values, problem=problems, contender=labels, seed=seeds, evaluation=grid)


def _find_value(history: list[list[Any]], count: int) -> float:
    """Return the best value after `count` evaluations, or NaN."""
    position = bisect_right(history, count, key=lambda point: point[0])
    value = history[position - 1][2] if position else None
    return math.nan if value is None else float(value)
