"""A race as one SVG: for a page that shows what a race is."""

from __future__ import annotations

import base64
import math
import os
import struct
import zlib
from html import escape
from pathlib import Path
from typing import Any

from ..io import make_directory, write_bytes
from ._report import landscape
from ._results import Results
from ._statistics import curves, profiles

__all__ = ["picture", "write_picture"]

LIGHT = (
    "#2f6fde",
    "#d9480f",
    "#2b8a3e",
    "#9c36b5",
    "#c08a00",
    "#0b8f9c",
    "#c2255c",
    "#6b5b4d",
    "#5c7cfa",
    "#e8590c",
    "#66a80f",
    "#7048e8",
)
DARK = (
    "#74a7ff",
    "#ff9466",
    "#69db7c",
    "#da8bf0",
    "#ffd43b",
    "#4dd4e0",
    "#ff7fa8",
    "#cbb8a5",
    "#a5b8ff",
    "#ffb27d",
    "#b2e05f",
    "#b197fc",
)
WIDTH, SIDE, GAP, TOP = 1200, 330, 62, 54


def write_picture(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write `picture` to a file.

    Args:
        results: The race.
        path: Where.

    >>> from moduli.lab import race
    >>> write_picture(race(["rosenbrock"], ["torch.SGD(lr=0.001)"], seeds=1, workers=0), "race.svg").stat().st_size > 2000
    True
    """
    path = Path(path)
    make_directory(path.parent)
    write_bytes(path, picture(results).encode())
    return path


def picture(results: Results) -> str:
    """Draw a race: the paths over the first map, the curves of the same problem, and the performance profiles.

    Without a problem of two numbers there is no map, and the curves are those of the first problem.

    Args:
        results: The race.

    >>> from moduli.lab import race
    >>> picture(race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, workers=0))[:4]
    '<svg'
    """
    header = results.header
    labels = [contender["label"] for contender in header["contenders"]]
    sources = [contender["source"] for contender in header["contenders"]]
    flat = [problem for problem in header["problems"] if problem["window"]]
    problem = flat[0] if flat else header["problems"][0]
    panels = ([_map(results, problem, sources)] if flat else []) + [
        _curves(results, problem, sources),
        _profiles(results, sources),
    ]
    count = len(panels)
    left = (WIDTH - count * SIDE - (count - 1) * GAP) / 2 + 14
    body = [
        f'<g transform="translate({left + i * (SIDE + GAP):.0f},{TOP})">{panel}</g>' for i, panel in enumerate(panels)
    ]
    rows = math.ceil(len(labels) / 5)
    height = TOP + SIDE + 62 + 24 * rows
    for place, label in enumerate(labels):
        x, y = 40 + (place % 5) * (WIDTH - 60) / 5, TOP + SIDE + 62 + 24 * (place // 5)
        text = label if len(label) <= 30 else label[:29] + "…"
        body.append(f'<line x1="{x:.0f}" x2="{x + 22:.0f}" y1="{y - 4}" y2="{y - 4}" class="{_class(place)}"/>')
        body.append(f'<text x="{x + 30:.0f}" y="{y}" class="k">{escape(text)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="A race of {len(labels)} optimizers"><style>{_style()}</style>'
        f'<rect width="{WIDTH}" height="{height}" rx="12" class="back"/>{"".join(body)}</svg>\n'
    )


def _style() -> str:
    def colours(back: str, ink: str, soft: str, grid: str, palette: tuple[str, ...]) -> str:
        base = f".back{{fill:{back}}}text{{fill:{soft}}}.t,.k{{fill:{ink}}}.g{{stroke:{grid}}}.m{{stroke:{ink}}}"
        return base + "".join(f".c{i}{{stroke:{c};fill:{c}}}" for i, c in enumerate(palette))

    shape = (
        "text{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif}.t{font-weight:600;font-size:15px}.k{font-size:13px}"
        ".l{fill:none;stroke-width:2;stroke-linejoin:round}.d{stroke-dasharray:6 3}.b{stroke:none;opacity:.13}"
    )
    light = colours("#ffffff", "#1b2030", "#5d6577", "#e6e9ef", LIGHT)
    dark = colours("#161b26", "#e7eaf3", "#9aa3b8", "#2b3345", DARK)
    # The rule of shape comes last, so that a line is not filled with its colour.
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}{shape}.l{{fill:none}}"


def _class(series: int) -> str:
    """A line in the colour of its series. There are eight clear colours; from the ninth on, lines are dashed, as in the report."""
    return f"c{series % 12} l{' d' * (series >= 8)}"


def _axes(x: tuple[float, float], y: tuple[float, float], title: str, below: str, percent: bool = False) -> str:
    out = [f'<text class="t" x="0" y="-14">{escape(title)}</text>']
    out.append(f'<text x="{SIDE}" y="{SIDE + 34}" text-anchor="end">{escape(below)}</text>')
    for exponent in _ticks(*x):
        at = SIDE * (exponent - x[0]) / (x[1] - x[0])
        out.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{SIDE}"/>')
        out.append(f'<text x="{at:.1f}" y="{SIDE + 17}" text-anchor="middle">{_power(exponent)}</text>')
    marks = [(v / 4, f"{25 * v}%") for v in range(5)] if percent else [(float(e), _power(e)) for e in _ticks(*y)]
    for value, text in marks:
        at = SIDE * (1 - (value - y[0]) / (y[1] - y[0]))
        out.append(f'<line class="g" x1="0" x2="{SIDE}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="-7" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(out)


def _ticks(low: float, high: float) -> list[int]:
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    step = max(1, math.ceil((last - first + 1) / 6))
    return [e for e in range(first, last + 1) if (e - last) % step == 0]


def _power(exponent: int) -> str:
    if 0 <= exponent <= 4:
        return str(10**exponent)
    return f'10<tspan dy="-5" font-size="9">{exponent}</tspan>'


def _line(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _curves(results: Results, problem: dict[str, Any], sources: list[str]) -> str:
    shift = problem["optimum"] if problem["exact"] and problem["optimum"] is not None else 0.0

    def height(value: float | None) -> float | None:
        if value is None or (not shift and value < 0):
            return None
        return math.log10(max(value - shift, 1e-16))

    found = []
    for curve in curves(results, problem["name"]):
        data = curve["evaluations"]
        rows = zip(data["x"], *(map(height, data[key]) for key in ("median", "lower", "upper")), strict=True)
        known = [
            (math.log10(x), m, low, up)
            for x, m, low, up in rows
            if m is not None and low is not None and up is not None
        ]
        if known:
            found.append((sources.index(curve["source"]), known))
    if not found:
        return f'<text class="t" x="0" y="-14">{escape(problem["name"])}</text>'
    xs = [row[0] for _, known in found for row in known]
    ys = [value for _, known in found for row in known for value in row[1:3]]
    x, y = (min(xs), max(max(xs), min(xs) + 0.3)), (min(ys) - 0.2, max(ys) + 0.2)
    out = [_axes(x, y, f"{problem['name']}: loss", "evaluations")]
    for series, known in found:
        scaled = [
            [SIDE * (row[0] - x[0]) / (x[1] - x[0])] + [SIDE * (1 - (v - y[0]) / (y[1] - y[0])) for v in row[1:]]
            for row in known
        ]
        scaled = [[row[0], *(min(max(v, 0.0), float(SIDE)) for v in row[1:])] for row in scaled]
        band = [(row[0], row[2]) for row in scaled] + [(row[0], row[3]) for row in reversed(scaled)]
        out.append(f'<path class="c{series % 12} b" d="{_line(band)}Z"/>')
        out.append(f'<path class="{_class(series)}" d="{_line([(row[0], row[1]) for row in scaled])}"/>')
    return "".join(out)


def _profiles(results: Results, sources: list[str]) -> str:
    found = profiles(results, 1e-3)
    x = (0.0, max(0.5, max(math.log10(series["x"][-1]) for series in found)))
    out = [_axes(x, (0.0, 1.0), "all problems: part solved", "times the evaluations of the best", percent=True)]
    for series in found:
        points: list[tuple[float, float]] = []
        for ratio, part in zip(series["x"], series["y"], strict=True):
            at = SIDE * math.log10(ratio) / x[1]
            points += [(at, points[-1][1])] if points else []
            points.append((at, SIDE * (1 - part)))
        points.append((float(SIDE), points[-1][1]))
        out.append(f'<path class="{_class(sources.index(series["source"]))}" d="{_line(points)}"/>')
    return "".join(out)


def _map(results: Results, problem: dict[str, Any], sources: list[str]) -> str:
    x0, x1, y0, y1 = problem["window"]
    out = [f'<text class="t" x="0" y="-14">{escape(problem["name"])}: paths</text>']
    heights = landscape(problem, results.problems.get(problem["name"]), 2 * SIDE)
    if heights is not None:
        data = base64.b64encode(_png(*heights)).decode()
        out.append(
            f'<image width="{SIDE}" height="{SIDE}" preserveAspectRatio="none" href="data:image/png;base64,{data}"/>'
        )

    def place(point: list[float]) -> tuple[float, float]:
        x, y = SIDE * (point[0] - x0) / (x1 - x0), SIDE * (y1 - point[1]) / (y1 - y0)
        return min(max(x, 0.0), float(SIDE)), min(max(y, 0.0), float(SIDE))

    for run in results.runs:
        if run["problem"] != problem["name"] or run["seed"] != results.header["seeds"][0]:
            continue
        series = sources.index(run["source"])
        if "path" in run:
            points = [place(point) for point in run["path"]]
            out.append(f'<path class="{_class(series)}" d="{_line(points)}"/>')
            out.append(f'<circle class="c{series % 12}" cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3.5"/>')
        for x, y in map(place, run["cloud"][len(run["cloud"]) // 4] if "cloud" in run else []):
            out.append(f'<circle class="c{series % 12}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    for point in problem["minimisers"]:
        x, y = place(point)
        out.append(f'<path d="M{x - 6:.1f},{y:.1f}h12M{x:.1f},{y - 6:.1f}v12" stroke="#fff" stroke-width="2"/>')
    return "".join(out)


def _png(size: int, heights: bytes) -> bytes:
    """Bytes of heights as a PNG with a palette of fourteen blues."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    low, high, bands = (40, 54, 110), (226, 233, 252), 14
    shades = [tuple(round(a + (b - a) * i / (bands - 1)) for a, b in zip(low, high, strict=True)) for i in range(bands)]
    palette = b"".join(bytes(shade) for shade in shades)
    rows = b"".join(
        b"\0" + bytes(min(bands - 1, value * bands // 256) for value in heights[r * size : (r + 1) * size])
        for r in range(size)
    )
    head = struct.pack(">IIBBBBB", size, size, 8, 3, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"PLTE", palette), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
