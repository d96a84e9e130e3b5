"""BBOB through `ioh`: targets reached, success rates and evaluations beside pycma, cmaes, SciPy, EvoX and nevergrad.

The 24 noiseless functions of the BBOB suite, instances 1, 2, ..., from a random point of [-4, 4]ⁿ with a step size of 2 for
everyone; restarts begin anywhere in that box. `python benchmarks/bbob.py` prints, for each solver, the share of 51 targets (100 to
1e-8 above the optimum, evenly in the logarithm) that it reached within the budget, as the mean over functions for each instance,
and the mean and the standard error over instances. Values and evaluations are those that `ioh` counted.

With `--solved` it prints, for each function, the share of runs that came within 1e-8 of the optimum and the median number of
evaluations of those; the last column is the ratio of ours to pycma's where pycma solves more than half.

Everything is a function of the seeds. The tables of docs/evolution.md are made by these calls, which say how small they are:

    python benchmarks/bbob.py
    python benchmarks/bbob.py --first 21 --methods "CMAES bipop" "pycma bipop"
    python benchmarks/bbob.py --solved --dims 5 --methods CMAES "CMAES bipop" pycma
    python benchmarks/bbob.py --solved --dims 5 --functions 1 2 5 6 7 8 9 10 11 12 13 14
    python benchmarks/bbob.py --solved --dims 20 --seeds 2 --budget 700 --functions 1 5 6 8 10 14
    python benchmarks/bbob.py --solved --dims 40 --seeds 1 --functions 1 5 6 8 10 14
"""

import argparse
import contextlib
import functools
import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for each worker, also for NumPy, which pycma uses
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import statistics
import sys
import warnings

import numpy as np
import torch

from moduli.evolve import CMAES, DE, PSO, Polish

PRECISION = 1e-8


def make_runner(make):
    """Return a solver that runs a search of moduli until its budget is spent."""

    def run(problem, start, target, budget, seed):
        descend(make(torch.from_numpy(start), seed=seed, target=target, max_evaluations=budget), problem)

    return run


