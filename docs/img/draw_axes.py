"""Draw the pictures of docs/axes.md: `python docs/img/draw_axes.py`.

`axes.svg` shows the axes of a small transformer, which is traced here; `mup.svg` shows the sweep of `python benchmarks/axes.py`,
which is stored in mup.json.
"""

import json
import math
from pathlib import Path

import torch
from torch import nn

import moduli as mo

HERE = Path(__file__).resolve().parent
FONT = 'font-family="sans-serif" font-size="12"'
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
GREY = "#b9b9b9"


class Block(nn.Module):
    """A transformer of one block: attention with a fused projection, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.qkv, self.o = nn.Linear(12, 36, bias=False), nn.Linear(12, 12, bias=False)
        self.up, self.down = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False)
        self.head = nn.Linear(12, 20, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token."""
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.o(mixed)
        return self.head(x + self.down(self.up(x).relu()))


def draw_axes() -> str:
    """Return a picture of each matrix as a rectangle whose sides have the colours of its axes; fixed axes are grey."""
    names = {"qkv.weight": "(qkv=3 head=3 size) model"}
    axes = mo.axes.trace(Block(), torch.zeros(1, 5, dtype=torch.int64), names=names)
    colours = {axis.name: COLOURS[i] for i, axis in enumerate(axes.free)}
    parts, x = [], 20
    for name, own in axes.parameters.items():
        height, width = (3.2 * size for size in own.shape)
        top = 70.0
        parts.append(
            f'<rect x="{x + 10}" y="{top + 10}" width="{width}" height="{height}" fill="#8882" stroke="#8888"/>'
        )
        parts += draw_side(axes, own[0], colours, (x, top + 10), height, upright=True)
        parts += draw_side(axes, own[1], colours, (x + 10, top), width, upright=False)
        parts.append(f'<text x="{x}" y="{top - 10}" fill="currentColor" {FONT}>{name}</text>')
        x += int(width) + 62
    legend = 40
    for name, colour in colours.items():
        parts.append(f'<rect x="{legend}" y="228" width="12" height="12" fill="{colour}"/>')
        text = f"{name} ({axes[name].size})"
        parts.append(f'<text x="{legend + 17}" y="238" fill="currentColor" {FONT}>{text}</text>')
        legend += 34 + 7 * len(text)
    parts.append(f'<rect x="{legend}" y="228" width="12" height="12" fill="{GREY}"/>')
    parts.append(f'<text x="{legend + 17}" y="238" fill="currentColor" {FONT}>fixed</text>')
    return wrap(parts, max(x, legend + 80), 255)


def draw_side(axes, factors, colours, corner, length, upright):  # type: ignore[no-untyped-def]
    """Return the bars of one axis of a matrix: a row for each factor of the axis, the last factor nearest to the matrix."""
    bars = []
    for i, name in enumerate(factors):
        colour = colours.get(name, GREY)
        outer = math.prod(axes[each].size for each in factors[:i])
        step, gap = length / outer, 1.0 if outer > 1 else 0.0
        away = 4.5 * (len(factors) - 1 - i)
        for k in range(outer):
            x, y = (corner[0] - away, corner[1] + k * step) if upright else (corner[0] + k * step, corner[1] - away)
            wide, high = (4, step - gap) if upright else (step - gap, 4)
            bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>')
    return bars


def draw_mup() -> str:
    """Return a picture of the loss over the learning rate, with a line for each width and a dot at its best rate."""
    sweep = json.loads((HERE / "mup.json").read_text(encoding="utf-8"))
    powers = [round(math.log2(rate)) for rate in sweep["rates"]]
    parts = []
    for column, (name, lines) in enumerate(sweep["losses"].items()):
        left = 60 + 380 * column
        parts.append(f'<text x="{left + 120}" y="22" fill="currentColor" {FONT}>{name}</text>')
        for power in powers[::2]:
            x = place_x(power, powers, left)
            parts.append(f'<text x="{x - 8:.0f}" y="282" fill="currentColor" {FONT}>2^{power}</text>')
        for loss in (0.01, 0.1, 1.0):
            y = place_y(loss)
            parts.append(f'<path d="M{left} {y:.1f}h320" stroke="#8884"/>')
            parts.append(f'<text x="{left - 36}" y="{y + 4:.1f}" fill="currentColor" {FONT}>{loss}</text>')
        for i, (width, losses) in enumerate(lines.items()):
            points = [(place_x(p, powers, left), place_y(loss)) for p, loss in zip(powers, losses, strict=True)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            colour = COLOURS[i]
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            x, y = points[min(range(len(losses)), key=losses.__getitem__)]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
            if not column:
                parts.append(f'<rect x="{150 + 90 * i}" y="306" width="12" height="12" fill="{colour}"/>')
                parts.append(f'<text x="{167 + 90 * i}" y="316" fill="currentColor" {FONT}>{width}</text>')
    parts.append(f'<text x="60" y="316" fill="currentColor" {FONT}>width</text>')
    return wrap(parts, 790, 330)


def place_x(power: int, powers: list[int], left: float) -> float:
    """Return the horizontal position of a learning rate."""
    return left + 320 * (power - min(powers)) / (max(powers) - min(powers))


def place_y(loss: float) -> float:
    """Return the vertical position of a loss, on a logarithmic axis from 0.01 to 3."""
    level = (math.log(min(max(loss, 0.01), 3.0)) - math.log(0.01)) / (math.log(3.0) - math.log(0.01))
    return 260 - 225 * level


def wrap(parts: list[str], width: float, height: float) -> str:
    """Return a whole SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" color="#777">'
    return "\n".join([head, *parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "axes.svg").write_text(draw_axes(), encoding="utf-8")
    if (HERE / "mup.json").exists():
        (HERE / "mup.svg").write_text(draw_mup(), encoding="utf-8")
