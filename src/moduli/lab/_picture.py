"""A race as one picture: for a page that shows what a race is. matplotlib draws it."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from ..io import make_directory, write_bytes
from ._report import report_data
from ._results import Results
from ._statistics import QUARTILES, profiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c08a00", "#0b8f9c", "#c2255c", "#6b5b4d")
SOLVED = 1e-3
# Letters stay letters, and equal races give equal bytes.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "moduli", "font.size": 9.0, "axes.titleweight": "bold"}


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

    path = Path(path)
    kind = path.suffix.lstrip(".") or "svg"
    held = io.BytesIO()
    with rc_context(STYLE):
        picture(results).savefig(held, format=kind, metadata={"Date": None} if kind == "svg" else None)
    make_directory(path.parent)
    write_bytes(path, held.getvalue())
    return path


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
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    data = report_data(results)
    # There are eight clear colours; from the ninth contender on, lines are dashed, as in the report.
    styles: list[dict[str, Any]] = [
        {"color": COLOURS[at % len(COLOURS)], "linestyle": "-" if at < len(COLOURS) else "--", "linewidth": 1.6}
        for at in range(len(data["contenders"]))
    ]
    flat = [problem for problem in data["problems"] if problem["window"]]
    problem = (flat or data["problems"])[0]
    figure = Figure(figsize=(12.0, 4.9), layout="constrained")
    panels = list(figure.subplots(1, 3 if flat else 2))
    if flat:
        _draw_map(panels.pop(0), problem, styles)
    _draw_curves(panels[0], problem, styles)
    _draw_profiles(panels[1], profiles(results, SOLVED), styles)
    names = [entry["label"] for entry in data["contenders"]]
    labels = [name if len(name) <= 30 else f"{name[:29]}…" for name in names]
    lines = [Line2D([], [], **style) for style in styles]
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=min(6, len(lines)), frameon=False)
    for text in (*legend.get_texts(), *(panel.title for panel in figure.axes)):
        text.set_parse_math(False)  # names are text, also with a dollar in them
    return figure


def _draw_map(panel: Axes, problem: dict[str, Any], styles: list[dict[str, Any]]) -> None:
    window = x0, x1, y0, y1 = problem["window"]
    if problem["map"] is not None:
        size, held = problem["map"]["size"], base64.b64decode(problem["map"]["bytes"])
        heights = numpy.frombuffer(held, dtype=numpy.uint8).reshape(size, size)
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


def _draw_curves(panel: Axes, problem: dict[str, Any], styles: list[dict[str, Any]]) -> None:
    shift = problem["optimum"] if problem["exact"] and problem["optimum"] is not None else 0.0
    for curve in problem["curves"]:
        data, style = curve["evaluations"], styles[curve["series"]]
        median, lower, upper = (
            [numpy.nan if value is None else max(value - shift, 1e-16) for value in data[key]] for key in QUARTILES
        )
        panel.plot(data["x"], median, **style)
        panel.fill_between(data["x"], lower, upper, color=style["color"], alpha=0.13, linewidth=0)
    panel.set(xscale="log", yscale="log", xlabel="evaluations", title=f"{problem['name']}: loss")
    panel.grid(alpha=0.3)


def _draw_profiles(panel: Axes, found: list[dict[str, Any]], styles: list[dict[str, Any]]) -> None:
    end = max(3.0, *(series["x"][-1] for series in found))
    for series, style in zip(found, styles, strict=True):
        panel.step([*series["x"], end], [*series["y"], series["y"][-1]], where="post", **style)
    panel.set(
        xscale="log", ylim=(0, 1.02), xlabel="times the evaluations of the best", title="all problems: part solved"
    )
    panel.grid(alpha=0.3)