def make_polished_runner(make):
    """Return a solver that runs a search for four fifths of the budget, and then a descent, as `search(polish=True)`."""

    def run(problem, start, target, budget, seed):
        first = make(torch.from_numpy(start), seed=seed, target=target, max_evaluations=budget - budget // 5, tol=0.01)
        descend(first, problem)
        left = budget - first.evaluations
        if first.best_fitness > target:
            goal = {"bounds": (-5.0, 5.0), "target": target, "max_evaluations": left}
            descend(Polish(first.best, value=first.best_fitness, **goal), problem)

    return run


def descend(search, problem):
    """Run a search until it has a reason to stop."""
    while not search.should_stop():
        search.tell(problem(search.ask().numpy().tolist()))


def pycma(problem, start, target, budget, seed):
    """Run pycma's CMA-ES.

    Args:
        problem: The function of `ioh`.
        start: The first mean.
        target: The value at which to stop.
        budget: The largest number of evaluations.
        seed: The seed.
    """
    import cma

    options = {"verbose": -9, "seed": seed + 1, "ftarget": target, "maxfevals": budget, "tolfun": 0, "tolfunhist": 0}
    es = cma.CMAEvolutionStrategy(start, 2.0, options)
    while not es.stop() and es.countevals + es.popsize <= budget:
        x = es.ask()
        es.tell(x, problem([row.tolist() for row in x]))


def pycma_bipop(problem, start, target, budget, seed):
    """Run pycma with BIPOP restarts that begin anywhere in [-4, 4]ⁿ; the arguments are those of `pycma`."""
    import cma

    drawn, starts = np.random.default_rng(seed), [start]
    options = {"verbose": -9, "seed": seed + 1, "ftarget": target, "maxfevals": budget}

    def begin():
        return starts.pop() if starts else drawn.uniform(-4, 4, len(start))

    with contextlib.suppress(Spent):
        cma.fmin2(limit(problem, target, budget), begin, 2.0, options, restarts=9, bipop=True)


def cmaes(problem, start, target, budget, seed):
    """Run the CMA-ES of the package `cmaes`, which has no restarts; the arguments are those of `pycma`."""
    from cmaes import CMA

    optimizer = CMA(start, 2.0, seed=seed)
    while not optimizer.should_stop() and problem.state.evaluations + optimizer.population_size <= budget:
        points = [optimizer.ask() for _ in range(optimizer.population_size)]
        optimizer.tell(list(zip(points, problem([x.tolist() for x in points]), strict=True)))
        if problem.state.current_best.y <= target:
            break


def scipy_de(problem, start, target, budget, seed, polish=False):
    """Run SciPy's differential evolution with its defaults; the arguments are those of `pycma`, and `polish` as in SciPy."""
    from scipy.optimize import differential_evolution

    box = [(-5.0, 5.0)] * len(start)
    with contextlib.suppress(Spent):
        differential_evolution(limit(problem, target, budget), box, x0=start, rng=seed, polish=polish, maxiter=budget)


class Spent(Exception):
    """Raised when the target is reached or the budget is spent."""


def limit(problem, target, budget):
    """Return a function that raises Spent at the target or budget, for solvers without such an option.

    Args:
        problem: The function of `ioh`.
        target: The value at which to stop.
        budget: The largest number of evaluations.
    """

    def call(x):
        if problem.state.evaluations >= budget or problem.state.current_best.y <= target:
            raise Spent
        return problem(x.tolist())

    return call


def nevergrad(problem, start, target, budget, seed):
    """Run nevergrad's CMA, with an object for each member; the arguments are those of `pycma`."""
    import nevergrad as ng

    parametrization = ng.p.Array(init=start).set_mutation(sigma=2.0)
    parametrization.random_state.seed(seed)
    optimizer = ng.optimizers.CMA(parametrization=parametrization, budget=budget)
    while problem.state.evaluations < budget and problem.state.current_best.y > target:
        x = optimizer.ask()
        optimizer.tell(x, problem([x.value.tolist()])[0])


def evox(problem, start, target, budget, seed):
    """Run EvoX's CMA-ES with its default population; the arguments are those of `pycma`."""
    from evox.algorithms import CMAES as Theirs
    from evox.core import Problem
    from evox.workflows import EvalMonitor, StdWorkflow

    class Function(Problem):
        def evaluate(self, pop):
            return torch.tensor(problem(pop.tolist()))

    # In double precision like the others; this torch refuses its `torch.cond`, which is replaced by an ordinary `if`.
    torch.set_default_dtype(torch.float64)
    torch.cond = lambda test, yes, no, args=(): yes(*args) if bool(test) else no(*args)
    torch.manual_seed(seed)
    monitor = EvalMonitor()
    workflow = StdWorkflow(Theirs(torch.from_numpy(start), 2.0), Function(), monitor)
    workflow.init_step()
    size = int(workflow.algorithm.pop_size)
    while problem.state.evaluations + size <= budget and problem.state.current_best.y > target:
        workflow.step()


BOX = {"bounds": (-5.0, 5.0)}
SHADE = {"strategy": "current-to-pbest/1", "adapt": "shade"}
METHODS = {
    "CMAES": make_runner(lambda x, **o: CMAES(x, sigma=2.0, tol=1e-14, **o)),
    "CMAES bipop": make_runner(lambda x, **o: CMAES(x, sigma=2.0, restarts="bipop", restart_region=(-4.0, 4.0), **o)),
    "DE": make_runner(lambda x, **o: DE(x, **BOX, **o)),
    "SHADE": make_runner(lambda x, **o: DE(x, **SHADE, **BOX, **o)),
    "L-SHADE": make_runner(lambda x, **o: DE(x, **SHADE, shrink=True, **BOX, **o)),
    "DE polish": make_polished_runner(lambda x, **o: DE(x, **BOX, **o)),
    "L-SHADE polish": make_polished_runner(lambda x, **o: DE(x, **SHADE, shrink=True, **BOX, **o)),
    "PSO": make_runner(lambda x, **o: PSO(x, population=30, spread=2.0, **o)),
    "pycma": pycma,
    "pycma bipop": pycma_bipop,
    "cmaes": cmaes,
    "SciPy DE": scipy_de,
    "SciPy DE polish": functools.partial(scipy_de, polish=True),
    "nevergrad CMA": nevergrad,
    "EvoX CMAES": evox,
}
TARGETS = np.logspace(2, -8, 51)
COMPARED = ["CMAES bipop", "pycma bipop", "DE", "DE polish", "SHADE", "L-SHADE", "SciPy DE", "SciPy DE polish"]
SOLVED = ["CMAES", "pycma", "cmaes", "EvoX CMAES", "nevergrad CMA"]


def run_one(task):
    """Run one task; return whether it succeeded, its evaluations, and its share of targets."""
    import ioh

    name, function, dim, instance, budget = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem = ioh.get_problem(function, instance, dim, ioh.ProblemClass.BBOB)
    start = np.random.default_rng([dim, function, instance]).uniform(-4, 4, dim)
    METHODS[name](problem, start, problem.optimum.y + PRECISION, budget, instance)
    error = problem.state.current_best.y - problem.optimum.y
    return error <= PRECISION, int(problem.state.evaluations), float((error <= TARGETS).mean())


def measure(names, dim, functions, instances, budget, pool):
    """Return the runs of one dimension by method and function, one for each instance.

    Args:
        names: The methods.
        dim: The dimension.
        functions: The numbers of the functions.
        instances: The numbers of the instances.
        budget: The evaluations per dimension.
        pool: The pool of processes.
    """
    runs = {}
    for name in names:
        tasks = [(name, f, dim, instance, budget * dim) for f in functions for instance in instances]
        results = pool.map(run_one, tasks, chunksize=1)
        count = len(instances)
        runs[name] = {f: results[i * count : (i + 1) * count] for i, f in enumerate(functions)}
        solved = sum(done for done, _, _ in results)
        print(f"{dim} dimensions, {name}: {solved} of {len(results)} solved", file=sys.stderr, flush=True)
    return runs


def cell(runs):
    """Return the number of successes and the median of their evaluations, as text."""
    solved = [evaluations for done, evaluations, _ in runs if done]
    return f"{len(solved)}/{len(runs)}" + (f" {statistics.median(solved):.0f}" if solved else "")


def ratio(ours, theirs):
    """Return the ratio of median evaluations as text, if the peer solves more than half."""
    a, b = ([evaluations for done, evaluations, _ in runs if done] for runs in (ours, theirs))
    return f"{statistics.median(a) / statistics.median(b):.2f}" if a and 2 * len(b) > len(theirs) else "-"


def tabulate_solved(dim, runs, first):
    """Return a table of runs that came within 1e-8, with a row for each function.

    Args:
        dim: The dimension.
        runs: The result of `measure`.
        first: The first instance.
    """
    names, functions = list(runs), list(next(iter(runs.values())))
    compare = "CMAES" in names and "pycma" in names
    lines = [f"| {dim} dimensions | {' | '.join(names)} |" + (" CMAES / pycma |" if compare else "")]
    lines.append("|---|" + "---|" * (len(names) + compare))
    for f in functions:
        cells = [cell(runs[name][f]) for name in names]
        cells += [ratio(runs["CMAES"][f], runs["pycma"][f])] if compare else []
        lines.append(f"| f{f} | {' | '.join(cells)} |")
    every = {name: [run for results in runs[name].values() for run in results] for name in names}
    total = [f"{sum(done for done, _, _ in results)}/{len(results)}" for results in every.values()]
    lines.append(f"| all | {' | '.join(total)} |" + (" |" if compare else ""))
    return "\n".join(lines)


def tabulate_targets(dim, runs, first):
    """Return a table of the share of targets reached, with a row for each method.

    Args:
        dim: The dimension.
        runs: The result of `measure`.
        first: The first instance.
    """
    seeds = len(next(iter(next(iter(runs.values())).values())))
    lines = [
        f"| {dim} dimensions | {' | '.join(f'instance {first + i}' for i in range(seeds))} | mean | standard error |"
    ]
    lines.append("|---|" + "---|" * (seeds + 2))
    for name, by_function in runs.items():
        shares = np.array([[share for _, _, share in cells] for cells in by_function.values()]).mean(0)
        error = f"{shares.std(ddof=1) / np.sqrt(seeds):.3f}" if seeds > 1 else "-"
        lines.append(f"| {name} | {' | '.join(f'{s:.3f}' for s in shares)} | {shares.mean():.3f} | {error} |")
    return "\n".join(lines)


def main(argv):
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Targets reached, success rates and evaluations of searches on BBOB.")
    parser.add_argument("--dims", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--functions", type=int, nargs="+", default=list(range(1, 25)))
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3, help="how many instances of each function")
    parser.add_argument("--first", type=int, default=1, help="the first instance")
    parser.add_argument("--budget", type=int, default=1000, help="evaluations per dimension")
    parser.add_argument("--solved", action="store_true", help="success rates and evaluations of each function instead")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    names = options.methods or (SOLVED if options.solved else COMPARED)
    tabulate = tabulate_solved if options.solved else tabulate_targets
    instances = range(options.first, options.first + options.seeds)
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        tables = [
            tabulate(dim, measure(names, dim, options.functions, instances, options.budget, pool), options.first)
            for dim in options.dims
        ]
    head = f"{options.seeds} instances of each function, {options.budget} evaluations per dimension:"
    print("\n\n".join([head, *tables]))


if __name__ == "__main__":
    main(sys.argv[1:])
