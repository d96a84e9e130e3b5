"""Labelled tensors against raw torch on the same numbers, and against qten where it is installed.

Both sides do the same work: where labels have to be reordered, raw torch does the `index_select` by hand. "Compiled" is
`torch.compile` (inductor) of a chain of ten operations, one of them a reordering, on labelled and on raw tensors.
"""

import random
import statistics
import subprocess
import sys
import time
import timeit
from importlib.util import find_spec

import numpy as np
import torch

import moduli as mo
from _timing import interleaved

BARS = {
    "add, equal labels": (1.5, 1.03),
    "add, equal axes, one positional": (None, None),
    "reorder + add": (1.3, 1.05),
    "matmul": (1.4, 1.05),
    "torch.matmul": (1.7, 1.1),
    "torch.matmul, dispatch alone": (None, None),
    "dot": (3.0, 1.1),
    "dot of vectors": (3.0, 3.0),
    "sel by label": (4.0, 4.0),
    "sel by date": (None, None),
    "t[0]": (1.6, 1.6),
    "sum over a named axis": (1.6, 1.15),
    "torch.sin(t)": (2.5, 1.06),
    "compiled chain of ten": (1.2, 1.02),
}


class Dispatched:
    """A minimal class with `__torch_function__`, to measure the overhead of torch's dispatch."""

    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(args[0].data, args[1].data)


def operands(n):
    row = mo.Space([f"r{i}" for i in range(n)], "row")
    column = mo.Space([f"c{i}" for i in range(n)], "column")
    a = mo.Tensor(torch.rand(n, n), (row, column))
    b = mo.Tensor(torch.rand(n, n), (row, column))
    turned = mo.Tensor(torch.rand(n, n), (row[::-1], column))
    other = mo.Tensor(torch.rand(n, n), (column, mo.Space([f"k{i}" for i in range(n)], "k")))
    batch = [mo.Tensor(torch.rand(n, n), (mo.Space(n, "batch"), column)) for _ in range(2)]
    return a, b, turned, other, batch


def chain(a, b, turned):
    x = a + b
    x = x * turned
    x = torch.sin(x)
    x = x - a
    x = x / (b + 2.0)
    x = torch.tanh(x)
    x = x * x
    return x + 1.0


def raw_chain(a, b, turned, index):
    x = a + b
    x = x * turned.index_select(0, index)
    x = torch.sin(x)
    x = x - a
    x = x / (b + 2.0)
    x = torch.tanh(x)
    x = x * x
    return x + 1.0


def pairs(n):
    """Return for each claim the labelled and the raw form."""
    a, b, turned, other, (p, q) = operands(n)
    x, y, z, w = a.data, b.data, turned.data, other.data
    u, v = p.data, q.data
    index = torch.arange(n - 1, -1, -1)
    bare, second = Dispatched(x), Dispatched(w)
    vector, covector = (mo.Tensor(torch.rand(n), other.dims[:1]) for _ in range(2))
    days = mo.Tensor(x, (mo.Space(np.datetime64("2000-01-01") + np.arange(n), "time"), other.dims[1]))
    compiled, raw = torch.compile(chain, fullgraph=True), torch.compile(raw_chain, fullgraph=True)
    with torch.no_grad():
        agree = torch.allclose(compiled(a, b, turned).data, raw(x, y, z, index), atol=1e-6)
    if not agree:
        raise AssertionError("the compiled chains disagree")
    return {
        "add, equal labels": (lambda: a + b, lambda: x + y),
        "add, equal axes, one positional": (lambda: p + q, lambda: u + v),
        "reorder + add": (lambda: a + turned, lambda: x + z.index_select(0, index)),
        "matmul": (lambda: a @ other, lambda: x @ w),
        "torch.matmul": (lambda: torch.matmul(a, other), lambda: torch.matmul(x, w)),
        "torch.matmul, dispatch alone": (lambda: torch.matmul(bare, second), lambda: torch.matmul(x, w)),
        "dot": (lambda: mo.dot(a, other, over="column"), lambda: torch.matmul(x, w)),
        "dot of vectors": (lambda: mo.dot(vector, covector), lambda: torch.dot(vector.data, covector.data)),
        "sel by label": (lambda: a.sel(row="r3"), lambda: x[3]),
        "sel by date": (lambda: days.sel(time="2000-01-04"), lambda: x[3]),
        "t[0]": (lambda: a[0], lambda: x[0]),
        "sum over a named axis": (lambda: a.sum("row"), lambda: x.sum(0)),
        "torch.sin(t)": (lambda: torch.sin(a), lambda: torch.sin(x)),
        "compiled chain of ten": (lambda: compiled(a, b, turned), lambda: raw(x, y, z, index)),
    }


