"""The figures of a race one by one, for papers: learning curves and sensitivity of each problem, and the profile.

Fonts are embedded: PDF has them as TrueType, and in SVG letters are outlines, so that a figure looks the same everywhere.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from .._figures import make_axes
from ._results import Results, write_file
from ._scores import GOAL, choose_winners, find_shift, shift_values
from ._sketch import COLOURS
from ._standings import LARGEST_RATIO, sensitivity
from ._statistics import QUARTILES, curves, profiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "moduli", "font.size": 9.0}
SIZE = (4.2, 3.2)


def figures(results: Results) -> dict[str, Figure]:
    """Draw the figures of a race.

    Args:
        results: The race; of a tuned race curves and profile are those of the best settings.

    Returns:
        Figures of matplotlib by name: ``"curves-PROBLEM"`` for each problem, ``"sensitivity-PROBLEM"`` for each problem of a
        tuned race, and ``"profile"``.

    >>> from moduli.lab import race
    >>> list(figures(race(["sphere-10"], ["LR(0.1)"], seeds=1, budget=20, workers=0)))
    ['curves-sphere-10', 'profile']
    """
    from matplotlib import rc_context

    result: dict[str, Figure] = {}
    with rc_context(STYLE):
        for problem in results.header["problems"]:
            result[f"curves-{problem['name']}"] = _draw_curves(results, problem)
            lines = sensitivity(results, problem["name"]) if results.header.get("tune") else []
            if lines:
                result[f"sensitivity-{problem['name']}"] = _draw_sensitivity(results, problem, lines)
        result["profile"] = _draw_profile(results)
    return result


def write_figures(results: Results, path: str | os.PathLike[str]) -> list[Path]:
    """Write `figures` beside each other: ``race.pdf`` gives ``race-profile.pdf``, ``race-curves-digits-mlp.pdf`` and so on.

    Args:
        results: The race.
        path: The beginning of their names, with the ending that says the format: ``.pdf``, ``.svg`` or ``.png``.

    Returns:
        The paths.

    Raises:
        ModuleNotFoundError: Without matplotlib.
    """
    from matplotlib import rc_context

    path = Path(path)
    kind = path.suffix.lstrip(".")
    # Equal races give equal bytes: no dates.
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    written = []
    for name, figure in figures(results).items():
        data = io.BytesIO()
        with rc_context(STYLE):
            figure.savefig(data, format=kind, metadata=dates, dpi=200)
        part = name.replace("/", "-").replace(os.sep, "-")  # the name of a problem may contain a separator of paths
        written.append(write_file(path.with_name(f"{path.stem}-{part}{path.suffix}"), data.getvalue()))
    return written


def _find_styles(results: Results) -> dict[str, dict[str, Any]]:
    """Return colour and dashes of each contender, by its chain."""
    sources = [contender["source"] for contender in results.header["contenders"]]
    dashes = ("-", "--", ":", "-.")
    return {
        source: {
            "color": COLOURS[at % len(COLOURS)],
            "linestyle": dashes[at // len(COLOURS) % len(dashes)],
            "linewidth": 1.4,
        }
        for at, source in enumerate(sources)
    }


def _finish(panel: Any, **labels: str) -> Figure:
    """Set the labels of a panel, add grid and legend, and return its figure."""
    panel.set(**labels)
    panel.grid(alpha=0.3)
    names = panel.get_legend_handles_labels()[1]
    if names:
        legend = panel.legend(fontsize=7, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # names are text, also with a dollar in them
    panel.title.set_parse_math(False)
    return panel.figure  # type: ignore[no-any-return]


def use_log_axes(panel: Any) -> None:
    """Make an axis logarithmic if a line has a value above zero on it; without one, matplotlib can't draw such an axis.

    Args:
        panel: The axes of matplotlib.
    """
    points = [numpy.asarray(line.get_data(), dtype=float) for line in panel.lines]
    shown = [each[:, numpy.isfinite(each).all(0)] for each in points]
    for row, axis in enumerate(("x", "y")):
        if any((each[row] > 0).any() for each in shown):
            panel.set(**{f"{axis}scale": "log"})


def _draw_curves(results: Results, problem: dict[str, Any]) -> Figure:
    panel, styles = make_axes(None, SIZE), _find_styles(results)
    shift, name = find_shift(results, problem)
    for curve in curves(results, problem["name"]):
        points, style = curve["evaluations"], styles[curve["source"]]
        median, lower, upper = (shift_values(points[key], problem, shift) for key in QUARTILES)
        panel.plot(points["x"], median, label=curve["label"][:40], **style)
        panel.fill_between(points["x"], lower, upper, color=style["color"], alpha=0.13, linewidth=0)
    use_log_axes(panel)
    return _finish(panel, xlabel="evaluations", ylabel=name, title=problem["name"])


def _draw_sensitivity(results: Results, problem: dict[str, Any], lines: list[dict[str, Any]]) -> Figure:
    panel, styles = make_axes(None, SIZE), _find_styles(results)
    shift, name = find_shift(results, problem)
    for line in lines:
        y = shift_values(line["y"], problem, shift)
        panel.plot(line["x"], y, marker="o", markersize=3, label=line["label"][:40], **styles[line["source"]])
    use_log_axes(panel)
    numbers = dict.fromkeys(line["number"].rpartition(".")[2] for line in lines)
    return _finish(panel, xlabel=", ".join(numbers), ylabel=f"final {name}", title=problem["name"])


def _draw_profile(results: Results) -> Figure:
    panel, styles = make_axes(None, SIZE), _find_styles(results)
    for series in profiles(choose_winners(results), GOAL):
        inside = [at for at, x in enumerate(series["x"]) if x <= LARGEST_RATIO]
        x, y = [series["x"][at] for at in inside], [series["y"][at] for at in inside]
        panel.step(
            [*x, LARGEST_RATIO], [*y, y[-1]], where="post", label=series["label"][:40], **styles[series["source"]]
        )
    panel.set(xscale="log", xlim=(1, LARGEST_RATIO), ylim=(0, 1.02))
    panel.set_xticks([1, 2, 3, 4], ["1", "2", "3", "4"])
    panel.minorticks_off()
    return _finish(panel, xlabel="times the evaluations of the best", ylabel="part solved", title="all problems")
