"""The optim room against torch and torchzero: steps, whole iterations, memory, the first step.

One thread, candidates interleaved, medians; every row says what is timed. Run `python benchmarks/run.py optim`.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import moduli
from _fresh import time_steps
from _timing import interleaved
from kernels import FRESH, SHAPES, TINY, form
from moduli import Population, m, presets
from moduli.optim import Optimizer

try:
    import torchzero
except ModuleNotFoundError:  # a peer, in the bench extra
    torchzero = None

ROOT = Path(__file__).parents[1]
# Gradients are new tensors at every step, as in training.
ADAM = dict(zip(FRESH, (0.7, 0.6, 0.25, 0.92, 0.98), strict=True))
CHAIN = dict(zip(FRESH, (None, 0.40, 0.15, 0.80, 0.85), strict=True))
EAGER = dict(zip(SHAPES, (0.5, 0.1, 0.9, 1.0), strict=True))


def row(name: str, value: float, bar: float | None, unit: str = "x") -> dict:
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


def parameters(shapes) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def compare(theirs, torch_step, ours, our_step, shapes) -> float:
    """Return the time of a step relative to torch's; both get new gradients before every step.

    Args:
        theirs: The parameters of torch's optimizer.
        torch_step: Its step.
        ours: The parameters of the other optimizer.
        our_step: Its step.
        shapes: The shapes of the parameters.
    """
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    steps = max(1, 2_000_000 // (numbers + 2_000 * len(shapes)))
    times = time_steps({"torch": (theirs, torch_step), "ours": (ours, our_step)}, steps)
    return times["ours"] / times["torch"]


def adam_steps() -> list[dict]:
    rows = []
    for name, shapes in FRESH.items():
        theirs, params = parameters(shapes), parameters(shapes)
        torchs, ours = torch.optim.Adam(theirs, lr=1e-3, fused=True), Optimizer(params, m.Adam(), m.LR(1e-3))
        value = compare(theirs, torchs.step, params, ours.step, shapes)
        rows.append(row(f"Adam step, {name} / torch fused", value, ADAM[name]))
    return rows


class NoLook:
    """A watch that never reports an edit, at no cost."""

    def has_changed(self) -> bool:
        return False


def edited_steps() -> list[dict]:
    """Return rows for the cost of looking for edits of a module at every step, relative to the same optimizer without it.

    Another optimizer would have its state at other addresses, which alone makes a difference of 10 %.
    """

    class Particle(moduli.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(100))

    rows = []
    plain = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(100)))
    for name, net, bar in (("nn.Module", plain, 1.05), ("mo.Module", Particle(), 1.02)):
        params, optimizer = list(net.parameters()), Optimizer(net, m.Adam(), m.LR(1e-3))
        watches = {"look": optimizer._following._watch, "none": NoLook()}
        times: dict[str, list[int]] = {name: [] for name in watches}
        rounds = 200 if os.environ.get("MODULI_BENCH_QUICK") else 1000
        for turn in range(rounds):  # one step each, so that a slow moment affects both
            for what in sorted(watches, reverse=bool(turn % 2)):
                optimizer._following._watch = watches[what]
                for param in params:
                    param.grad = torch.randn_like(param)
                start = time.thread_time_ns()
                optimizer.step()
                times[what].append(time.thread_time_ns() - start)
        value = median(times["look"]) / median(times["none"])
        rows.append(row(f"Adam step of a {name} of 200 tensors / without looking for edits", value, bar))
    return rows


def small_steps() -> list[dict]:
    """Return rows for other optimizers on four tiny tensors, relative to torch's default."""
    cases = {
        "momentum SGD": (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), [m.HeavyBall(0.9), m.LR(1e-3)], 1.0),
        "NAdam": (lambda p: torch.optim.NAdam(p, lr=1e-3), presets.nadam(lr=1e-3), 1.0),
        "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3), [m.Adam(), m.LR(1e-3)], None),
    }
    rows = []
    for name, (make, links, bar) in cases.items():
        for what, shapes in TINY.items():
            theirs, params = parameters(shapes), parameters(shapes)
            value = compare(theirs, make(theirs).step, params, Optimizer(params, *links).step, shapes)
            rows.append(row(f"{name} step, {what} / torch's default", value, bar))
    return rows


def count_calls() -> list[dict]:
    """Return rows for the calls of library functions in one warm step with new gradients, and for their files."""
    population = Population.of(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), 8)
    params = parameters(next(iter(TINY.values())))
    cases = {
        "ClipNorm | Adam | WeightDecay | LR": (params, Optimizer(params, *chain()), 70, 8),
        "Adam | LR of a population": (
            list(population.parameters()),
            Optimizer(population, m.Adam(), m.LR(1e-3)),
            110,
            12,
        ),
    }
    root, rows = str(Path(moduli.__file__).parent), []
    for name, (params, optimizer, calls, files) in cases.items():
        names: list[str] = []

        def note(frame, event, arg, names=names) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(root):
                names.append(frame.f_code.co_filename)

        for turn in range(5):
            for param in params:
                param.grad = torch.randn_like(param)
            sys.setprofile(note if turn == 4 else None)
            optimizer.step()
            sys.setprofile(None)
        rows.append(row(f"warm step of {name}, calls", len(names), calls, ""))
        rows.append(row(f"warm step of {name}, files", len(set(names)), files, ""))
    return rows


def chain() -> list:
    return [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3)]


