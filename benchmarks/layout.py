"""Layouts: what it costs to know that a remembered layout still holds.

`list(named_parameters())` is torch's own walk over the same tensors, and knows neither sizes nor ties. A copy has no
memory of its own: its structure is found by what it looks like.
"""

import copy

import torch
from torch import nn

from _timing import interleaved
from moduli.layout import layout_of


def nets():
    return {
        "80 tensors in one module": nn.ParameterList(torch.randn(16) for _ in range(80)),
        "80 tensors in 40 layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))),
        "72 tensors in a 6-layer transformer": nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 6, enable_nested_tensor=False
        ),
    }


def table():
    rows = []
    for name, net in nets().items():
        layout_of(net)
        copies = iter([copy.deepcopy(net) for _ in range(400)])
        times = interleaved(
            {"torch": lambda: list(net.named_parameters()), "everything": lambda: layout_of(net)}
        ) | interleaved({"copy": lambda: layout_of(next(copies))}, rounds=20, number=10)
        for label, key, bar in (
            ("names, classes, identities, dtypes, shapes, devices", "everything", None),
            ("the same for a copy that was never read", "copy", None),
            ("list(named_parameters())", "torch", None),
        ):
            value = times[key] * 1e6
            rows.append(row(f"{name}: {label}", value, bar, "us"))
        rows.append(row(f"{name}: everything / named_parameters()", times["everything"] / times["torch"], 1.0, "x"))
    return rows


def row(name, value, bar, unit):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}
