"""Evolution: the cost of a generation beside EvoX, pycma and cmaes, of memory, and of sending members to workers.

A generation is ask, the sphere function, tell. EvoX and we work in single precision, pycma in double (it has no other).
EvoX's CMA-ES uses `torch.cond`, which this torch refuses in it; here it gets an ordinary `if` instead, which is faster.
OpenES is compared with Adam on both sides and mirrored noise on both sides. "Two workers" is wall-clock time. NumPy's BLAS,
which pycma uses, is held to one thread like torch: its second thread spins on into the turn of the next.
"""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from _timing import interleaved
from moduli.evolve import CMAES, DE, PSO, OpenES, Pool

N = 256


def ours(search):
    return lambda: search.tell(search.ask().square().sum(1))


def evox(algorithm):
    from evox.problems.numerical import Sphere
    from evox.workflows import StdWorkflow

    workflow = StdWorkflow(algorithm, Sphere())
    workflow.init_step()
    return workflow.step


def pycma(dim):
    import cma

    es = cma.CMAEvolutionStrategy([1.0] * dim, 1.0, {"popsize": N, "verbose": -9})

    def generation():
        members = es.ask()
        es.tell(members, [float((x * x).sum()) for x in members])

    return generation


def cyber(dim):
    """Return a generation of the package `cmaes`, which proposes one member at a time."""
    from cmaes import CMA

    es = CMA(mean=np.ones(dim), sigma=1.0, population_size=N)

    def generation():
        members = [es.ask() for _ in range(N)]
        es.tell([(x, float((x * x).sum())) for x in members])

    return generation


def row(name, value, bar, unit="x", least=False):
    ok = value >= bar if least else value <= bar
    return {"name": name, "value": value, "bar": f"at least {bar} {unit}" if least else bar, "unit": unit, "ok": ok}


def generations():
    from evox import algorithms
    from threadpoolctl import threadpool_limits

    dim = 1000
    lower, upper, x0 = -10 * torch.ones(dim), 10 * torch.ones(dim), torch.ones(dim)
    rows = []
    for name, mine, theirs, bar in [
        ("PSO", PSO(x0, population=N, bounds=(lower, upper)), algorithms.PSO(N, lower, upper), 0.4),
        ("DE", DE(x0, population=N, bounds=(lower, upper)), algorithms.DE(N, lower, upper), 0.3),
        ("OpenES", OpenES(x0, population=N), algorithms.OpenES(N, x0.clone(), 0.05, 0.1, optimizer="adam"), 0.95),
    ]:
        times = interleaved({"ours": ours(mine), "evox": evox(theirs)}, seconds=0.02)
        rows.append(row(f"{name}, {N} members of {dim}, against EvoX", times["ours"] / times["evox"], bar))
    cond = torch.cond
    torch.cond = lambda test, yes, no, args=(): yes(*args) if bool(test) else no(*args)
    try:
        for dim, rounds, bar in [(50, 15, 0.4), (1000, 3, 0.12)]:
            x0 = torch.ones(dim)
            peers = {"EvoX": evox(algorithms.CMAES(x0, 1.0, pop_size=N)), "pycma": pycma(dim), "cmaes": cyber(dim)}
            mine = ours(CMAES(x0, population=N, sigma=1.0))
            with threadpool_limits(1, "blas"):
                times = interleaved({"ours": mine, **peers}, rounds=rounds, seconds=0.03 if dim == 50 else 1e-4)
            best = min(peers, key=times.__getitem__)
            name = f"CMA-ES, {N} members of {dim}, against the best of EvoX, pycma and cmaes ({best})"
            rows.append(row(name, times["ours"] / times[best], bar))
    finally:
        torch.cond = cond
    return rows


def small_dimensions():
    """Return rows for CMA-ES on few variables: runs of 60 generations with the default population and stopping criteria."""
    from cmaes import CMA

    rows = []
    for dim in (5, 10):

        def mine(dim=dim):
            search = CMAES(torch.ones(dim, dtype=torch.float64), sigma=1.0)
            for _ in range(60):
                search.tell(search.ask().square().sum(1))
                search.should_stop()

        def theirs(dim=dim):
            es = CMA(mean=np.ones(dim), sigma=1.0)
            for _ in range(60):
                members = [es.ask() for _ in range(es.population_size)]
                es.tell([(x, float((x * x).sum())) for x in members])
                es.should_stop()

        times = interleaved({"ours": mine, "cmaes": theirs}, rounds=31, number=1)
        rows.append(row(f"CMA-ES, default population of {dim}, against cmaes", times["ours"] / times["cmaes"], 1.0))
    return rows


