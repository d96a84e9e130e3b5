"""Axes of whole models: what tracing costs, and learning rates that hold for every width.

GPT-2 small has no weights here (the meta device). The sweep trains an MLP of three layers on digits with Adam, for 60 steps, at
widths from 64 to 1024 and learning rates a factor of two apart, five seeds each; the best rate has the least geometric mean of the
losses.
`python benchmarks/axes.py` runs the sweep and keeps it for the picture of docs/axes.md. The comparison with `mup` runs where it is
installed (`pip install --no-deps mup`: its torchvision need not fit this torch).
"""

import copy
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import moduli as mo
from _timing import interleaved
from moduli import m, presets

KEPT = Path(__file__).resolve().parent.parent / "docs" / "img" / "mup.json"
WIDTHS = (64, 128, 256, 512, 1024)
RATES = [2.0**-power for power in range(2, 12)]
SEEDS = range(2 if os.environ.get("MODULI_BENCH_QUICK") else 5)
BASE = 64


def table():
    rows = [*trace_rows(), *sweep_rows(sweep()), *step_rows()]
    difference = compare_with_mup()
    if difference is not None:
        rows.append(row("muP: parameters after 5 steps, largest difference from `mup` 1.0", difference, 1e-5, ""))
    return rows


def trace_gpt2():
    """Trace GPT-2 small in this process, and print seconds and megabytes."""
    # Files beside this one have names of packages that transformers imports.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    import transformers

    with torch.device("meta"):
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).eval()
    ids = torch.zeros(1, 128, dtype=torch.int64)
    mo.axes.trace(nn.Linear(2, 2), torch.zeros(1, 2))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    axes = mo.axes.trace(net, ids, output=lambda result: result["logits"])
    seconds = time.perf_counter() - start
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps([seconds, more, len(axes.free)]))


def trace_rows():
    try:
        import transformers  # noqa: F401
    except ImportError:
        return []
    command = [sys.executable, "-W", "ignore", __file__, "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    seconds, megabytes, free = json.loads(done.stdout.splitlines()[-1])
    return [
        row(f"trace GPT-2 small, 124M parameters ({free} free axes)", seconds, 5.0, "s"),
        row("trace GPT-2 small: more memory", megabytes, 200.0, "MB"),
    ]


def make_mlp(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def load_digits():
    from sklearn.datasets import load_digits as load

    data = load()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    return x - x.mean(0), torch.tensor(data.target)


def train(width, rate, scaled, seed, data, steps=60):
    """Return the loss over all digits after some steps.

    Args:
        width: The width of the MLP.
        rate: The learning rate.
        scaled: Whether to use muP.
        seed: The seed.
        data: Images and digits.
        steps: The number of steps.
    """
    x, y = data
    torch.manual_seed(seed)
    net = make_mlp(width)
    links = [m.Adam(), m.LR(rate)]
    if scaled:
        axes = mo.axes.trace(net, x[:1])
        axes.initialise_mup(net, base=BASE)
        links.insert(1, m.MuP(axes, base=BASE))
    opt = mo.Optimizer(net, *links)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (128,), generator=batches)
        opt.zero_grad()
        nn.functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
        opt.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(x), y).item()
    return loss if math.isfinite(loss) else 1e3


