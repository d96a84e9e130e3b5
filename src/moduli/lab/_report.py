"""The report of a race: one HTML file that needs nothing else."""

import base64
import html
import json
import math
import os
import re
import shlex
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..io import make_directory, write_bytes
from ._results import Results
from ._statistics import TOLERANCES, curves, profiles, summary
from .problems import Problem, get

MAP = 112


def write_report(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the report of a race to a file, in one piece or not at all.

    Args:
        results: The race, finished or not.
        path: Where.

    Returns:
        The path.

    >>> from moduli.lab import race
    >>> write_report(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, workers=0), "race.html").stat().st_size > 10_000
    True
    """
    path = Path(path)
    make_directory(path.parent)
    write_bytes(path, report(results).encode())
    return path


def report(results: Results) -> str:
    """The report of a race as one HTML page: script, style and data are inside, nothing is loaded from elsewhere.

    Args:
        results: The race, finished or not.

    >>> from moduli.lab import race
    >>> page = report(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, workers=0))
    >>> page[:15], "http://" in page.replace("http://www.w3.org/", "")
    ('<!doctype html>', False)
    """
    assets = files(__package__) / "assets"
    parts = {name: (assets / f"report.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    # Inside a script element only "</" and "<!--" could end the data early; JSON may spell "<" otherwise.
    data = json.dumps(report_data(results), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    header = results.header
    title = f"moduli race: {len(header['contenders'])} optimizers on {len(header['problems'])} problems"
    parts |= {"title": html.escape(title), "data": data}
    # In one pass: what is put in is text, also if it looks like a place to fill.
    return re.sub(r"\{\{(title|css|data|js)\}\}", lambda mark: parts[mark[1]], parts["html"])


def command_for(header: dict[str, Any], problem: dict[str, Any], contender: dict[str, Any]) -> str:
    """The command that does the runs of one curve again.

    >>> command_for({"seeds": [0, 1], "budget": None, "seconds": 30.0, "threads": 1},
    ...             {"reference": "rosenbrock"}, {"source": "Adam | LR(0.01)"})
    "moduli race rosenbrock --with 'Adam | LR(0.01)' --seeds 2"
    """
    seeds = header["seeds"]
    counted = seeds == list(range(len(seeds)))
    words = ["moduli", "race", problem["reference"], "--with", contender["source"]]
    words += ["--seeds", str(len(seeds)) if counted else ",".join(map(str, seeds))]
    words += [] if header["budget"] is None else ["--budget", str(header["budget"])]
    words += [] if header["seconds"] == 30.0 else ["--seconds", f"{header['seconds']:g}"]
    words += [] if header.get("target") is None else ["--target", f"{header['target']:g}"]
    words += [] if header["threads"] == 1 else ["--threads", str(header["threads"])]
    return shlex.join(words)


def report_data(results: Results) -> dict[str, Any]:
    """Everything that is drawn of a race; contenders are series, by number."""
    header, rows = results.header, summary(results)
    series = {contender["source"]: number for number, contender in enumerate(header["contenders"])}
    courses = {problem["name"]: problem for problem in header["problems"]}
    keys = ("seed", "value", "evaluations", "gradients", "steps", "seconds", "reason", "detail", "traceback")
    for row in rows:
        row["command"] = command_for(header, courses[row["problem"]], row)
        row["series"] = series[row["source"]]
        runs = [run for run in results.runs if (run["problem"], run["source"]) == (row["problem"], row["source"])]
        row["details"] = [{key: run[key] for key in keys} for run in runs]
    told = ("started", "versions", "machine", "seeds", "budget", "seconds", "threads", "contenders")
    return {
        "command": shlex.join(header["command"]),
        **{key: header[key] for key in told},
        "complete": results.complete,
        "finished": len(results.runs),
        "problems": [_problem(results, problem, series) for problem in header["problems"]],
        "profiles": [{"tolerance": tol, "series": profiles(results, tol)} for tol in TOLERANCES],
        "rows": rows,
    }


def _problem(results: Results, problem: dict[str, Any], series: dict[str, int]) -> dict[str, Any]:
    found = curves(results, problem["name"])
    for curve in found:
        curve["series"] = series[curve["source"]]
    if not problem["window"]:
        return {**problem, "curves": found}
    keys = product([problem["name"]], series, results.header["seeds"][:1])
    index = {Results.key(run): run for run in results.runs}
    runs = [(series[key[1]], index[key]) for key in keys if key in index]
    return {
        **problem,
        "curves": found,
        "map": _map(problem, results.problems.get(problem["name"])),
        "paths": [{"series": number, "points": run["path"]} for number, run in runs if "path" in run],
        "clouds": [
            {"series": number, "generations": run["generations"], "frames": run["cloud"]}
            for number, run in runs
            if "cloud" in run
        ],
    }


def _map(problem: dict[str, Any], course: Problem | None) -> dict[str, Any] | None:
    """The function over its window as size x size bytes, row by row from the top, on a scale on which all of it can be seen.

    Args:
        problem: What the results say about it.
        course: The problem itself, where it was raced on here. Otherwise only the names of the catalogue are looked up: a file
            that results name is never run.
    """
    if course is None:
        try:
            course = get(problem["reference"])
        except LookupError:
            return None
    x0, x1, y0, y1 = problem["window"]
    x = torch.linspace(x0, x1, MAP, dtype=torch.float64)
    y = torch.linspace(y1, y0, MAP, dtype=torch.float64)
    with torch.no_grad():
        values = course.landscape(torch.stack(torch.meshgrid(x, y, indexing="xy"), -1))
    gap = values - min(float(values.min()), math.inf if problem["optimum"] is None else problem["optimum"])
    height = torch.log(gap + 0.01 * gap.median() + 1e-12)
    height = (height - height.min()) / (height.max() - height.min())
    return {"size": MAP, "bytes": base64.b64encode((255 * height).byte().numpy().tobytes()).decode()}
