"""Success rates and evaluations on eight functions, beside pycma and nevergrad: `python benchmarks/bbob.py`.

Every run starts at a random point of [-4, 4]ⁿ of a shifted (and, but for the separable ones, rotated) function, and has
succeeded when it is within 1e-6 of the optimum (1e-2 for the step function, which is flat near it). The table has the
share of runs that succeeded and the mean number of evaluations of those. It prints the tables and writes them into
docs/evolution.md. Runs are shared among processes, one for each processor, and take under ten minutes on two of them; names of
methods as arguments make a table of those alone, which is only printed.
"""

import argparse
import math
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from moduli.evolve import CMAES, DE, PSO, SNES, XNES

BUDGET = {5: 5_000, 20: 20_000}
SEEDS = 9
PAGE = Path(__file__).resolve().parent.parent / "docs" / "evolution.md"
BEGIN, END = "<!-- made by benchmarks/bbob.py -->", "<!-- end -->"


def sphere(z):
    return z.square().sum(1)


def ellipsoid(z):
    return (z.square() * torch.logspace(0, 6, z.shape[1], dtype=z.dtype)).sum(1)


def rosenbrock(z):
    z = z + 1
    return (100 * (z[:, 1:] - z[:, :-1].square()).square() + (1 - z[:, :-1]).square()).sum(1)


def rastrigin(z):
    return (z.square() - 10 * torch.cos(2 * math.pi * z) + 10).sum(1)


def ackley(z):
    near = torch.exp(-0.2 * z.square().mean(1).sqrt())
    return 20 + math.e - 20 * near - torch.exp(torch.cos(2 * math.pi * z).mean(1))


def schwefel(z):
    """Schwefel's problem 1.2, the double sum."""
    return z.cumsum(1).square().sum(1)


def step(z):
    return (z + 0.5).floor().square().sum(1) + 1e-3 * z.square().mean(1)


def attractive_sector(z):
    return torch.where(z > 0, 100 * z, z).square().sum(1)


FUNCTIONS = [sphere, ellipsoid, rosenbrock, rastrigin, ackley, schwefel, step, attractive_sector]
SEPARABLE = {sphere, rastrigin, step}


def problem(function, dim, seed):
    g = torch.Generator().manual_seed(1000 * dim + seed)
    shift, start = 8 * torch.rand(2, dim, generator=g, dtype=torch.float64) - 4
    R = torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64))[0]
    R = torch.eye(dim, dtype=torch.float64) if function in SEPARABLE else R
    target = 1e-2 if function is step else 1e-6
    return (lambda x: function((x - shift) @ R)), start, target


def told(make):
    def run(f, start, target, budget, seed):
        search = make(start, seed=seed, target=target, max_evaluations=budget)
        while not search.should_stop():
            search.tell(f(search.ask()))
        return search.best_fitness <= target, search.evaluations

    return run


def pycma(f, start, target, budget, seed):
    import cma

    options = {"verbose": -9, "seed": seed + 1, "ftarget": target, "maxfevals": budget}
    es = cma.CMAEvolutionStrategy(start.numpy(), 2.0, options)
    while not es.stop():
        x = es.ask()
        es.tell(x, f(torch.from_numpy(np.stack(x))).tolist())
    return es.result.fbest <= target, es.result.evaluations


def nevergrad(f, start, target, budget, seed):
    import nevergrad as ng

    parametrization = ng.p.Array(init=start.numpy()).set_mutation(sigma=2.0)
    parametrization.random_state.seed(seed)
    optimizer = ng.optimizers.CMA(parametrization=parametrization, budget=budget)
    for count in range(1, budget + 1):
        x = optimizer.ask()
        value = float(f(torch.from_numpy(x.value)[None]))
        if value <= target:
            return True, count
        optimizer.tell(x, value)
    return False, budget


METHODS = {
    "CMAES": told(lambda x, **o: CMAES(x, sigma=2.0, **o)),
    "CMAES bipop": told(lambda x, **o: CMAES(x, sigma=2.0, restarts="bipop", **o)),
    "XNES": told(lambda x, **o: XNES(x, sigma=2.0, **o)),
    "SNES": told(lambda x, **o: SNES(x, sigma=2.0, **o)),
    "SHADE": told(lambda x, **o: DE(x, strategy="current-to-pbest/1", adapt="shade", population=30, spread=2.0, **o)),
    "PSO": told(lambda x, **o: PSO(x, population=30, spread=2.0, **o)),
    "pycma": pycma,
    "nevergrad CMA": nevergrad,
}


# One object for each member: in 20 dimensions it alone would take longer than all others together.
SLOW = {"nevergrad CMA"}


def run_one(task):
    """One run: (succeeded, evaluations, seconds)."""
    name, index, dim, seed = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    f, start, target = problem(FUNCTIONS[index], dim, seed)
    clock = time.process_time()
    done, evaluations = METHODS[name](f, start, target, BUDGET[dim], seed)
    return bool(done), int(evaluations), time.process_time() - clock


def cell(runs):
    solved = [evaluations for done, evaluations, _ in runs if done]
    return f"{len(solved)}/{len(runs)}" + (f" {sum(solved) / len(solved):.0f}" if solved else "")


def tables(names, dims_of, workers, say):
    lines = {}
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        # Methods that take long last, so that everything else is there early.
        for name in names:
            for dim in dims_of(name):
                tasks = [(name, i, dim, seed) for i in range(len(FUNCTIONS)) for seed in range(SEEDS)]
                runs = pool.map(run_one, tasks, chunksize=1)
                cells = [cell(runs[i * SEEDS : (i + 1) * SEEDS]) for i in range(len(FUNCTIONS))]
                lines[name, dim] = f"| {name} | " + " | ".join(cells) + " |"
                say(f"{dim}: {lines[name, dim]} {sum(seconds for _, _, seconds in runs):.0f} s of processor")
    blocks = []
    for dim in BUDGET:
        head = f"| {dim} dimensions | " + " | ".join(f.__name__.replace("_", " ") for f in FUNCTIONS) + " |"
        rows = [lines[name, dim] for name in names if (name, dim) in lines]
        blocks.append("\n".join([head, "|---|" + "---|" * len(FUNCTIONS), *rows]))
    return "\n\n".join(blocks)


def main(argv):
    parser = argparse.ArgumentParser(description="Success rates and evaluations of searches beside their peers.")
    parser.add_argument("names", nargs="*", choices=[[], *METHODS], help="which methods; all when left out")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="how many processes")
    options = parser.parse_args(argv)
    made = tables(
        options.names or list(METHODS), options.workers, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(made)
    if not options.names:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