def sweep():
    """Return the geometric mean of losses, by parametrization, width and rate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = load_digits()
    try:
        return {
            name: {
                str(width): [
                    math.exp(sum(math.log(train(width, rate, scaled, seed, data)) for seed in SEEDS) / len(SEEDS))
                    for rate in RATES
                ]
                for width in WIDTHS
            }
            for name, scaled in (("standard", False), ("muP", True))
        }
    finally:
        torch.set_num_threads(threads)


def find_best(losses):
    """Return log2 of the best rate at each width."""
    return [round(math.log2(RATES[min(range(len(RATES)), key=line.__getitem__)])) for line in losses.values()]


def sweep_rows(results):
    moves = {name: max(find_best(losses)) - min(find_best(losses)) for name, losses in results.items()}
    return [
        row("best learning rate, widths 64 to 1024, muP: moves by factors of 2", moves["muP"], 1.0, ""),
        {
            **row("best learning rate, the same, standard: moves by factors of 2", moves["standard"], None, ""),
            "bar": "at least 3",
            "ok": moves["standard"] >= 3,
        },
    ]


def step_rows():
    """Return rows for heads in one call against a loop over matrices, and for a step with axes against one without."""
    torch.manual_seed(0)
    heads, size, model = 36, 64, 768
    net = nn.Sequential(nn.Linear(model, heads * size, bias=False), nn.Linear(heads * size, 2, bias=False))
    axes = mo.axes.trace(net, torch.zeros(1, model), names={"0.weight": f"(head={heads} size) model"})
    whole = mo.Optimizer([("0.weight", net[0].weight)], m.Orthogonalize(batch="head"), m.LR(1e-3), axes=axes)
    parts = [nn.Parameter(part.clone()) for part in net[0].weight.detach().split(size)]
    loop = mo.Optimizer(parts, m.Orthogonalize(), m.LR(1e-3))
    grad = torch.randn_like(net[0].weight)

    def step_whole():
        net[0].weight.grad = grad.clone()
        whole.step()

    def step_parts():
        for param, part in zip(parts, grad.split(size), strict=True):
            param.grad = part.clone()
        loop.step()

    times = interleaved({"whole": step_whole, "parts": step_parts}, rounds=7, number=1)
    plain, traced = copy.deepcopy(net), copy.deepcopy(net)
    opts = [mo.Optimizer(plain, *presets.adamw()), mo.Optimizer(traced, *presets.adamw(), axes=axes)]
    for param in (*plain.parameters(), *traced.parameters()):
        param.grad = torch.randn_like(param)
    steps = interleaved({"plain": opts[0].step, "axes": opts[1].step}, rounds=15)
    return [
        row("Orthogonalize(batch='head') of 36 heads / 36 matrices", times["whole"] / times["parts"], None, "x"),
        row("a step of AdamW with axes / without", steps["axes"] / steps["plain"], 1.05, "x"),
    ]


def compare_with_mup(width=256, steps=5):
    """Return the largest difference from `mup` after training in float64 by Adam and by SGD; None where it is not installed.

    `mup` has a multiplier in its last layer (table 8), where these links have a smaller start and step (table 3).
    """
    try:
        import mup
    except ImportError:
        return None

    def make(units):
        hidden = [nn.Linear(64, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh()]
        return nn.Sequential(*hidden, mup.MuReadout(units, 10)).double()

    x, y = load_digits()
    x, ratio, worst = x.double()[:200], width / BASE, 0.0
    for rule in ("adam", "sgd"):
        torch.manual_seed(0)
        theirs = mup.set_base_shapes(make(width), make(BASE), delta=make(2 * BASE), rescale_params=False)
        nn.init.normal_(theirs[4].weight, std=0.1)
        ours = nn.Sequential(*copy.deepcopy(list(theirs[:4])), nn.Linear(width, 10).double())
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            ours[4].weight.div_(ratio)
        axes = mo.axes.trace(ours, x)
        adam = [m.Adam(eps=1e-30)] if rule == "adam" else []
        opts = [
            mo.Optimizer(ours, *adam, m.MuP(axes, base=BASE, rule=rule), m.LR(0.01)),
            mup.MuAdam(theirs.parameters(), lr=0.01, eps=1e-30) if adam else mup.MuSGD(theirs.parameters(), lr=0.01),
        ]
        for _ in range(steps):
            for net, opt in zip((ours, theirs), opts, strict=True):
                opt.zero_grad()
                nn.functional.cross_entropy(net(x), y[:200]).backward()
                opt.step()
        for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            other = two.detach() / (ratio if name == "4.weight" else 1.0)
            worst = max(worst, float((one.detach() - other).abs().max()))
    return worst


def row(name, value, bar, unit):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


if __name__ == "__main__":
    if sys.argv[1:] == ["--trace"]:
        trace_gpt2()
    else:
        results = sweep()
        KEPT.write_text(json.dumps({"rates": RATES, "losses": results}) + "\n", encoding="utf-8")
        for entry in sweep_rows(results):
            print(entry)
