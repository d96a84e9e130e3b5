"""L-BFGS with a strong Wolfe search beside torch.optim.LBFGS and SciPy: evaluations, and processor time to 1e-8."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import moduli as mo
from moduli import m

Loss = Callable[[Tensor], Tensor]


class _Reached(Exception):
    pass


def rosenbrock(x: Tensor) -> Tensor:
    """The chained Rosenbrock function."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def ours(loss: Loss, x0: Tensor, goal: float, history: int) -> tuple[float, int]:
    """(seconds, evaluations) of a moduli chain."""
    w = torch.nn.Parameter(x0.clone())
    opt = mo.Optimizer([w], m.LBFGS(history_size=history), m.StrongWolfe())
    closure = mo.closure(lambda: loss(w), fixed=True)
    began = time.process_time()
    for _ in range(100_000):
        if float(opt.step(closure) or 0.0) <= goal:
            break
    return time.process_time() - began, opt.num_evaluations


def torchs(loss: Loss, x0: Tensor, goal: float, history: int) -> tuple[float, int]:
    """(seconds, evaluations) of torch's optimizer, stopped at the same value."""
    w = torch.nn.Parameter(x0.clone())
    opt = torch.optim.LBFGS(
        [w], history_size=history, line_search_fn="strong_wolfe", max_iter=10**6, max_eval=10**6,
        tolerance_grad=0, tolerance_change=0,
    )  # fmt: skip
    count = 0

    def closure() -> Tensor:
        nonlocal count
        count += 1
        opt.zero_grad()
        value = loss(w)
        value.backward()
        if value.item() <= goal:
            raise _Reached
        return value

    began = time.process_time()
    with contextlib.suppress(_Reached):
        opt.step(closure)
    return time.process_time() - began, count


def scipys(loss: Loss, x0: Tensor, goal: float, history: int) -> tuple[float, int]:
    """(seconds, evaluations) of SciPy's L-BFGS-B with torch's gradients."""
    count = 0

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal count
        count += 1
        w = torch.from_numpy(x.copy()).requires_grad_()
        value = loss(w)
        value.backward()
        if value.item() <= goal:
            raise _Reached
        return value.item(), w.grad.numpy()

    options = {"maxcor": history, "maxiter": 10**6, "maxfun": 10**6, "ftol": 0, "gtol": 0}
    began = time.process_time()
    with contextlib.suppress(_Reached):
        minimize(both, x0.numpy(), jac=True, method="L-BFGS-B", options=options)
    return time.process_time() - began, count


def main(starts: int = 10) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("problem, history: evaluations ours / torch / scipy (ratio to the best); time ours / torch (ratio)")
    for n, history, count in ((100, 10, starts), (1000, 10, 1)):
        rows = []
        for seed in range(count):
            noise = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(n // 2) + 0.1 * noise * (seed > 0)
            rows.append([run(rosenbrock, x0, 1e-8, history) for run in (ours, torchs, scipys)])
        seconds = [statistics.median(row[i][0] for row in rows) for i in range(3)]
        evals = [statistics.median(row[i][1] for row in rows) for i in range(3)]
        print(
            f"Rosenbrock-{n}, {history}: {evals[0]:.0f} / {evals[1]:.0f} / {evals[2]:.0f} "
            f"({evals[0] / min(evals[1:]):.3f}); {seconds[0]:.3f} / {seconds[1]:.3f} s ({seconds[0] / seconds[1]:.2f})"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
