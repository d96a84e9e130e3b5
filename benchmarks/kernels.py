"""The kernels room against torch: one thread, candidates interleaved, medians, ratios beside their bars.

Run `python benchmarks/kernels.py`; `table()` gives the rows to a program.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from _fresh import time_steps
from moduli import Optimizer, kernels, m

ROOT = Path(__file__).parents[1]


def adam(p, g, m, v, lr, beta1, beta2, eps, step):
    m = torch.lerp(m, g, 1 - beta1)
    v = torch.addcmul(beta2 * v, g, g, value=1 - beta2)
    rate = lr / (1 - beta1**step)
    return torch.addcdiv(p, m, v.sqrt() / (1 - beta2**step) ** 0.5 + eps, value=-rate), m, v


def encoder() -> list[tuple[int, ...]]:
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return [tuple(p.shape) for p in torch.nn.TransformerEncoder(layer, 6).parameters()]


SHAPES = {
    "200 x 64x64": [(64, 64)] * 200,
    "1000 x 10": [(10,)] * 1000,
    "encoder, 6 layers, d=256": encoder(),
    "4 x 2048x2048": [(2048, 2048)] * 4,
}
TINY = {"4 tiny tensors": [(16, 2), (16,), (1, 16), (1,)]}
FRESH = {**TINY, **SHAPES}


@contextlib.contextmanager
def form(value: str) -> Iterator[None]:
    before = os.environ.get("MODULI_KERNELS")
    os.environ["MODULI_KERNELS"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["MODULI_KERNELS"]
        else:
            os.environ["MODULI_KERNELS"] = before


def interleaved(*candidates: Callable[[], object], seconds: float = 2.0) -> list[float]:
    """Return the median seconds of each candidate; candidates take turns until the time is over."""
    times: list[list[float]] = [[] for _ in candidates]
    for candidate in candidates:
        candidate()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 7:
        for candidate, own in zip(candidates, times, strict=True):
            start = time.perf_counter()
            candidate()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


Candidates = dict[str, tuple[list[torch.nn.Parameter], Callable[[], object]]]


def adam_pair(shapes: list[tuple[int, ...]], **options: bool) -> Candidates:
    """Return torch's step and the fused one, each with its own parameters."""
    theirs, params = ([torch.nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    reference = torch.optim.Adam(theirs, **options)
    moments = [[torch.zeros(shape) for shape in shapes] for _ in range(2)]
    fused = kernels.fuse(adam, inplace=("p", "m", "v"), private=("m", "v"))
    bound = fused.bind(m=moments[0], v=moments[1])  # as optimizers bind their moments
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        with torch.no_grad():
            bound(params, [param.grad for param in params], 1e-3, 0.9, 0.999, 1e-8, count)

    return {"torch": (theirs, reference.step), "ours": (params, step)}


def row(name: str, value: float, bar: float, unit: str) -> dict[str, object]:
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": value <= bar}


def chain_pair(shapes: list[tuple[int, ...]], **options: bool) -> Candidates:
    """Return clipping with torch's AdamW, and the same as a chain of links."""
    lists = [[torch.nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2)]
    reference = torch.optim.AdamW(lists[0], lr=1e-3, weight_decay=0.01, **options)
    links = [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3)]
    opt = Optimizer(lists[1], *links)

    def theirs() -> None:
        torch.nn.utils.clip_grad_norm_(lists[0], 1.0)
        reference.step()

    return {"torch": (lists[0], theirs), "ours": (lists[1], opt.step)}


def compare(pair: Candidates, which: str, shapes: list[tuple[int, ...]]) -> float:
    """Return the time of the second step relative to the first, with new gradients at every step.

    Args:
        pair: The steps to compare.
        which: The form of kernels, as in `form`.
        shapes: The shapes of the parameters.
    """
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    with form(which):
        times = time_steps(pair, steps=max(1, 2_000_000 // (numbers + 2_000 * len(shapes))))
    return times["ours"] / times["torch"]


def adam_rows() -> list[dict[str, object]]:
    rows = []
    for (name, shapes), bar, chain in zip(
        FRESH.items(), (0.7, 0.6, 0.25, 0.92, 0.98), (1.0, 0.40, 0.15, 0.80, 0.85), strict=True
    ):
        value = compare(adam_pair(shapes, fused=True), "c", shapes)
        rows.append(row(f"Adam, {name}", value, bar, "of torch fused"))
        value = compare(chain_pair(shapes, fused=True), "c", shapes)
        rows.append(row(f"clip, Adam, decay, lr, {name}", value, chain, "of clip + torch fused"))
    return rows


def foreach_rows() -> list[dict[str, object]]:
    rows = []
    for (name, shapes), bar in zip(SHAPES.items(), (1.05, 1.0, 1.05, 1.05), strict=True):
        value = compare(chain_pair(shapes, foreach=True), "foreach", shapes)
        rows.append(row(f"clip, Adam, decay, lr, foreach form, {name}", value, bar, "of clip + torch foreach"))
    return rows


def combination_shapes() -> list[tuple[int, ...]]:
    """Return 75 shapes with 10.9 million elements."""
    shapes: list[tuple[int, ...]] = [(512, 288), (512,), (288,)] * 25
    rest = 10_900_000 - sum(torch.Size(s).numel() for s in shapes)
    return [(rest // 512 + 288, 512), *shapes[1:]]


def combination_row() -> dict[str, object]:
    shapes = combination_shapes()
    a, b, c = ([torch.randn(shape) for shape in shapes] for _ in range(3))
    total = sum(t.numel() for t in a)
    vector, x, y = torch.empty(total), torch.randn(total), torch.randn(total)
    fused = kernels.fuse(lambda a, b, c: a + 0.5 * (b - c))

    def ours() -> float:
        with form("c"):
            return float(fused(a, b, c, flat=True)[-1])

    axpy, here = interleaved(lambda: torch.add(x, y, alpha=0.5, out=vector), ours)
    return row("a + 0.5*(b - c), 75 tensors, 10.9M, new and used", here / axpy, 2.5, "of an out= axpy")


START = """
import time, torch
from moduli import Optimizer, kernels, m
def adam(p, g, m, v, lr, b1, b2, eps):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    return p - lr * m / (v.sqrt() + eps), m, v
lists = [[torch.ones(10) for _ in range(1000)] for _ in range(4)]
start = time.perf_counter()
kernels.fuse(adam, inplace=("p", "m", "v"))(*lists, 1e-3, 0.9, 0.999, 1e-8)
print(time.perf_counter() - start)
"""


def start_rows() -> list[dict[str, object]]:
    """Return rows for the first call in a new process: tracing, compiling or loading, checking 4000 tensors, running."""
    cold, cached = [], []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "MODULI_KERNELS_CACHE": cache, "MODULI_KERNELS": "c", "PYTHONPATH": str(ROOT / "src")}
            for times in (cold, cached):
                done = subprocess.run(
                    [sys.executable, "-c", START], env=env, capture_output=True, text=True, check=True
                )
                times.append(float(done.stdout))
    return [
        row("cold build, first call in a process", statistics.median(cold), 1.5, "s"),
        row("first step with a cached kernel, 1000 tensors", statistics.median(cached), 0.1, "s"),
    ]


STEP = """
import time, torch
from moduli import Optimizer, m
params = [torch.nn.Parameter(torch.randn(10)) for _ in range(1000)]
for p in params: p.grad = torch.randn_like(p)
opt = Optimizer(params, m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3))
start = time.perf_counter()
opt.step()
print(time.perf_counter() - start)
"""


def first_step_row() -> dict[str, object]:
    """Return a row for the first step of an optimizer in a new process, with kernels compiled by another one."""
    times = []
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "MODULI_KERNELS_CACHE": cache, "MODULI_KERNELS": "c", "PYTHONPATH": str(ROOT / "src")}
        for _ in range(6):
            done = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, check=True)
            times.append(float(done.stdout))
    what = "first step of clip, Adam, decay, lr with cached kernels, 1000 tensors"
    return row(what, statistics.median(times[1:]), 0.1, "s")


class Launches(TorchDispatchMode):
    """A mode that counts the operations that an accelerator runs, without views and allocations."""

    FREE = ("device", "empty", "new_empty", "view", "detach", "alias", "as_strided", "split", "lift_fresh", "reshape")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, result))
        on_device = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in leaves)
        self.count += on_device and not func.overloadpacket.__name__.startswith(self.FREE)
        return result


