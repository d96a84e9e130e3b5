"""Small pictures of lines, points and bands as SVG, drawn without a plotting library."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ._results import write_file

WIDTH, HEIGHT = 420.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 10.0, 8.0, 38.0
_ROW = 17.0
# As in the report of a race; a page that sets the variables has its own colours, also in the dark.
COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c08a00", "#0b8f9c", "#c2255c", "#6b5b4d")
_INK: Final = "var(--soft,currentColor)"


class SketchSeries(NamedTuple):
    """A line, points or a band; `low` and `high` are equal for lines and for points without errors."""

    kind: Literal["line", "points", "band"]
    x: list[float]
    low: list[float]
    high: list[float]
    label: str
    dashed: bool = False


class Sketch:
    """A picture with two axes; methods add to it, and `svg` draws it.

    Notebooks show it. Colours follow the page, so that it can be read in the light and in the dark. For anything beyond lines,
    points and bands use matplotlib.

    Args:
        x: What the horizontal axis says.
        y: What the vertical axis says.
        log: Whether the vertical axis is logarithmic; values that are not above zero are left out.
        equal: Whether one unit is as long on both axes.

    Example:
        >>> from moduli import lab
        >>> picture = lab.Sketch("time", "signal").add_line([0, 1, 2], [0.0, 1.0, 4.0], "squares")
        >>> "squares</text>" in picture.svg()
        True
    """

    def __init__(self, x: str = "", y: str = "", *, log: bool = False, equal: bool = False) -> None:
        if log and equal:
            raise ValueError("a unit has no length on a logarithmic axis: give log or equal, not both")
        self.x, self.y, self.log, self.equal = x, y, log, equal
        self.series: list[SketchSeries] = []

    def add_line(self, x: Any, y: Any, label: str = "", *, dashed: bool = False) -> Sketch:
        """Add a line; where a value is not finite, it has a gap.

        Args:
            x: Numbers: a tensor of any kind, an array or a sequence.
            y: As many numbers.
            label: What the legend says.
            dashed: Whether the line is dashed.

        Returns:
            This picture.
        """
        values = _read_numbers(y)
        return self._add(SketchSeries("line", _read_numbers(x), values, values, label, dashed))

    def add_points(self, x: Any, y: Any, label: str = "", *, errors: Any = None) -> Sketch:
        """Add points, with error bars if there are `errors`.

        Args:
            x: Numbers: a tensor of any kind, an array or a sequence.
            y: As many numbers.
            label: What the legend says.
            errors: Half the length of each error bar.

        Returns:
            This picture.
        """
        values = _read_numbers(y)
        sizes = [0.0] * len(values) if errors is None else _read_numbers(errors)
        if len(sizes) != len(values):
            raise ValueError(f"there are {len(values)} points and {len(sizes)} errors; give one for each point")
        low = [value - size for value, size in zip(values, sizes, strict=True)]
        high = [value + size for value, size in zip(values, sizes, strict=True)]
        return self._add(SketchSeries("points", _read_numbers(x), low, high, label))

    def add_band(self, x: Any, low: Any, high: Any, label: str = "") -> Sketch:
        """Add the area between two lines.

        Args:
            x: Numbers: a tensor of any kind, an array or a sequence.
            low: The lower line.
            high: The upper line.
            label: What the legend says.

        Returns:
            This picture.
        """
        return self._add(SketchSeries("band", _read_numbers(x), _read_numbers(low), _read_numbers(high), label))

    def _add(self, series: SketchSeries) -> Sketch:
        lengths = {len(series.x), len(series.low), len(series.high)}
        if len(lengths) > 1:
            raise ValueError(
                f"{series.label or series.kind}: x and y have {sorted(lengths)} numbers; give as many of each"
            )
        self.series.append(series)
        return self

    def svg(self) -> str:
        """Return the picture as an SVG element."""
        rows = _arrange_legend([series.label for series in self.series])
        top = _TOP + _ROW * len(rows)
        height = HEIGHT + _ROW * len(rows)
        box = (_LEFT, WIDTH - _RIGHT, height - _BOTTOM, top)
        horizontal, vertical = self._find_scales(box)
        parts = [
            f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" '
            f'style="width:100%;max-width:640px;font:11px system-ui,sans-serif" role="img" aria-label="{self._describe()}">',
            *_draw_axes(horizontal, vertical, box),
            _write_text((box[0] + box[1]) / 2, height - 6, self.x, "middle"),
            _write_text(0, 0, self.y, "middle", f"translate(11 {(box[2] + box[3]) / 2:.1f}) rotate(-90)"),
        ]
        for number, series in enumerate(self.series):
            parts += _draw_series(series, number, horizontal.place, vertical.place)
        for at, row in enumerate(rows):
            parts += [_draw_key(self.series[number], number, x, _TOP + _ROW * at + 6) for number, x in row]
        return "".join(parts) + "</svg>"

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture as an SVG file, and return its path."""
        return write_file(path, self.svg().encode())

    def _repr_html_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"Sketch({self.x!r}, {self.y!r}, series={[series.label or series.kind for series in self.series]})"

    def _describe(self) -> str:
        labels = ", ".join(series.label for series in self.series if series.label)
        return escape(f"{self.y} against {self.x}: {labels}")

    def _find_scales(self, box: tuple[float, float, float, float]) -> tuple[SketchScale, SketchScale]:
        left, right, bottom, top = box
        xs = [value for series in self.series for value in series.x if math.isfinite(value)]
        ys = [value for series in self.series for side in (series.low, series.high) for value in side]
        ys = [value for value in ys if math.isfinite(value) and (value > 0 or not self.log)]
        x_range, y_range = _pad_range(xs, False, 0.02), _pad_range(ys, self.log, 0.05)
        if self.equal:
            unit = max((x_range[1] - x_range[0]) / (right - left), (y_range[1] - y_range[0]) / (bottom - top))
            x_range, y_range = _widen(x_range, unit * (right - left)), _widen(y_range, unit * (bottom - top))
        return SketchScale(*x_range, left, right, False), SketchScale(*y_range, bottom, top, self.log)


