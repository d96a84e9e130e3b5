"""Small problems beside SciPy: L-BFGS on Rosenbrock's function, and a fit of a curve with three parameters to 50 points.

    python benchmarks/small_problems.py

SciPy is given torch's gradients by `backward` for L-BFGS, and NumPy's functions for `curve_fit`. Ratios are medians of CPU
time over runs that take turns, on one thread; the first call, with its imports, is that of a new interpreter.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread for all solvers
os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

import moduli as mo

FIRST = """
import time, torch, moduli as mo
x = torch.linspace(0, 4, 50, dtype=torch.float64)
began = time.perf_counter()
mo.curve_fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x, 2 * torch.exp(-x), (1.0, 1.0, 1.0))
print(time.perf_counter() - began)
"""


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> float:
    """Return the median ratio of CPU times of runs that take turns.

    Args:
        ours: A run of moduli.
        theirs: A run of SciPy.
        rounds: The number of turns.
    """
    ratios = []
    for _ in range(rounds):
        times = []
        for run in (theirs, ours):
            began = time.process_time()
            run()
            times.append(time.process_time() - began)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def rosenbrock(x: Tensor) -> Tensor:
    """Return the value of the chained Rosenbrock function."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def compare_lbfgs(n: int, starts: int, rounds: int) -> float:
    """Return the ratio of times of L-BFGS to gtol 1e-6, the median over starts.

    Args:
        n: The number of variables.
        starts: The number of starts.
        rounds: The number of turns.
    """
    ratios = []
    for seed in range(starts):
        x0 = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def both(x: np.ndarray) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(x.copy()).requires_grad_()
            value = rosenbrock(w)
            value.backward()
            return value.item(), w.grad.numpy()

        options = {"maxcor": 10, "ftol": 0, "gtol": 1e-6, "maxiter": 10_000, "maxfun": 100_000}
        ratios.append(
            compare(
                lambda x0=x0: mo.minimize(rosenbrock, x0, "lbfgs", tol=1e-6),
                lambda x0=x0, both=both, options=options: scipy.optimize.minimize(
                    both, x0.numpy(), jac=True, method="L-BFGS-B", options=options
                ),
                rounds,
            )
        )
    return statistics.median(ratios)


def compare_curve(rounds: int) -> float:
    """Return the ratio of a fit of three parameters to 50 points."""
    x = torch.linspace(0, 4, 50, dtype=torch.float64)
    noise = 0.05 * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = 2.5 * torch.exp(-1.3 * x) + 0.5 + noise
    a, b = x.numpy(), y.numpy()
    return compare(
        lambda: mo.curve_fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x, y, (1.0, 1.0, 1.0)),
        lambda: scipy.optimize.curve_fit(lambda x, a, b, c: a * np.exp(-b * x) + c, a, b, (1.0, 1.0, 1.0)),
        rounds,
    )


def main() -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    for n, rounds in ((2, 15), (100, 4)):
        compare_lbfgs(n, 1, 1)
        print(f"L-BFGS, Rosenbrock-{n}: {compare_lbfgs(n, 5, rounds):.2f} of SciPy")
    compare_curve(3)
    print(f"curve_fit, 3 parameters, 50 points: {compare_curve(60):.1f} of SciPy")
    seconds = [
        float(subprocess.run([sys.executable, "-c", FIRST], capture_output=True, check=True).stdout) for _ in range(3)
    ]
    print(f"first curve_fit of an interpreter: {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
