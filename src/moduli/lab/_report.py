"""The report of a race: one HTML file that needs nothing else; and the race as one picture, which matplotlib draws."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import re
import shlex
from dataclasses import asdict
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from .._figures import make_axes
from ._paper import use_log_axes
from ._results import Results, write_file
from ._scores import choose_winners, find_shift, shift_values
from ._standings import chosen_settings, sensitivity, standings, tuning_gains
from ._statistics import QUARTILES, TOLERANCES, curves, profiles, summary
from .problems import Problem, get

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAP = 112
COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c08a00", "#0b8f9c", "#c2255c", "#6b5b4d")
SOLVED = 1e-3
# Text stays text in the SVG, and a fixed salt makes equal races give equal bytes.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "moduli", "font.size": 9.0, "axes.titleweight": "bold"}


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
    return write_file(path, report(results).encode())


def report(results: Results) -> str:
    """Return the report of a race as one HTML page: script, style and data are inside, nothing is loaded from elsewhere.

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
    # In one pass, so that placeholders in the inserted texts are not replaced.
    return re.sub(r"\{\{(title|css|data|js)\}\}", lambda mark: parts[mark[1]], parts["html"])


def command_for(header: dict[str, Any], problem: dict[str, Any], contender: dict[str, Any]) -> str:
    """Return the command that does the runs of one curve again.

    Args:
        header: The header of the race.
        problem: The problem's entry in the header.
        contender: The contender's entry in the header.

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
    """Return the data of the report for JSON; contenders are numbered series. A tuned race has the curves of the best settings."""
    whole, results = results, choose_winners(results)
    header, rows = results.header, summary(results)
    series = {contender["source"]: number for number, contender in enumerate(header["contenders"])}
    problems = {problem["name"]: problem for problem in header["problems"]}
    keys = ("seed", "value", "evaluations", "gradients", "steps", "seconds", "reason", "detail", "traceback", "chain")
    for row in rows:
        row["command"] = command_for(header, problems[row["problem"]], row)
        row["series"] = series[row["source"]]
        runs = [run for run in results.runs if (run["problem"], run["source"]) == (row["problem"], row["source"])]
        row["details"] = [{key: run[key] for key in keys if key in run} for run in runs]
    header_keys = ("started", "versions", "machine", "seeds", "budget", "seconds", "threads", "contenders")
    return {
        "command": shlex.join(header["command"]),
        **{key: header[key] for key in header_keys},
        "complete": whole.complete,
        "finished": len(whole.runs),
        "expected": len(whole.keys()),
        "standings": [{**asdict(row), "series": series[row.source]} for row in standings(whole)] if whole.runs else [],
        "tuning": _describe_tuning(whole, series) if whole.header.get("tune") else None,
        "problems": [
            {
                **_describe_curves(results, problem, series),
                **dict(zip(("shift", "loss"), find_shift(whole, problem), strict=True)),
            }
            for problem in header["problems"]
        ],
        "profiles": [{"tolerance": tol, "series": profiles(results, tol)} for tol in TOLERANCES],
        "rows": rows,
    }


def _describe_tuning(results: Results, series: dict[str, int]) -> dict[str, Any]:
    """Return the data of the tuning: sensitivity by problem, the chosen settings, and how much they helped."""
    names = [problem["name"] for problem in results.header["problems"]]
    lines = {name: sensitivity(results, name) for name in names}
    chosen: dict[tuple[str, str], list[str]] = {}
    for row in chosen_settings(results):
        chosen.setdefault((row["problem"], row["contender"]), []).append(f"seed {row['seed']}: {row['chain']}")
    gains = tuning_gains(results)
    return {
        "settings": results.header["tune"],
        "sensitivity": {
            name: [{**line, "series": series[line["source"]]} for line in problem_lines]
            for name, problem_lines in lines.items()
        },
        "gains": [
            {**gain, "series": series[gain["source"]], "chosen": chosen.get((gain["problem"], gain["contender"]), [])}
            for gain in gains
        ],
    }


def _describe_curves(results: Results, problem: dict[str, Any], series: dict[str, int]) -> dict[str, Any]:
    """Return the data of one problem: its curves, and for a function of two numbers the map, paths and clouds."""
    rows = curves(results, problem["name"])
    for curve in rows:
        curve["series"] = series[curve["source"]]
    if not problem["window"]:
        return {**problem, "curves": rows}
    keys = product([problem["name"]], series, results.header["seeds"][:1])
    index = {Results.key(run): run for run in results.runs}
    runs = [(series[key[1]], index[key]) for key in keys if key in index]
    return {
        **problem,
        "curves": rows,
        "map": _encode_map(problem, results.problems.get(problem["name"])),
        "paths": [{"series": number, "points": run["path"]} for number, run in runs if "path" in run],
        "clouds": [
            {"series": number, "generations": run["generations"], "frames": run["cloud"]}
            for number, run in runs
            if "cloud" in run
        ],
    }


def _encode_map(problem: dict[str, Any], function: Problem | None) -> dict[str, Any] | None:
    """Return the function over its window as size x size bytes, row by row from the top, on a logarithmic scale.

    Args:
        problem: What the results say about it.
        function: The problem itself, if the race ran in this process. Otherwise the problem is looked up by name, and None is
            returned if no problem has it: a file that results name is never run.
    """
    if function is None:
        try:
            function = get(problem["reference"])
        except LookupError:
            return None
    x0, x1, y0, y1 = problem["window"]
    x = torch.linspace(x0, x1, MAP, dtype=torch.float64)
    y = torch.linspace(y1, y0, MAP, dtype=torch.float64)
    with torch.no_grad():
        values = function.landscape(torch.stack(torch.meshgrid(x, y, indexing="xy"), -1))
    gap = values - min(float(values.min()), math.inf if problem["optimum"] is None else problem["optimum"])
    height = torch.log(gap + 0.01 * gap.median() + 1e-12)
    height = (height - height.min()) / (height.max() - height.min())
    return {"size": MAP, "bytes": base64.b64encode((255 * height).byte().numpy().tobytes()).decode()}


def write_picture(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write `picture` to a file, in one piece or not at all.

    Args:
        results: The race.
        path: Where; the ending says the format: ``.svg``, ``.png``, ``.pdf``.

    Raises:
        ModuleNotFoundError: Without matplotlib, which ``moduli[docs]`` brings.
        ValueError: If matplotlib knows no format of this ending.

    >>> from moduli.lab import race
    >>> write_picture(race(["rosenbrock"], ["torch.SGD(lr=0.001)"], seeds=1, workers=0), "race.svg").stat().st_size > 2000
    True
    """
    from matplotlib import rc_context

    kind = Path(path).suffix.lstrip(".") or "svg"
    buffer = io.BytesIO()
    with rc_context(STYLE):
        picture(results).savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return write_file(path, buffer.getvalue())