class SketchScale(NamedTuple):
    """An axis, which maps the values from `first` to `last` to the pixels from `start` to `end`."""

    first: float
    last: float
    start: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        number = math.log10(value) if self.log and value > 0 else math.nan if self.log else value
        return self.start + (number - self.first) / (self.last - self.first) * (self.end - self.start)

    def list_ticks(self) -> list[tuple[float, str]]:
        """Return round values with their texts; on a logarithmic axis powers of ten, or 1, 2 and 5 times them."""
        span = self.last - self.first
        if self.log and span < 2:
            powers = range(math.floor(self.first), math.ceil(self.last) + 1)
            values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [(value, f"{value:g}") for value in values if self.first <= math.log10(value) <= self.last]
        step = 10.0 ** math.floor(math.log10(span / 3))
        step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
        step = max(1.0, round(step)) if self.log else step
        counts = range(math.ceil(self.first / step - 1e-9), math.floor(self.last / step + 1e-9) + 1)
        if self.log:
            return [(10.0 ** (count * step), f"{10.0 ** (count * step):g}") for count in counts]
        return [(count * step, f"{count * step:.6g}") for count in counts]


def _read_numbers(values: Any) -> list[float]:
    """Return the numbers of a tensor, an array or nested sequences as a flat list."""
    rows = values.tolist() if hasattr(values, "tolist") else list(values)
    numbers: list[float] = []
    for row in rows if isinstance(rows, list) else [rows]:
        numbers += _read_numbers(row) if isinstance(row, Sequence) or hasattr(row, "tolist") else [float(row)]
    return numbers


def _pad_range(values: list[float], log: bool, share: float) -> tuple[float, float]:
    """Return the range of values with a margin at both ends; never empty."""
    numbers = [math.log10(value) for value in values] if log else values
    first, last = min(numbers, default=0.0), max(numbers, default=1.0)
    margin = share * (last - first) or 0.5 * abs(first) or 0.5
    return first - margin, last + margin


def _widen(ends: tuple[float, float], span: float) -> tuple[float, float]:
    """Return a range of width `span` with the same middle."""
    middle = (ends[0] + ends[1]) / 2
    return middle - span / 2, middle + span / 2


