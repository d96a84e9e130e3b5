"""Particles: whole-model arithmetic against one operation on a flat vector.

"Flat" is torch on one vector of all parameters, written as a user would; it knows no modules. The MLP is 64-64-64-10
(6 tensors, 8,970 parameters), the transformer an encoder of 12 layers (144 tensors, 2.4 million). Operands are modules
that were built by their constructors, unless a row says "results", which are those of earlier operations. The `out=`
axpy writes into storage that exists.
"""

import importlib.util

import torch
from torch import nn

from _timing import interleaved
from moduli.particles import NytoModule, adopt


class Plain(nn.Module):
    pass


class MLP(NytoModule):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


def mlp():
    return MLP()


def encoder():
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return adopt(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))


def wide():
    """10.9 million parameters in 75 tensors."""
    return adopt(nn.ParameterList(torch.randn(145_333) for _ in range(75)))


def tiny():
    return adopt(nn.ParameterList(torch.randn(16) for _ in range(80)))


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def pso(x, v, p, g):
    v = 0.7 * v + 1.5 * 0.3 * (p - x) + 1.5 * 0.6 * (g - x)
    return v, x + v


def table():
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for name, make, sum_bar, pso_bar in (("MLP", mlp, 5.0, 5.0), ("transformer", encoder, 1.25, 1.25)):
            nets = [make() for _ in range(4)]
            results = [net + 0 for net in nets]
            vectors = [flat(net) for net in nets]
            foreach = [list(net.parameters()) for net in nets]
            times = interleaved(
                {
                    "flat": lambda: vectors[0] + vectors[1],
                    "modules": lambda: nets[0] + nets[1],
                    "results": lambda: results[0] + results[1],
                    "foreach": lambda: torch._foreach_add(foreach[0], foreach[1]),
                    "flat pso": lambda: pso(*vectors),
                    "pso": lambda: pso(*results),
                    "pso modules": lambda: pso(*nets),
                },
                rounds=25,
            )
            rows.append(row(f"{name}: a + b / flat", times["modules"] / times["flat"], sum_bar, "x"))
            rows.append(row(f"{name}: a + b of results / flat", times["results"] / times["flat"], sum_bar, "x"))
            rows.append(row(f"{name}: torch._foreach_add / flat", times["foreach"] / times["flat"], None, "x"))
            rows.append(row(f"{name}: particle swarm update / flat", times["pso"] / times["flat pso"], pso_bar, "x"))
            rows.append(
                row(f"{name}: the same on built modules / flat", times["pso modules"] / times["flat pso"], pso_bar, "x")
            )
        rows += large()
        rows += small()
    rows += building()
    rows += peers()
    return rows


def large():
    a, b, c = wide(), wide(), wide()
    x, y, z = flat(a), flat(b), flat(c)
    out = torch.empty_like(x)
    times = interleaved(
        {
            "axpy": lambda: torch.add(x, y, alpha=0.5, out=out),
            "modules": lambda: a + 0.5 * (b - c),
            "naive": lambda: x + 0.5 * (y - z),
        },
        rounds=15,
        number=2,
    )
    return [
        row("a + 0.5*(b - c), 10.9M parameters / out= axpy", times["modules"] / times["axpy"], 2.1, "x"),
        row("the same on flat vectors / out= axpy", times["naive"] / times["axpy"], None, "x"),
    ]


def small():
    a, b, c = tiny(), tiny(), tiny()
    ra, rb, rc = (net + 0 for net in (a, b, c))
    times = interleaved({"modules": lambda: a + 0.5 * (b - c), "results": lambda: ra + 0.5 * (rb - rc)})
    return [
        row("a + 0.5*(b - c), 80 tensors of 16", times["modules"] * 1e6, 110.0, "us"),
        row("the same on results", times["results"] * 1e6, 110.0, "us"),
    ]


def building():
    def build(kind):
        net = kind()
        for i in range(800):
            setattr(net, f"l{i}", nn.Linear(4, 4))
        return net

    times = interleaved({"plain": lambda: build(Plain), "ours": lambda: build(NytoModule)}, rounds=5, number=1)
    return [row("building 800 layers / torch", times["ours"] / times["plain"], 3.0, "x")]


def peers():
    rows = []
    if importlib.util.find_spec("nytorch") is not None:
        import nytorch

        class Their(nytorch.NytoModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))

        a, b, ours = Their(), None, mlp()
        b = a.clone()
        other, vector = ours.clone(), flat(ours)
        times = interleaved(
            {"theirs": lambda: a + b, "ours": lambda: ours + other, "flat": lambda: vector + vector}, rounds=15
        )
        rows.append(row("MLP: a + b in nytorch / flat", times["theirs"] / times["flat"], None, "x"))
    if importlib.util.find_spec("tensordict") is not None:
        from tensordict import TensorDict

        nets = [TensorDict.from_module(tiny()).detach().lock_() for _ in range(3)]
        times = interleaved({"theirs": lambda: nets[0] + 0.5 * (nets[1] - nets[2])})
        rows.append(row("a + 0.5*(b - c), 80 tensors of 16, in tensordict", times["theirs"] * 1e6, None, "us"))
    return rows


def row(name, value, bar, unit):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


def main():
    for each in table():
        bar = "" if each["bar"] is None else f"  bar {each['bar']} {'met' if each['ok'] else 'MISSED'}"
        print(f"{each['name']:60} {each['value']:9.2f} {each['unit']}{bar}")


if __name__ == "__main__":
    main()