def launch_rows() -> list[dict[str, object]]:
    """Return rows for the launches of a step on a fake accelerator, where reading a value back raises."""
    rows = []
    for count in (4, 400):
        with form("foreach"), FakeTensorMode():
            params = [torch.nn.Parameter(torch.empty(8, 3, device="cuda")) for _ in range(count)]
            for p in params:
                p.grad = torch.empty(8, 3, device="cuda")
            opt = Optimizer(params, m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3))
            for _ in range(2):
                with Launches() as seen:
                    opt.step()
        rows.append(row(f"launches of clip, Adam, decay, lr, foreach, {count} tensors", seen.count, 24, "launches"))
    return rows


def overhead_rows() -> list[dict[str, object]]:
    """Return rows for the overhead of a call: tensors of one element, twenty calls in a row."""
    rows = []
    fused = kernels.fuse(lambda p, g, lr: p - lr * g, inplace="p")
    with form("c"), torch.no_grad():
        for count in (1, 100, 1000):
            lists = [[torch.zeros(1) for _ in range(count)] for _ in range(2)]
            moving = [[torch.zeros(1) for _ in range(count)] for _ in range(2)]

            def still(lists=lists) -> None:
                for _ in range(20):
                    fused(*lists, 0.1)

            def moved(lists=lists, moving=moving) -> None:
                for _ in range(20):
                    moving.reverse()
                    fused(lists[0], moving[0], 0.1)

            first, second = interleaved(still, moved, seconds=1.0)
            bar = 15 + 0.5 * count
            rows.append(row(f"one call, {count} tensors", first / 20 * 1e6, bar, "us"))
            rows.append(row(f"one call, {count} tensors, new gradients", second / 20 * 1e6, bar, "us"))
    return rows


def table() -> list[dict[str, object]]:
    """Return all rows: name, value, bar, unit, and whether the bar is met."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [*adam_rows(), *foreach_rows(), *launch_rows(), combination_row()]
        return [*rows, *start_rows(), first_step_row(), *overhead_rows()]
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    """Print the table."""
    print(f"{'what':70} {'measured':>9} {'at most':>9}")
    for line in table():
        mark = "" if line["ok"] else "  over"
        print(f"{line['name']:70} {line['value']:9.3f} {line['bar']:9.2f} {line['unit']}{mark}")


if __name__ == "__main__":
    main()
