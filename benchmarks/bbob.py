"""BBOB through `ioh`: success rates and evaluations beside pycma, EvoX and nevergrad: `python benchmarks/bbob.py`.

The 24 noiseless functions of the BBOB suite, instances 1, 2, ..., from a random point of [-4, 4]ⁿ with a step size of 2 for
everyone. A run has succeeded when it is within 1e-8 of the optimum. The table has the share of runs that succeeded and the
median number of evaluations of those; the last column is the ratio of ours to pycma's where pycma solves more than half.
Everything is a function of the seeds. A full run (`--seeds 15 --budget 10000`) takes hours; the tables of docs/evolution.md are
made by these calls, which say how small they are:

    python benchmarks/bbob.py --dims 5 --seeds 3 --methods CMAES "CMAES bipop" pycma
    python benchmarks/bbob.py --dims 5 --seeds 3 --functions 1 2 5 6 7 8 9 10 11 12 13 14
    python benchmarks/bbob.py --dims 20 --seeds 2 --budget 700 --functions 1 5 6 8 10 14
    python benchmarks/bbob.py --dims 40 --seeds 1 --functions 1 5 6 8 10 14
"""

import argparse
import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for each worker, also for NumPy, which pycma uses
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import statistics
import sys
import warnings

import numpy as np
import torch

from moduli.evolve import CMAES, DE, PSO

PRECISION = 1e-8


def told(make):
    """A search of ours."""

    def run(problem, start, target, budget, seed):
        search = make(torch.from_numpy(start), seed=seed, target=target, max_evaluations=budget, tol=1e-14)
        while not search.should_stop():
            search.tell(problem(search.ask().numpy().tolist()))
        return search.best_fitness <= target, search.evaluations

    return run


def pycma(problem, start, target, budget, seed):
    """Hansen's own CMA-ES."""
    import cma

    options = {"verbose": -9, "seed": seed + 1, "ftarget": target, "maxfevals": budget, "tolfun": 0, "tolfunhist": 0}
    es = cma.CMAEvolutionStrategy(start, 2.0, options)
    while not es.stop() and es.countevals + es.popsize <= budget:
        x = es.ask()
        es.tell(x, problem([row.tolist() for row in x]))
    return es.result.fbest <= target, es.result.evaluations


def nevergrad(problem, start, target, budget, seed):
    """nevergrad's CMA, an object for each member."""
    import nevergrad as ng

    parametrization = ng.p.Array(init=start).set_mutation(sigma=2.0)
    parametrization.random_state.seed(seed)
    optimizer = ng.optimizers.CMA(parametrization=parametrization, budget=budget)
    for count in range(1, budget + 1):
        x = optimizer.ask()
        value = problem([x.value.tolist()])[0]
        if value <= target:
            return True, count
        optimizer.tell(x, value)
    return False, budget


def evox(problem, start, target, budget, seed):
    """EvoX's CMA-ES, with its own default population."""
    from evox.algorithms import CMAES as Theirs
    from evox.core import Problem
    from evox.workflows import EvalMonitor, StdWorkflow

    class Function(Problem):
        def evaluate(self, pop):
            return torch.tensor(problem(pop.tolist()))

    # In double precision like everyone; this torch refuses its `torch.cond`, so it gets an ordinary `if`.
    torch.set_default_dtype(torch.float64)
    torch.cond = lambda test, yes, no, args=(): yes(*args) if bool(test) else no(*args)
    torch.manual_seed(seed)
    monitor = EvalMonitor()
    workflow = StdWorkflow(Theirs(torch.from_numpy(start), 2.0), Function(), monitor)
    workflow.init_step()
    size = int(workflow.algorithm.pop_size)
    spent = size
    while spent + size <= budget:
        workflow.step()
        spent += size
        if float(monitor.get_best_fitness()) <= target:
            return True, spent
    return False, spent


METHODS = {
    "CMAES": told(lambda x, **o: CMAES(x, sigma=2.0, **o)),
    "CMAES bipop": told(lambda x, **o: CMAES(x, sigma=2.0, restarts="bipop", bounds=(-5.0, 5.0), **o)),
    "SHADE": told(lambda x, **o: DE(x, strategy="current-to-pbest/1", adapt="shade", population=30, spread=2.0, **o)),
    "PSO": told(lambda x, **o: PSO(x, population=30, spread=2.0, **o)),
    "pycma": pycma,
    "nevergrad CMA": nevergrad,
    "EvoX CMAES": evox,
}
USUAL = ["CMAES", "pycma", "EvoX CMAES", "nevergrad CMA"]


def run_one(task):
    """One run: (succeeded, evaluations)."""
    import ioh

    name, function, dim, instance, budget = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem = ioh.get_problem(function, instance, dim, ioh.ProblemClass.BBOB)
    start = np.random.default_rng([dim, function, instance]).uniform(-4, 4, dim)
    done, evaluations = METHODS[name](problem, start, problem.optimum.y + PRECISION, budget, instance)
    return bool(done), int(evaluations)


def cell(runs):
    """Successes, and the median of their evaluations."""
    solved = [evaluations for done, evaluations in runs if done]
    return f"{len(solved)}/{len(runs)}" + (f" {statistics.median(solved):.0f}" if solved else "")


def ratio(ours, theirs):
    """Median evaluations of ours by theirs, where they solve more than half."""
    a, b = ([evaluations for done, evaluations in runs if done] for runs in (ours, theirs))
    return f"{statistics.median(a) / statistics.median(b):.2f}" if a and 2 * len(b) > len(theirs) else "-"


def table(names, dim, functions, seeds, budget, pool):
    """The table of one dimension."""
    runs = {}
    for name in names:
        tasks = [(name, f, dim, instance, budget * dim) for f in functions for instance in range(1, seeds + 1)]
        found = pool.map(run_one, tasks, chunksize=1)
        runs[name] = {f: found[i * seeds : (i + 1) * seeds] for i, f in enumerate(functions)}
        solved = sum(done for done, _ in found)
        print(f"{dim} dimensions, {name}: {solved} of {len(found)} solved", file=sys.stderr, flush=True)
    compare = "CMAES" in names and "pycma" in names
    lines = [f"| {dim} dimensions | {' | '.join(names)} |" + (" CMAES / pycma |" if compare else "")]
    lines.append("|---|" + "---|" * (len(names) + compare))
    for f in functions:
        cells = [cell(runs[name][f]) for name in names]
        cells += [ratio(runs["CMAES"][f], runs["pycma"][f])] if compare else []
        lines.append(f"| f{f} | {' | '.join(cells)} |")
    total = [f"{sum(done for f in functions for done, _ in runs[name][f])}/{len(functions) * seeds}" for name in names]
    lines.append(f"| all | {' | '.join(total)} |" + (" |" if compare else ""))
    return "\n".join(lines)


def main(argv):
    """Make the tables."""
    parser = argparse.ArgumentParser(description="Success rates and evaluations of searches on BBOB.")
    parser.add_argument("--dims", type=int, nargs="+", default=[5, 20, 40])
    parser.add_argument("--functions", type=int, nargs="+", default=list(range(1, 25)))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=USUAL)
    parser.add_argument("--seeds", type=int, default=5, help="how many instances of each function")
    parser.add_argument("--budget", type=int, default=1000, help="evaluations per dimension")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        made = [
            table(options.methods, dim, options.functions, options.seeds, options.budget, pool) for dim in options.dims
        ]
    head = f"{options.seeds} instances of each function, {options.budget} evaluations per dimension:"
    print("\n\n".join([head, *made]))


if __name__ == "__main__":
    main(sys.argv[1:])
