"""Modules: owned attributes, calls, and virtual tensors that are reused.

Attribute assignment is compared with QTen's module. The orthogonal net has 20 layers of width 256, called ten times inside
`cached()` and inside torch's `parametrize.cached()`.
"""

import contextlib

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

from _timing import interleaved
from moduli.labels import Space, Tensor
from moduli.nn import Module, cached, virtual


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x


class Ours(Module):
    def __init__(self):
        super().__init__()
        self.w = Tensor(torch.ones(2, requires_grad=True), (Space(2),))
        self.p = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x


class Dispatching(Module):
    def forward(self, x):
        return x


@Dispatching.register(int)
def _(module, x):
    return x


class Exponential(Module):
    def __init__(self, n, sources=1):
        super().__init__()
        self.names = [f"a{i}" for i in range(sources)]
        for name in self.names:
            setattr(self, name, nn.Parameter(torch.randn(n, n) / n))

    @virtual
    def weight(self):
        a = self.a0 if len(self.names) == 1 else sum(getattr(self, name) for name in self.names)
        a = a.tril()
        return torch.matrix_exp(a - a.T)

    def forward(self, x):
        return x @ self.weight


def row(name, value, bar, unit, at_least=False):
    if at_least:
        return {"name": name, "value": value, "bar": f"at least {bar:g} {unit}", "unit": unit, "ok": value >= bar}
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


def attributes():
    from qten.linalg.tensors import Tensor as PeerTensor
    from qten.optim import Module as PeerModule
    from qten.symbolics.state_space import IndexSpace

    plain, ours, peer = Plain(), Ours(), type("Peer", (PeerModule,), {})()
    mine = Tensor(torch.ones(2, requires_grad=True), (Space(2),))
    theirs = PeerTensor(torch.ones(2, requires_grad=True), (IndexSpace.linear(2),))
    values = iter(range(10**9))

    def set_ours():
        ours.v = mine

    def set_peer():
        peer.v = theirs

    def set_plain_ours():
        ours.n = next(values)

    def set_plain_peer():
        peer.n = next(values)

    read = interleaved({"parameter": lambda: plain.w, "labelled": lambda: ours.w, "ours": lambda: ours.p})
    write = interleaved({"ours": set_ours, "peer": set_peer, "int": set_plain_ours, "peer int": set_plain_peer})
    return [
        row("m.w, labelled / reading an nn.Parameter", read["labelled"] / read["parameter"], 2.0, "x"),
        row("m.w, labelled", read["labelled"] * 1e6, 0.8, "us"),
        row("m.p, an nn.Parameter of our Module / of nn.Module", read["ours"] / read["parameter"], None, "x"),
        row("m.w = tensor / QTen's", write["ours"] / write["peer"], 2.0, "x"),
        row("m.n = number / QTen's", write["int"] / write["peer int"], 2.0, "x"),
    ]


def calls():
    plain, ours, dispatching = Plain(), Ours(), Dispatching()
    times = interleaved(
        {
            "plain": lambda: plain(1.0),
            "ours": lambda: ours(1.0),
            "dispatched": lambda: dispatching(1),
            "other type": lambda: dispatching(1.0),
        }
    )
    return [
        row("call / a call of nn.Module", times["ours"] / times["plain"], 1.3, "x"),
        row(
            "call that runs a registered action / a call of nn.Module", times["dispatched"] / times["plain"], None, "x"
        ),
        row("forward of a class with actions / a call of nn.Module", times["other type"] / times["plain"], None, "x"),
    ]


def reuse():
    one, eight, large = Exponential(8), Exponential(8, 8), Exponential(256)
    with torch.no_grad(), cached():
        # The first reads compute; they would be used to choose the number of calls.
        assert all(module.weight is module.weight for module in (one, eight, large))
        reads = interleaved({"one": lambda: one.weight, "eight": lambda: eight.weight})
        matrix = interleaved(
            {"reuse": lambda: large.weight, "recompute": lambda: torch.matrix_exp(large.a0 - large.a0.T)}, seconds=0.02
        )
    function = Exponential.weight.__wrapped__
    outside = interleaved({"read": lambda: one.weight, "call": lambda: function(one)})
    return [
        row("virtual tensor, computed / calling its function", outside["read"] / outside["call"], 1.15, "x"),
        row("virtual tensor reused in a scope, one source", reads["one"] * 1e6, 3.0, "us"),
        row("virtual tensor reused in a scope, eight sources", reads["eight"] * 1e6, 6.0, "us"),
        row("recomputing a 256x256 matrix_exp / reusing it", matrix["recompute"] / matrix["reuse"], 100.0, "x", True),
    ]


def net():
    width, depth, x = 256, 20, torch.randn(1, 256)
    ours = nn.Sequential(*(Exponential(width) for _ in range(depth)))
    theirs = nn.Sequential(*(orthogonal(nn.Linear(width, width, bias=False)) for _ in range(depth)))
    with torch.no_grad():
        # The cost of matrix_exp depends on the norm; from zero, where torch's starts, it is nearly free.
        for layer in theirs:
            layer.parametrizations.weight.original.normal_(std=1 / width)

    def ten(model, scope):
        with torch.inference_mode(), scope():
            for _ in range(10):
                model(x)

    times = interleaved(
        {
            "ours": lambda: ten(ours, cached),
            "theirs": lambda: ten(theirs, parametrize.cached),
            "uncached": lambda: ten(theirs, contextlib.nullcontext),
        },
        rounds=5,
        number=1,
    )
    return [
        row("torch's orthogonal, ten calls / ours in a scope", times["uncached"] / times["ours"], 5.0, "x", True),
        row("ours in a scope, ten calls / torch's in its", times["ours"] / times["theirs"], None, "x"),
    ]


def table():
    return [*attributes(), *calls(), *reuse(), *net()]


def main():
    for entry in table():
        bar = "" if entry["bar"] is None else f"  (bar {entry['bar']}, {'met' if entry['ok'] else 'MISSED'})"
        print(f"{entry['name']}: {entry['value']:.3g} {entry['unit']}{bar}")


if __name__ == "__main__":
    main()