MEMORY = """
import torch
from moduli.evolve import search
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(1000, 990), torch.nn.Linear(990, 10))
x = torch.ones(1, 1000)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def run(population, budget):
    search(net, lambda net: net(x).square().sum(), method="openes", optimizer="sgd", population=population, budget=budget)
small = torch.nn.Linear(300, 300)  # once through the same code, which then is in memory
search(small, lambda net: net(torch.ones(300)).sum(), method="openes", optimizer="sgd", population=100, budget=100)
with torch.no_grad():
    net(x)
open("/proc/self/clear_refs", "w").write("5")
before = peak()
run(1000, 1000)
print((peak() - before) * 1024 / sum(p.numel() * p.element_size() for p in net.parameters()))
"""


def memory():
    source = str(Path(__file__).resolve().parent.parent / "src")
    # Vectors of this size are allocated by mmap, so that memory kept by the C library is not counted.
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", MEMORY], env=env, capture_output=True, text=True, check=True)
    return [
        row("a million parameters, 1000 members by seed: extra memory, in models", float(done.stdout), 3.0, "models")
    ]


def slow(row):
    time.sleep(0.05)
    return 0.0


def workers():
    x, times = torch.zeros(20, 10), {}
    for count in (1, 2):
        with Pool(count, start="fork") as pool:
            pool.map(slow, x)
            start = time.perf_counter()
            pool.map(slow, x)
            times[count] = time.perf_counter() - start
    return [row("two workers against one, a fitness of 50 ms", times[1] / times[2], 1.7, least=True)]


RAY = """
import time, numpy, ray, torch
from statistics import median
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
@ray.remote
class Actor:
    def array(self, x): return float(x[0])
    def tensor(self, x): return float(x[0])
actor, x = Actor.remote(), torch.zeros(2_621_440)
def clock(call):
    start = time.perf_counter()
    ray.get(call())
    return time.perf_counter() - start
flat, whole = lambda: actor.array.remote(x.numpy()), lambda: actor.tensor.remote(x)
clock(flat), clock(whole)
pairs = [(clock(flat), clock(whole)) for _ in range(15)]
print(median(a for a, _ in pairs) / median(b for _, b in pairs))
"""


def ray_transfer():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RAY)], env=env, capture_output=True, text=True, check=True
    )
    value = float(done.stdout.strip().splitlines()[-1])
    return [row("10 MB member to a Ray actor as a flat array, against a tensor", value, 0.2)]


SEEDS = """
import sys, time, ray, torch
from moduli.evolve import Ray, search
torch.set_num_threads(1)
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
class Timed(Ray):
    spent, members = [], 0
    def collect(self, fitness, rows, seeds, *rest):
        start = time.perf_counter()
        found = super().collect(fitness, rows, seeds, *rest)
        self.spent.append((time.perf_counter() - start) / len(seeds))
        return found
for rank in (None, 1):
    net = torch.nn.Linear(4000, 2500, bias=False)
    Timed.spent = []
    with Timed(2) as executor:
        more = {} if rank is None else {"rank": rank}
        search(net, lambda net: net.weight[0].sum(), method="openes", optimizer="sgd", population=24, budget=72,
               executor=executor, **more)
    print(1 / min(executor.spent[1:]))
"""


def ray_members():
    """Return a row for members of ten million parameters, made by two Ray actors from seeds (as rows: 7.4 per second)."""
    source = str(Path(__file__).resolve().parent.parent / "src")
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SEEDS], env=env, capture_output=True, text=True, check=True)
    plain, low_rank = (float(line) for line in done.stdout.strip().splitlines()[-2:])
    name = "members of 10,000,000 numbers through two Ray actors"
    return [
        row(f"{name}, noise drawn for each", plain, 74.0, "members/s", least=True),
        row(f"{name}, noise of rank 1", low_rank, 74.0, "members/s", least=True),
    ]


def latency():
    x, turns = torch.zeros(200, 10), []
    with Pool(1, start="fork") as pool:
        for _ in range(7):
            start = time.perf_counter()
            pool.map(torch.sum, x)
            turns.append((time.perf_counter() - start) / len(x))
    return [
        {
            "name": "a member of 10 numbers through the pool",
            "value": median(turns) * 1e6,
            "bar": None,
            "unit": "us",
            "ok": True,
        }
    ]


def table():
    return [*generations(), *small_dimensions(), *memory(), *workers(), *ray_transfer(), *ray_members(), *latency()]
