"""Populations: one matrix against loops, raw vmap and other libraries.

The swarm step is 256 x 8,970: `v = 0.7*v + 1.5*r1*(best - x) + 1.5*r2*(leader - x)`, then `x += v` or `x = x + v`, with one
random number per member, against the same step written by hand with `out=` and in-place operations on preallocated matrices.
Evaluation is
under `no_grad` on one batch for all members. "Raw vmap" is `torch.vmap` of `functional_call` on stacked parameters, which
is what other libraries for torch do; these rows and iterations are in processor time, so that a busy machine says something.
"Best" is the fastest of `vmap`, `loop` and `chunked` here. Models: "ReLU" is
64-64-64-10, "short ReLU" and "tanh" are 64-64-10.

A step is `opt.step()` with gradients as an evaluation leaves them, against the same chain on one N x P parameter. A whole
iteration is losses, gradients and Adam on a shared batch of 64, against `vmap(grad)` and torch's fused Adam on stacked leaves.
"""

import copy
import importlib.util
import warnings
from time import process_time

import torch
from torch import nn
from torch.func import functional_call, grad

import moduli as mo
from _timing import interleaved
from moduli import m
from moduli.population import Population


def relu():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def short():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def tanh():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def convolution():
    return nn.Sequential(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(240, 10))


def attention():
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, 16)), encoder, nn.Flatten(), nn.Linear(64, 10)).eval()


def table():
    torch.manual_seed(0)
    rows = [*steps(), *iterations()]
    with torch.no_grad():
        rows += swarm()
        rows += building()
        for count in (64, 1024):
            for batch in (1, 8, 64, 256):
                rows += forms("ReLU", relu, count, batch)
        for count, bar in ((64, 0.60), (256, 0.70), (1024, 0.70)):
            rows += raw("ReLU", relu, count, 64, bar)
            rows += raw("short ReLU", short, count, 64, None)
            rows += raw("tanh", tanh, count, 64, None)
        rows += raw("convolution", convolution, 64, 8, 1.10)
        rows += raw("attention, not in training", attention, 32, 64, 1.10)
        rows += loops()
    return rows


def little():
    return nn.Sequential(nn.Linear(8, 32), nn.PReLU(), nn.Linear(32, 10), nn.ReLU(), nn.Linear(10, 2))


def steps():
    rows = []
    for make, count in ((little, 1024), (relu, 64)):
        pop = Population.of(make, count)
        ours = mo.Optimizer(pop, m.Adam(), m.LR(1e-3))
        x = torch.randn(4, next(iter(pop.template.parameters())).shape[1])
        ours.step(mo.closure(lambda pop=pop, x=x: pop.losses(lambda net: net(x).square().mean())))
        parameter = nn.Parameter(pop.matrix.clone())
        parameter.grad = torch.cat([leaf.grad.flatten(1) for leaf in pop.parameters()], 1)
        theirs = mo.Optimizer([parameter], m.Adam(), m.LR(1e-3))
        times = interleaved({"ours": ours.step, "matrix": theirs.step}, rounds=21, number=8)
        name = f"Adam + LR step, N={count}, P={pop.layout.numel} / on one N x P parameter"
        rows.append(line(name, times["ours"] / times["matrix"], 1.15, "x"))
    return rows


def iterations():
    rows = []
    for count, bar in ((64, 0.80), (256, 0.90)):
        x, y, base = torch.randn(64, 64), torch.randint(0, 10, (64,)), relu()
        loss = nn.functional.cross_entropy
        pops = {"adam": Population.of(relu, count), "swarm": Population.of(relu, count)}
        chains = {"adam": [m.Adam(), m.LR(1e-3)], "swarm": [m.Adam(), m.LR(1e-3), m.PSO(social=0.3)]}
        candidates = {
            name: (lambda opt, pop: lambda: opt.step(mo.closure(lambda: pop.losses(lambda net: loss(net(x), y)))))(
                mo.Optimizer(pop, *chains[name]), pop
            )
            for name, pop in pops.items()
        }
        stacked = {key: leaf.detach().clone().requires_grad_() for key, leaf in pops["adam"].named_parameters()}
        fused = torch.optim.Adam(stacked.values(), lr=1e-3, fused=True)
        gradients = torch.vmap(grad(lambda values, x=x, y=y, base=base: loss(functional_call(base, values, (x,)), y)))

        def raw(stacked=stacked, fused=fused, gradients=gradients):
            grads = gradients({key: leaf.detach() for key, leaf in stacked.items()})
            for key, leaf in stacked.items():
                leaf.grad = grads[key]
            fused.step()

        # Losses and gradients are recomputed in every step, so that gradients are new tensors.
        times = interleaved({**candidates, "raw": raw}, rounds=11, number=2, clock=process_time)
        rows += [
            line(f"iteration, N={count} / vmap(grad) + fused Adam", times["adam"] / times["raw"], bar, "x"),
            line(f"iteration with PSO after Adam, N={count} / without", times["swarm"] / times["adam"], 1.3, "x"),
        ]
    return rows