def chain_steps(fused: bool) -> list[dict]:
    rows = []
    for name, shapes in (FRESH if fused else SHAPES).items():
        theirs, params = parameters(shapes), parameters(shapes)
        adamw = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.01, fused=fused, foreach=None if fused else True)

        def step(theirs=theirs, adamw=adamw) -> None:
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            adamw.step()

        ours = Optimizer(params, *chain())
        what = "clip + fused AdamW" if fused else "clip + foreach AdamW, no compiler"
        bar = (CHAIN if fused else EAGER)[name]
        with form("auto" if fused else "eager"):
            value = compare(theirs, step, params, ours.step, shapes)
        rows.append(row(f"ClipNorm | Adam | WeightDecay | LR, {name} / {what}", value, bar))
    return rows


def iterations() -> list[dict]:
    """Return rows for whole iterations: zero_grad, forward, backward, step."""
    rows = []
    small = [torch.nn.ParameterList([torch.nn.Parameter(torch.randn(10)) for _ in range(1000)]) for _ in range(2)]
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, dropout=0.0)
    nets = [torch.nn.TransformerEncoder(layer, 6) for _ in range(2)]
    x = torch.randn(1, 4, 256)

    def many(params):
        return lambda: torch.stack([p.sum() for p in params]).square().sum()

    tiny = [torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)) for _ in range(2)]
    inputs = torch.randn(32, 2)
    cases = {
        "MLP 2-16-1, batch 32": (tiny, [lambda net=net: net(inputs).square().mean() for net in tiny], 1.0),
        "1000 x 10": (small, [many(list(p)) for p in small], 0.65),
        "encoder, 6 layers, d=256": (nets, [lambda net=net: net(x).square().mean() for net in nets], 0.98),
    }
    for name, (modules, losses, bar) in cases.items():
        torchs = torch.optim.Adam(modules[0].parameters(), lr=1e-3, fused=True)
        ours = Optimizer(modules[1], m.Adam(), m.LR(1e-3))

        def iteration(optimizer, loss):
            def run() -> None:
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()

            return run

        times = interleaved(
            {"torch": iteration(torchs, losses[0]), "ours": iteration(ours, losses[1])}, rounds=15, seconds=0.02
        )
        rows.append(row(f"iteration with Adam, {name} / torch fused", times["ours"] / times["torch"], bar))
    return rows


def against_torchzero() -> list[dict]:
    if torchzero is None:
        return []
    rows = []
    for name in ("200 x 64x64", "1000 x 10"):
        ours = Optimizer(parameters(SHAPES[name]), *chain())
        tz = torchzero.m
        theirs = torchzero.Optimizer(
            parameters(SHAPES[name]), tz.ClipNorm(1.0, dim="global"), tz.Adam(), tz.WeightDecay(0.01), tz.LR(1e-3)
        )
        times = interleaved({"torchzero": theirs.step, "ours": ours.step}, rounds=15, seconds=0.02)
        rows.append(row(f"the chain, {name} / torchzero", times["ours"] / times["torchzero"], 0.25))
    return rows


# Collect garbage before the step: the first collection after imports takes 0.1 s, and might fall into the step.
FIRST = """
import gc, time, torch
from moduli import m
from moduli.optim import Optimizer
params = [torch.nn.Parameter(torch.randn({shape})) for _ in range({count})]
for p in params: p.grad = torch.randn_like(p)
opt = Optimizer(params, m.ClipNorm(1.0), m.Adam(beta1=0.91), m.WeightDecay(0.01), m.LR(1e-3))
gc.collect()
start = time.perf_counter()
opt.step()
print(time.perf_counter() - start)
"""


def first_steps() -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o700)
        environment = {**os.environ, "MODULI_KERNELS_CACHE": cache, "PYTHONPATH": str(ROOT / "src")}
        for what, count, bar in (("cold", 4, 1.5), ("cached", 4, 0.1), ("cached", 1000, 0.1)):
            code = FIRST.format(shape=16, count=count)
            out = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            rows.append(row(f"first step of a chain, {what} kernel, {count} tensors", float(out.stdout), bar, "s"))
    return rows


def memory() -> list[dict]:
    """Return a row for the peak memory of the first steps of Adam + LR, in sizes of the parameters."""
    code = """
import re, torch
from moduli import m
from moduli.optim import Optimizer
torch.set_num_threads(1)

def resident(what):  # in KiB; the high-water mark of the kernel is reset before
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

tiny = [torch.nn.Parameter(torch.ones(3))]
tiny[0].grad = torch.ones(3)
Optimizer(tiny, m.Adam(), m.LR(1e-3)).step()
params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(50)]
for p in params: p.grad = torch.ones_like(p)
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
opt = Optimizer(params, m.Adam(), m.LR(1e-3))
for _ in range(3): opt.step()
print((resident("VmHWM") - before) / 1024 / (50 * 4))
"""
    if not os.path.exists("/proc/self/clear_refs"):
        return []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return [row("peak extra memory of Adam + LR / parameters", float(out.stdout), 2.2)]


def table() -> list[dict]:
    """Return all rows."""
    started = time.perf_counter()
    rows = [
        *count_calls(),
        *adam_steps(),
        *edited_steps(),
        *small_steps(),
        *chain_steps(fused=True),
        *chain_steps(fused=False),
        *iterations(),
        *against_torchzero(),
        *first_steps(),
        *memory(),
    ]
    print(f"took {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return rows


if __name__ == "__main__":
    for line in table():
        print(f"{line['name']:70} {line['value']:.3f} {line['unit']}  bar {line['bar']}  {line['ok']}")
