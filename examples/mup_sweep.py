"""Sweep learning rates at two widths: with the maximal update parametrization (muP) both widths have the same best rate.

Run it with `python examples/mup_sweep.py`.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

import moduli as mo
from moduli import m

WIDTHS, RATES, BASE = (64, 512), [2.0**-power for power in range(3, 11)], 64
STEPS = 12


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of digits and their classes."""
    data = load_digits()
    x = torch.tensor(data.data[:300], dtype=torch.float32) / 16
    return x - x.mean(0), torch.tensor(data.target[:300])


def train(width: int, rate: float, scaled: bool, seed: int) -> float:
    """Return the loss after some steps."""
    x, y = read_digits()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    links: list[mo.optim.Module] = [m.Adam(), m.LR(rate)]
    if scaled:
        axes = mo.axes.trace(net, x)
        axes.initialise_mup(net, base=BASE)
        links.insert(1, m.MuP(axes, base=BASE))
    opt = mo.Optimizer(net, *links)
    for _ in range(STEPS):
        opt.step(mo.closure(lambda: nn.functional.cross_entropy(net(x), y)))
    with torch.no_grad():
        return nn.functional.cross_entropy(net(x), y).item()


def main() -> None:
    """Sweep learning rates at two widths, standard and scaled."""
    for name, scaled in (("standard", False), ("muP", True)):
        for width in WIDTHS:
            losses = [sum(train(width, rate, scaled, seed) for seed in range(2)) / 2 for rate in RATES]
            best = min(range(len(RATES)), key=losses.__getitem__)
            line = "  ".join(f"{loss:.2f}" for loss in losses)
            print(f"{name:8} width {width:4}: {line}   best 2^{round(math.log2(RATES[best]))}")


if __name__ == "__main__":
    main()