def picture(results: Results) -> Figure:
    """Draw a race: the paths over the first map, the curves of the same problem, and the performance profiles.

    Without a problem of two numbers there is no map, and the curves are those of the first problem.

    Args:
        results: The race.

    Returns:
        A figure of matplotlib.

    >>> from moduli.lab import race
    >>> len(picture(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, workers=0)).axes)
    2
    """
    data = report_data(results)
    # There are eight clear colours; from the ninth contender on, lines are dashed, as in the report.
    styles: list[dict[str, Any]] = [
        {"color": COLOURS[at % len(COLOURS)], "linestyle": "-" if at < len(COLOURS) else "--", "linewidth": 1.6}
        for at in range(len(data["contenders"]))
    ]
    flat = [problem for problem in data["problems"] if problem["window"]]
    problem = (flat or data["problems"])[0]
    panels = list(make_axes(None, (12.0, 4.9), ncols=3 if flat else 2))
    figure = panels[0].figure
    from matplotlib.lines import Line2D

    if flat:
        _draw_map(panels.pop(0), problem, styles)
    _draw_curves(panels[0], problem, styles)
    _draw_profiles(panels[1], profiles(results, SOLVED), styles)
    for panel in panels:
        panel.grid(alpha=0.3)
    names = [entry["label"] for entry in data["contenders"]]
    labels = [name if len(name) <= 30 else f"{name[:29]}…" for name in names]
    lines = [Line2D([], [], **style) for style in styles]
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=min(6, len(lines)), frameon=False)
    for text in (*legend.get_texts(), *(panel.title for panel in figure.axes)):
        text.set_parse_math(False)  # names are text, also with a dollar in them
    return figure  # type: ignore[no-any-return]


def _draw_curves(panel: Axes, problem: dict[str, Any], styles: list[dict[str, Any]]) -> None:
    """Draw the medians of a problem with their quartiles; `styles` has the lines of the series."""
    for curve in problem["curves"]:
        points, style = curve["evaluations"], styles[curve["series"]]
        median, lower, upper = (shift_values(points[key], problem, problem["shift"]) for key in QUARTILES)
        panel.plot(points["x"], median, **style)
        panel.fill_between(points["x"], lower, upper, color=style["color"], alpha=0.13, linewidth=0)
    use_log_axes(panel)
    panel.set(xlabel="evaluations", title=f"{problem['name']}: {problem['loss']}")


def _draw_profiles(panel: Axes, stairs: list[dict[str, Any]], styles: list[dict[str, Any]]) -> None:
    """Draw performance profiles; `styles` has the lines of the series."""
    end = max(3.0, *(series["x"][-1] for series in stairs))
    for series, style in zip(stairs, styles, strict=True):
        panel.step([*series["x"], end], [*series["y"], series["y"][-1]], where="post", **style)
    panel.set(xscale="log", ylim=(0, 1.02), xlabel="times the evaluations of the best")
    panel.set_title("all problems: part solved")


def _draw_map(panel: Axes, problem: dict[str, Any], styles: list[dict[str, Any]]) -> None:
    """Draw the map of a problem with the paths, clouds and minimisers; `styles` has the lines of the series."""
    window = x0, x1, y0, y1 = problem["window"]
    if problem["map"] is not None:
        size, data = problem["map"]["size"], base64.b64decode(problem["map"]["bytes"])
        heights = numpy.frombuffer(data, dtype=numpy.uint8).reshape(size, size)
        bands = panel.contourf(heights[::-1] / 18, range(15), cmap="Blues_r", vmin=-4, vmax=17, extent=window)
        bands.set_rasterized(True)
    for path in problem["paths"]:
        points, style = numpy.array(path["points"]), styles[path["series"]]
        panel.plot(points[:, 0], points[:, 1], **style)
        panel.plot(*points[-1], "o", color=style["color"], markersize=4)
    for cloud in problem["clouds"]:
        points = numpy.array(cloud["frames"][len(cloud["frames"]) // 4])
        panel.plot(points[:, 0], points[:, 1], "o", color=styles[cloud["series"]]["color"], markersize=3.5)
    for x, y in problem["minimisers"]:
        panel.plot(x, y, "+", color="white", markersize=11, markeredgewidth=2)
    panel.set(xlim=(x0, x1), ylim=(y0, y1), title=f"{problem['name']}: paths")