def qten_pairs(n):
    """Return the same claims in qten, whose axes have no names."""
    from qten.linalg.tensors import Tensor
    from qten.symbolics.state_space import IndexSpace, StateSpace

    row = IndexSpace.linear(n)
    turned = StateSpace.__getitem__(row, list(range(n - 1, -1, -1)))
    a, b = (Tensor(data=torch.rand(n, n), dims=(row, row)) for _ in range(2))
    c = Tensor(data=torch.rand(n, n), dims=(turned, row))
    return {
        "add, equal labels": lambda: a + b,
        "reorder + add": lambda: a + c,
        "matmul": lambda: a @ b,
        "t[0]": lambda: a[0],
    }


def table():
    return list(measure())


def measure():
    """Yield each row when it is measured."""
    torch.set_num_threads(1)
    for place, n in enumerate((8, 512)):
        peers = qten_pairs(n) if find_spec("qten") else {}
        for name, (labelled, raw) in pairs(n).items():
            candidates = {"labelled": labelled, "raw": raw}
            if name in peers:
                candidates["qten"] = peers[name]
            times = interleaved(candidates, rounds=41)
            yield row(f"{name}, {n}x{n}: labelled / raw", times["labelled"] / times["raw"], BARS[name][place])
            if "qten" in times:
                yield row(f"{name}, {n}x{n}: qten / raw", times["qten"] / times["raw"], None)
    microseconds = interleaved({"space": lambda: mo.Space(10**7)})["space"] * 1e6
    yield row("Space(10**7)", microseconds, 10.0, "us")
    yield from many_labels()
    yield row("import moduli after import torch", import_seconds(), 0.3, "s")


def many_labels(n=10**6):
    """Return rows for an axis of many labels and its first sum with one in another order, against a pandas Series."""
    if not find_spec("pandas"):
        return []
    import pandas

    rng = np.random.default_rng(0)
    hours = np.datetime64("1990-01-01", "ns") + np.arange(n).astype("m8[h]")
    kinds = {
        "names": [f"gene{i}" for i in range(n)],
        "integers in any order": rng.permutation(n),
        "floats in any order": rng.standard_normal(n),
        "dates": hours,
        "dates in any order": rng.permutation(hours),
        "pairs": [(i // 1000, i % 1000) for i in range(n)],
    }
    built = []
    for kind, entries in kinds.items():
        candidates = {"ours": lambda g=entries: mo.Space(g), "theirs": lambda g=entries: pandas.Index(g).is_unique}
        best = {
            name: min(timeit.repeat(make, number=1, repeat=3, timer=time.process_time))
            for name, make in candidates.items()
        }
        built.append(
            row(
                f"10**6 labels, {kind}: an axis / pandas' Index, duplicates checked", best["ours"] / best["theirs"], 3.0
            )
        )
    labels, values = kinds["names"], torch.rand(n)
    turned = random.Random(0).sample(labels, n)

    def seconds(build, make):
        best = {"build": [], "add": []}
        for _ in range(3):
            start = time.process_time()
            index = build(list(labels))
            built = time.process_time()
            first, second = make(index), make(build(list(turned)))
            ready = time.process_time()
            first + second
            best["build"].append(built - start)
            best["add"].append(time.process_time() - ready)
        return {name: min(each) for name, each in best.items()}

    ours = seconds(mo.Space, lambda space: mo.Tensor(values, space))
    theirs = seconds(pandas.Index, lambda index: pandas.Series(values.numpy(), index=index))
    total = sum(ours.values()) / sum(theirs.values())
    return [
        *built,
        row("10**6 labels, an axis and the first sum with a permuted one / pandas", total, 1.0),
    ]


def import_seconds():
    """Return the seconds that `import moduli` adds to `import torch`, in new processes."""
    program = "import torch, time; t = time.perf_counter(); import moduli; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(5)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def row(name, value, bar, unit="x"):
    return {"name": name, "value": value, "bar": bar, "unit": unit, "ok": bar is None or value <= bar}


def main():
    for each in measure():
        bar = "" if each["bar"] is None else f"  (bar {each['bar']}{' ' + each['unit'] if each['unit'] != 'x' else ''})"
        print(
            f"{each['name']:50s} {each['value']:8.3f} {each['unit']}{bar}{'' if each['ok'] else '  MISSED'}", flush=True
        )


if __name__ == "__main__":
    main()
