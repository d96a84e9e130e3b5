"""What it costs to watch a step: the same chain with and without a watch, gradients new at every step."""

from __future__ import annotations

import math

import torch

from _fresh import time_steps
from moduli import Optimizer, m

SHAPES = {
    "4 tiny": [(16, 4), (4,), (4, 2), (2,)],
    "200 x 64²": [(64, 64)] * 200,
    "1000 x 10": [(10,)] * 1000,
    "4 x 2048²": [(2048, 2048)] * 4,
}
BAR = 1.10


def table() -> list[dict]:
    rows = []
    for name, shapes in SHAPES.items():
        candidates = {}
        for kind in ("step", "watched"):
            params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
            optimizer = Optimizer(params, m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3))
            candidates[kind] = (params, optimizer.step)
            if kind == "watched":
                log = optimizer.watch()
        steps = 200 if sum(map(math.prod, shapes)) <= 10_000 else 5
        times = time_steps(candidates, steps)
        ratio = times["watched"] / times["step"]
        log()
        rows.append({"name": f"watched step, {name}", "value": ratio, "bar": BAR, "unit": "x", "ok": ratio <= BAR})
    return rows


if __name__ == "__main__":
    for row in table():
        print(f"{row['name']:28} {row['value']:.2f} (at most {row['bar']})")
