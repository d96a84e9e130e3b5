"""Pictures of links for the catalogue: the path of each on Rosenbrock's function, as inline SVG, drawn while the site is built.

The chains are those of the tests (`tests/laws/rows`), which have the smallest chain of each link. The contour lines are on the page
once, and each picture refers to them.
"""

import math
import sys
from pathlib import Path

import torch

import moduli as mo
from moduli import m

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
START, LEFT, RIGHT, BOTTOM, TOP = (-1.2, 1.0), -1.7, 1.7, -0.7, 1.8
WIDTH = 240
HEIGHT = round(WIDTH * (TOP - BOTTOM) / (RIGHT - LEFT))
STEPS = 25


def rosenbrock(point: torch.Tensor) -> torch.Tensor:
    """Return the residuals; half the sum of their squares is Rosenbrock's function."""
    x, y = point
    return math.sqrt(2) * torch.stack([10 * (y - x**2), 1 - x])


def draw_all() -> dict[str, str]:
    """Return a picture for each link that moves one model, by name."""
    from laws.registry import collect

    pictures: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]):
        for row in collect():
            name = row.name.partition(" ")[0].rstrip(",:")
            if name in m.__all__ and name not in pictures and not row.members and (path := find_path(row)):
                pictures[name] = draw(name, *path)
    return pictures


def find_path(row: object) -> tuple[str, list[tuple[float, float]]] | None:
    """Return a chain as text and the points that it visits, with the largest factor of its steps that descends; or None."""
    for factor in (1.0, 0.1, 0.01, 0.001):
        torch.manual_seed(0)
        links = [*row.links(), *([] if factor == 1 else [m.LR(factor)])]  # type: ignore[attr-defined]
        text = " | ".join(type(link).__name__ for link in links)
        text = text if factor == 1 else f"{text}({factor:g})"
        param = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))

        def loss(param: torch.Tensor = param) -> torch.Tensor:
            residuals = rosenbrock(param)
            return residuals if row.target == "least squares" else residuals.square().sum() / 2  # type: ignore[attr-defined]

        points, values = [START], [float(rosenbrock(torch.tensor(START)).square().sum())]
        try:
            optimizer = mo.Optimizer([param], *links, fuse=False)
            for _ in range(STEPS):
                optimizer.step(mo.closure(loss))
                points.append((float(param.detach()[0]), float(param.detach()[1])))
                values.append(float(rosenbrock(param.detach()).square().sum()))
                if not values[-1] < 3 * values[0]:  # it leaves the valley; NaN is no number below
                    break
        except (RuntimeError, ValueError, TypeError):  # it needs another problem than two numbers with one loss
            return None
        if values[-1] < 3 * values[0] and min(values[1:]) < 0.9 * values[0]:
            return text, points
    return None


def draw_map() -> str:
    """Return the map that all pictures share: lines of equal value around the valley, and the minimum."""
    lines = []
    for level in (0.1, 1, 5, 20, 80, 250):
        # The curve of a value v: x = 1 + sqrt(v) cos t, y = x^2 + sqrt(v)/10 sin t.
        radius = math.sqrt(level)
        turns = [2 * math.pi * number / 96 for number in range(97)]
        curve = [(1 + radius * math.cos(t), (1 + radius * math.cos(t)) ** 2 + radius / 10 * math.sin(t)) for t in turns]
        lines.append(f'<polyline points="{place(curve)}"/>')
    x, y = place([(1.0, 1.0)]).split(",")
    marks = f'<circle cx="{x}" cy="{y}" r="3" fill="currentColor"/>'
    inner = f'<g fill="none" stroke="currentColor" stroke-opacity="0.25">{"".join(lines)}</g>{marks}'
    symbol = f'<symbol id="rosenbrock" viewBox="0 0 {WIDTH} {HEIGHT}">{inner}</symbol>'
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{symbol}</svg>'


def draw(name: str, chain: str, points: list[tuple[float, float]]) -> str:
    """Return the picture of a path."""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    path = f'<polyline points="{place(points)}" fill="none" stroke="#e4572e" stroke-width="1.5"/>'
    last = place(points[-1:]).split(",")
    end = f'<circle cx="{last[0]}" cy="{last[1]}" r="2.5" fill="#e4572e"/>'
    title = f"{STEPS} steps of {chain} on Rosenbrock's function"
    image = f'<svg role="img" aria-label="{title}" {box}><use href="#rosenbrock"/>{path}{end}</svg>'
    return f'<figure class="path">{image}<figcaption>{title}</figcaption></figure>'


def place(points: list[tuple[float, float]]) -> str:
    """Return points as coordinates of the picture, without repetitions; those outside lie a little beyond its border."""
    scale = WIDTH / (RIGHT - LEFT)
    words = []
    for x, y in points:
        across = min(max((x - LEFT) * scale, -20.0), WIDTH + 20.0)
        down = min(max((TOP - y) * scale, -20.0), HEIGHT + 20.0)
        word = f"{across:.1f},{down:.1f}"
        if not words or words[-1] != word:
            words.append(word)
    return " ".join(words)
