"""Print as JSON on which devices offloaded state lies after some steps, on a fake accelerator."""

from __future__ import annotations

import json

import torch
from torch import nn

from laws.fake_device import DEVICE, fake_accelerator, leave
from moduli import Optimizer, m, presets

CHAINS = {
    "adamw": lambda: [m.ClipNorm(1.0), presets.adamw(lr=0.1, weight_decay=0.1)],
    "muon": lambda: [presets.muon(lr=0.1)],
    "soap": lambda: [presets.soap(lr=0.1)],
    "sgd": lambda: [presets.momentum(lr=0.1)],
}


def list_devices(name: str) -> list[str]:
    """Return the devices of the state of each parameter after three steps, with a reload before the last."""
    params = [nn.Parameter(torch.empty(4, 3, device=DEVICE)) for _ in range(3)]

    def make():
        return Optimizer([{"params": params[:2], "offload": "cpu"}, {"params": params[2:]}], *CHAINS[name]())

    optimizer = make()
    for step in range(3):
        if step == 2:
            saved = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(saved)
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    rows = [optimizer.state[param] for param in params]
    return [sorted({v.device.type for v in row.values() if isinstance(v, torch.Tensor) and v.dim()}) for row in rows]


if __name__ == "__main__":
    with fake_accelerator():
        print(json.dumps({name: list_devices(name) for name in CHAINS}))
    leave()
