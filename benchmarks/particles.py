"""Particles: whole-model arithmetic against one operation on a flat vector, and against tensordict and nytorch.

Every row is the wall clock, the median of turns that candidates take in one process, and uses its result: a parameter of it is
read, by its name where the model is a class of ours, the first one otherwise. "Flat" is torch on one vector of all
parameters, written as a user would; it knows no modules. The MLP is 64-64-64-10 (6 tensors, 8,970 parameters), the
transformer an encoder of 12 layers (144 tensors, 2.4 million). Operands are modules that were built by their constructors.
The `out=` axpy writes into storage that exists.
"""

import importlib.util
import math

import torch
from torch import nn

from _timing import interleaved
from moduli import merge
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
    """Return a model with 10.9 million parameters in 75 tensors."""
    return adopt(nn.ParameterList(torch.randn(145_333) for _ in range(75)))


def tiny():
    return adopt(nn.ParameterList(torch.randn(16) for _ in range(80)))


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def first(net):
    """Read one parameter of a model, so that lazy results are computed."""
    return next(net.parameters())


def table():
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [*mlps(), *transformers(), *tinies(), *large()]
        rows += [*merges(), *touches()]
    return rows + products() + building() + growing() + scaling()


def mlps():
    a, b = mlp(), mlp()
    x, y = flat(a), flat(b)
    candidates = {"flat": lambda: x + y, "ours": lambda: (a + b).l1.weight}
    if has("tensordict"):
        p, q = dicts(a, b)
        candidates["tensordict"] = lambda: (p + q)["l1", "weight"]
    if has("nytorch"):
        import nytorch

        class Their(nytorch.NytoModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))

        theirs = Their()
        twin = theirs.clone()
        candidates["nytorch"] = lambda: (theirs + twin).net[0].weight
    c = mlp()
    loops = [dict(net.state_dict()) for net in (a, b, c)]
    candidates |= {
        "expression": lambda: (a + 0.5 * (b - c)).l1.weight,
        "loop": lambda: {name: loops[0][name] + 0.5 * (loops[1][name] - loops[2][name]) for name in loops[0]},
    }
    times = interleaved(candidates, rounds=25)
    return [
        row("MLP: a + 0.5*(b - c) / a loop over dicts", times["expression"] / times["loop"], 2.0, "x"),
        *against("MLP: a + b", times, "tensordict", 1.0),
        *against("MLP: a + b", times, "nytorch", None),
        row("MLP: a + b / flat", times["ours"] / times["flat"], None, "x"),
    ]


def transformers():
    a, b = encoder(), encoder()
    x, y = flat(a), flat(b)
    times = interleaved({"flat": lambda: x + y, "ours": lambda: first(a + b)}, rounds=15)
    return [row("transformer: a + b / flat", times["ours"] / times["flat"], 2.0, "x")]


def tinies():
    a, b, c = tiny(), tiny(), tiny()
    lists = [list(net.parameters()) for net in (a, b, c)]

    def foreach():
        step = torch._foreach_sub(lists[1], lists[2])
        torch._foreach_mul_(step, 0.5)
        return torch._foreach_add(lists[0], step)[0]

    candidates = {"ours": lambda: (a + 0.5 * (b - c))[0], "foreach": foreach}
    if has("tensordict"):
        p, q, r = dicts(a, b, c)
        candidates["tensordict"] = lambda: (p + 0.5 * (q - r))["0"]
    times = interleaved(candidates, rounds=25)
    return [
        *against("a + 0.5*(b - c), 80 tensors of 16", times, "tensordict", 0.75),
        *against("a + 0.5*(b - c), 80 tensors of 16", times, "foreach", None),
    ]


def large():
    a, b, c = wide(), wide(), wide()
    x, y, z = flat(a), flat(b), flat(c)
    out = torch.empty_like(x)
    times = interleaved(
        {
            "axpy": lambda: torch.add(x, y, alpha=0.5, out=out),
            "modules": lambda: first(a + 0.5 * (b - c)),
            "naive": lambda: x + 0.5 * (y - z),
        },
        rounds=15,
        number=2,
    )
    return [
        row("a + 0.5*(b - c), 10.9M parameters / out= axpy", times["modules"] / times["axpy"], 2.5, "x"),
        row("the same on flat vectors / out= axpy", times["naive"] / times["axpy"], None, "x"),
    ]


