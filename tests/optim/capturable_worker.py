"""Print as JSON which Python numbers each step of capturable chains passes to its kernels, on a fake accelerator."""

from __future__ import annotations

import json
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laws.fake_device import DEVICE, fake_accelerator, leave
from moduli import Optimizer, kernels, m, presets
from moduli.optim import schedules

CHAINS = {
    "adam": lambda: [m.Adam(), m.LR(0.1)],
    "adamw": lambda: [presets.adamw(lr=0.1, weight_decay=0.1)],
    "nadam": lambda: [m.NAdam(), m.LR(0.1)],
    "radam": lambda: [m.RAdam(), m.LR(0.1)],
    "lion": lambda: [presets.lion(lr=0.1)],
    "sgd": lambda: [m.HeavyBall(0.9), m.LR(0.1)],
    "clip": lambda: [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.1), m.LR(schedules.Cosine(0.1, steps=20, warmup=3))],
    "muon": lambda: [presets.muon(lr=schedules.Cosine(0.1, steps=20), weight_decay=0.1)],
    "lamb": lambda: [presets.lamb(lr=0.1)],
    "scion": lambda: [presets.scion(lr=0.1)],
    "rounded": lambda: [m.Adam(), m.LR(0.1), m.StochasticRounding()],
}


class Numbers(TorchDispatchMode):
    """A dispatch mode that records the Python numbers passed to torch operations."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.numbers += [value for value in tree_leaves((args, kwargs)) if isinstance(value, int | float)]
        return function(*args, **(kwargs or {}))


def record_numbers(name: str) -> list[list[float]]:
    """Return, for steps two to five, the Python numbers passed to kernels and torch operations."""
    params = [nn.Parameter(torch.empty(3, 2, device=DEVICE, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = Optimizer(params, *CHAINS[name](), capturable=True)
    run, steps = kernels.Bound.__call__, []

    def call(self, *args, **kwargs):
        steps[-1] += [value for value in args if isinstance(value, int | float)]
        return run(self, *args, **kwargs)

    with mock.patch.object(kernels.Bound, "__call__", call):
        for _ in range(5):
            steps.append([])
            for param in params:
                param.grad = torch.empty_like(param)
            with Numbers(steps[-1]):
                optimizer.step()
    numbers = [value for row in optimizer.state.values() for key, value in row.items() if key.endswith("/step")]
    assert all(isinstance(value, torch.Tensor) and value.device.type == DEVICE for value in numbers)
    return steps[1:]  # the first step creates the state


if __name__ == "__main__":
    with fake_accelerator():
        print(json.dumps({name: record_numbers(name) for name in CHAINS}))
    leave()