def _draw_axes(horizontal: SketchScale, vertical: SketchScale, box: tuple[float, float, float, float]) -> list[str]:
    """Return the grid and the numbers of two axes; the box has the pixels left, right, bottom, top."""
    left, right, bottom, top = box
    style = f"stroke:{_INK};opacity:.22"
    parts = []
    for value, text in horizontal.list_ticks():
        x = horizontal.place(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}" style="{style}"/>')
        parts.append(_write_text(x, bottom + 14, text, "middle"))
    for value, text in vertical.list_ticks():
        y = vertical.place(value)
        parts.append(f'<line x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}" style="{style}"/>')
        parts.append(_write_text(left - 5, y + 4, text, "end"))
    return parts


def _write_text(x: float, y: float, text: str, anchor: str, transform: str = "") -> str:
    """Return a text element at pixel x, y; anchor and transform are the attributes of SVG."""
    moved = f' transform="{transform}"' if transform else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{moved} style="fill:{_INK}">{escape(text)}</text>'


def _choose_colour(number: int) -> str:
    at = number % len(COLOURS)
    return f"var(--s{at},{COLOURS[at]})"


def _draw_series(
    series: SketchSeries, number: int, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> list[str]:
    """Return the SVG elements of a series, in the colour of its number; the functions map values to pixels."""
    colour = _choose_colour(number)
    x, low, high = [list(map(place_x, series.x)), *(list(map(place_y, side)) for side in (series.low, series.high))]
    rows = list(zip(x, low, high, strict=True))
    runs = _split_finite(rows)
    if series.kind == "points":
        parts = []
        for at, bottom, top in (row for run in runs for row in run):
            if bottom != top:
                parts.append(f'<path d="M{at:.1f} {bottom:.1f}V{top:.1f}" style="stroke:{colour};stroke-width:2.5"/>')
            middle = (bottom + top) / 2
            parts.append(f'<circle cx="{at:.1f}" cy="{middle:.1f}" r="2.4" style="fill:{colour};opacity:.8"/>')
        return parts
    if series.kind == "band":
        outlines = [[(at, top) for at, _, top in run] + [(at, low) for at, low, _ in reversed(run)] for run in runs]
        return [f'<polygon points="{_join(each)}" style="fill:{colour};opacity:.2"/>' for each in outlines]
    style = f"fill:none;stroke:{colour};stroke-width:2;stroke-linejoin:round" + (
        ";stroke-dasharray:5 4" if series.dashed else ""
    )
    return [f'<polyline points="{_join([(at, y) for at, y, _ in run])}" style="{style}"/>' for run in runs]


def _split_finite(rows: list[tuple[float, float, float]]) -> list[list[tuple[float, float, float]]]:
    """Split the rows where a number is not finite, and return the parts without those rows."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for row in rows:
        if all(map(math.isfinite, row)):
            runs[-1].append(row)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _join(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _arrange_legend(labels: list[str]) -> list[list[tuple[int, float]]]:
    """Return the rows of the legend: pairs of the number of a label and its pixel, as many in a row as fit."""
    rows: list[list[tuple[int, float]]] = []
    x = WIDTH
    for number, label in enumerate(labels):
        if not label:
            continue
        width = 36 + 6.6 * len(label)
        if x + width > WIDTH:
            rows.append([])
            x = _LEFT
        rows[-1].append((number, x))
        x += width
    return rows


def _draw_key(series: SketchSeries, number: int, x: float, y: float) -> str:
    """Return the entry of a series in the legend, a mark and its label, at pixel x, y."""
    sample = SketchSeries(series.kind, [x, x + 16], [y + 3, y + 3], [y - 3, y - 3], "", series.dashed)
    if series.kind == "points":
        sample = SketchSeries("points", [x + 8], [y], [y], "")
    elif series.kind == "line":
        sample = sample._replace(low=[y, y], high=[y, y])
    mark = _draw_series(sample, number, float, float)
    return "".join(mark) + _write_text(x + 21, y + 4, series.label, "start")