def swarm():
    count = 256
    x, best = (Population.of(relu, count) for _ in range(2))
    leader = best[3].clone()
    state = {"v": 0.1 * x.randn(), "x": x}
    a, b, c = x.matrix.clone(), best.matrix.clone(), 0.1 * torch.randn(count, 8970)
    row, spare = best.matrix[3].clone(), torch.empty(count, 8970)

    def ours():
        r1, r2 = torch.rand(count), torch.rand(count)
        v, x = state["v"], state["x"]
        state["v"] = v = 0.7 * v + 1.5 * r1 * (best - x) + 1.5 * r2 * (leader - x)
        x += v

    again = {"v": 0.1 * x.randn(), "x": x.clone()}

    def renamed():
        r1, r2 = torch.rand(count), torch.rand(count)
        v, x = again["v"], again["x"]
        again["v"] = v = 0.7 * v + 1.5 * r1 * (best - x) + 1.5 * r2 * (leader - x)
        again["x"] = x + v

    def by_hand():
        r1, r2 = torch.rand(count, 1), torch.rand(count, 1)
        torch.sub(b, a, out=spare)
        c.mul_(0.7).addcmul_(spare, 1.5 * r1)
        torch.sub(row, a, out=spare)
        c.addcmul_(spare, 1.5 * r2)
        a.add_(c)

    def naive():
        r1, r2 = torch.rand(count, 1), torch.rand(count, 1)
        return a + (0.7 * c + 1.5 * r1 * (b - a) + 1.5 * r2 * (row - a))

    times = interleaved({"ours": ours, "renamed": renamed, "hand": by_hand, "naive": naive}, rounds=21, number=2)
    return [
        line("swarm step, written with operators / by hand in place", times["ours"] / times["hand"], 1.2, "x"),
        line("the same with x = x + v / by hand in place", times["renamed"] / times["hand"], 1.2, "x"),
        line("the same expression on plain matrices / by hand in place", times["naive"] / times["hand"], None, "x"),
    ]


def building():
    times = interleaved({"class": lambda: Population.of(relu, 4096)}, rounds=3, number=1)
    return [line("building 4096 members of 8,970 parameters", times["class"], 2.0, "s")]


def forms(name, make, count, batch):
    pop, x = Population.of(make, count), torch.randn(batch, 64)
    candidates = {form: (lambda form=form: pop(x, vectorize=form)) for form in ("auto", "vmap", "chunked", "loop")}
    times = interleaved(candidates, rounds=7, seconds=0.02)
    best = min(times[form] for form in ("vmap", "chunked", "loop"))
    return [line(f"{name}, N={count}, batch {batch}: auto / best", times["auto"] / best, 1.1, "x")]


def raw(name, make, count, batch, bar):
    pop, x, base = Population.of(make, count), torch.randn(batch, 64), make()
    stacked = {key: leaf.detach().clone() for key, leaf in pop.named_parameters()}
    mapped = torch.vmap(lambda values: functional_call(base, values, (x,)))
    candidates = {"auto": lambda: pop(x), "raw": lambda: mapped(stacked), **peers(make, pop, x)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # of raw vmap, about attention
        times = interleaved(candidates, rounds=15, seconds=0.02, clock=process_time)
    rows = [line(f"{name}, N={count}, batch {batch}: auto / raw vmap", times["auto"] / times["raw"], bar, "x")]
    for peer in ("evotorch", "EvoX"):
        if peer in times:
            rows.append(
                line(f"{name}, N={count}, batch {batch}: {peer} / raw vmap", times[peer] / times["raw"], None, "x")
            )
    return rows


def peers(make, pop, x):
    """Return the same evaluation in the other libraries that are installed.

    Args:
        make: A function that makes the model.
        pop: The population.
        x: The input.
    """
    calls = {}
    flat = pop.matrix.clone()
    if importlib.util.find_spec("evotorch") is not None:
        from evotorch.neuroevolution.net import make_functional_module

        theirs = make_functional_module(make())
        calls["evotorch"] = lambda: torch.vmap(theirs, in_dims=(0, None))(flat, x)
    if importlib.util.find_spec("evox") is not None:
        from evox.utils import ParamsAndVector

        base = make()
        adapter = ParamsAndVector(dummy_model=base)
        calls["EvoX"] = lambda: torch.vmap(lambda p: functional_call(base, p, (x,)))(adapter.batched_to_params(flat))
    return calls


def loops():
    rows = []
    for batch, bar in ((1, "at least 6 x"), (64, "at least 1.7 x")):
        pop, x = Population.of(relu, 256), torch.randn(batch, 64)
        nets = [copy.deepcopy(net) for net in pop]
        times = interleaved({"auto": lambda: pop(x), "loop": lambda: [net(x) for net in nets]}, rounds=9, seconds=0.02)
        ratio = times["loop"] / times["auto"]
        row = line(f"256 ReLU networks, batch {batch}: a loop over modules / auto", ratio, None, "x")
        rows.append({**row, "bar": bar, "ok": ratio >= float(bar.split()[2])})
    return rows


def line(name, value, bar, unit):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


def main():
    for each in table():
        bar = "" if each["bar"] is None else f"  bar {each['bar']} {'met' if each['ok'] else 'MISSED'}"
        print(f"{each['name']:66} {each['value']:9.2f} {each['unit']}{bar}", flush=True)
    for name in ("evotorch", "evox"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed, so its rows are left out; `pip install {name}` adds them")


if __name__ == "__main__":
    main()
