"""Models that grow: what a growth costs, by copying the model and the state of its optimizer once.

The model is a stack of eight linear layers with 10M parameters after the growth, trained by Adam. A growth doubles the units of
every second layer, and the optimizer takes over the moments. The copy is of the model and the moments as they are then. What looks
for edits at every step is measured in the section on optimizers.
"""

import copy
import os

import torch
from torch import nn

import moduli as mo
from _timing import interleaved
from moduli import m

WIDTH = 512 if os.environ.get("MODULI_BENCH_QUICK") else 1120


def table():
    rows = []
    x = torch.zeros(1, WIDTH)
    for name, adopt in (("nn.Module", lambda net: net), ("mo.Module with a relative", mo.adopt)):
        net = make()
        axes = mo.axes.trace(net, x)
        sizes = {axis.name: 2 * axis.size for axis in axes.free if axis.name in NAMES}
        large = make()
        mo.particles.grow(large, sizes, mo.axes.trace(large, x))
        opt = mo.Optimizer(large, m.Adam(), m.LR(1e-3))
        step(large, opt)
        moments = [dict(row) for row in opt.link("Adam").rows.values()]
        models = []

        def prepare(net=net, adopt=adopt, models=models):
            """Make a trained model for one growth, before the clock runs."""
            one = adopt(copy.deepcopy(net))
            relative = one.clone() if isinstance(one, mo.Module) or hasattr(one, "clone") else None
            own = mo.Optimizer(one, m.Adam(), m.LR(1e-3))
            step(one, own)
            models.append((one, own, relative))

        rounds = 9
        for _ in range(rounds + 4):
            prepare()

        def grow(models=models, axes=axes, sizes=sizes):
            one, own, _ = models.pop()
            mo.particles.grow(one, sizes, axes)
            own.zero_grad()
            return own.param_groups, one

        def copy_all(large=large, moments=moments):
            return copy.deepcopy(large), copy.deepcopy(moments)

        times = interleaved({"grow": grow, "copy": copy_all}, rounds=rounds, number=1)
        count = sum(param.numel() for param in large.parameters()) / 1e6
        value = times["grow"] / times["copy"]
        rows.append(
            {
                "name": f"growth of a {name} to {count:.1f}M parameters with Adam / copying model and state",
                "value": round(value, 2),
                "bar": 3.0,
                "unit": "x",
                "ok": value <= 3.0,
            }
        )
    return rows


NAMES = {"0.out", "4.out", "8.out", "12.out"}


def make():
    torch.manual_seed(0)
    half = WIDTH // 2
    layers = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, half), nn.ReLU(), nn.Linear(half, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def step(net, opt):
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    opt.step()


if __name__ == "__main__":
    for each in table():
        print(each)