def merges():
    """Return rows for weighted sums against sums over dictionaries of tensors."""
    rows = []
    small = lambda: adopt(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))  # noqa: E731
    for name, make, bar in (("small models", small, 3.0), ("encoders of 12 layers", encoder, 1.2)):
        a, b = make(), make()
        x, y = dict(a.state_dict()), dict(b.state_dict())
        candidates = {
            "ours": lambda a=a, b=b: first(merge.linear([a, b])),
            "loop": lambda x=x, y=y: {key: 0.5 * x[key] + 0.5 * y[key] for key in x},
        }
        times = interleaved(candidates, rounds=25)
        rows.append(row(f"merge.linear of two {name} / a loop over dicts", times["ours"] / times["loop"], bar, "x"))
    return rows


def touches():
    """Return rows for `touch` without edits: a model without layers, and one with three layers and a relative."""
    single = NytoModule()
    single.w = nn.Parameter(torch.zeros(4))
    single.touch(), single._version_kernel
    net = mlp()
    twin = net.clone()
    twin.l1  # noqa: B018 - it is built
    times = interleaved({"single": single.touch, "mlp": twin.touch}, rounds=15)
    return [
        row("touch, one parameter, no relative", times["single"] * 1e6, 3.0, "us"),
        row("touch, MLP beside a relative", times["mlp"] * 1e6, 3.0, "us"),
    ]


def products():
    """Return rows for converting to a product and back, with a parameter read."""
    if not has("nytorch"):
        return []
    import nytorch

    class Peer(nytorch.NytoModule):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    net, peer = mlp(), Peer()
    times = interleaved(
        {"ours": lambda: net.product().module().l1.weight, "nytorch": lambda: peer.product().module().l1.weight},
        rounds=15,
    )
    return against("MLP: a product and back", times, "nytorch", 1.0)


def growing():
    """Return rows for adding layers to a model with a relative, which follows at the end."""

    def grow(count):
        net = NytoModule()
        twin = net.clone()
        twin.training  # noqa: B018 - it is built
        for i in range(count):
            setattr(net, f"l{i}", nn.Linear(4, 4))
        return twin.touch()

    times = interleaved({"25": lambda: grow(25), "200": lambda: grow(200)}, rounds=11, number=1)
    return [row("adding 200 layers beside a relative / adding 25", times["200"] / times["25"], 8.0, "x")]


def scaling():
    """Return a row for the growth of the time of a sum with the number of layers: the exponent from 1,000 to 5,000."""

    def make(count):
        a = adopt(nn.ModuleList(nn.Linear(4, 4) for _ in range(count)))
        return a, 2 * a

    pairs = {str(count): make(count) for count in (1000, 5000)}
    candidates = {name: lambda a=a, b=b: first(a + b) for name, (a, b) in pairs.items()}
    times = interleaved(candidates, rounds=7, number=1)
    exponent = math.log(times["5000"] / times["1000"]) / math.log(5)
    return [row("a + b of 1,000 to 5,000 layers, exponent", exponent, 1.1, "")]


def building():
    def build(kind):
        net = kind()
        for i in range(800):
            setattr(net, f"l{i}", nn.Linear(4, 4))
        return net

    times = interleaved({"plain": lambda: build(Plain), "ours": lambda: build(NytoModule)}, rounds=5, number=1)
    return [row("building 800 layers / torch", times["ours"] / times["plain"], 3.0, "x")]


def has(name):
    return importlib.util.find_spec(name) is not None


def dicts(*nets):
    from tensordict import TensorDict

    return [TensorDict.from_module(net).detach().lock_() for net in nets]


def against(name, times, peer, bar):
    return [row(f"{name} / {peer}", times["ours"] / times[peer], bar, "x")] if peer in times else []


def row(name, value, bar, unit):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


def main():
    for each in table():
        bar = "" if each["bar"] is None else f"  bar {each['bar']} {'met' if each['ok'] else 'MISSED'}"
        print(f"{each['name']:60} {each['value']:9.2f} {each['unit']}{bar}")


if __name__ == "__main__":
    main()
