"""L-BFGS with a strong Wolfe search to 1e-8 beside torch.optim.LBFGS, SciPy, pytorch-minimize and torchzero

All keep ten pairs and start from the same points; each is stopped by the evaluation that comes within 1e-8 of a known
minimum. Starts from which they do not all find the same minimum are left out, as those runs are not of the same length.
Time is that of the processor, as ratios of runs that take turns; both are medians over the starts. SciPy and
pytorch-minimize work on one vector, so the digits have one matrix of 65 x 10 (weights and bias) everywhere.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread, also for NumPy and SciPy

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

import moduli as mo
from moduli import m

try:
    import torchmin
except ModuleNotFoundError:
    torchmin = None
try:
    import torchzero
except ModuleNotFoundError:
    torchzero = None

Loss = Callable[[Tensor], Tensor]
HISTORY = 10
LIMIT = 12_000


class _Reached(Exception):
    """Raised at the evaluation that reaches the tolerance, to end a run."""


class Meter:
    """The loss with a counter that ends the run, with the same overhead for every solver."""

    def __init__(self, loss: Loss, minima: tuple[float, ...]) -> None:
        self.loss, self.minima = loss, minima
        self.count, self.found = 0, None

    def __call__(self, x: Tensor) -> Tensor:
        value = self.loss(x)
        self.count += 1
        number = value.item()
        for minimum in self.minima:
            if abs(number - minimum) <= 1e-8:
                self.found = minimum
                raise _Reached
        if self.count >= LIMIT:
            raise _Reached
        return value


def ours(meter: Meter, x0: Tensor) -> None:
    """Run a chain of moduli."""
    w = torch.nn.Parameter(x0.clone())
    opt = mo.Optimizer([w], m.LBFGS(history_size=HISTORY), m.StrongWolfe())
    closure = mo.closure(lambda: meter(w), fixed=True)
    while True:
        opt.step(closure)


def torchs(meter: Meter, x0: Tensor) -> None:
    """Run torch's optimizer, which iterates in one step."""
    w = torch.nn.Parameter(x0.clone())
    opt = torch.optim.LBFGS(
        [w], history_size=HISTORY, line_search_fn="strong_wolfe", max_iter=LIMIT, max_eval=LIMIT,
        tolerance_grad=0, tolerance_change=0,
    )  # fmt: skip

    def closure() -> Tensor:
        opt.zero_grad()
        value = meter(w)
        value.backward()
        return value

    opt.step(closure)


def scipys(meter: Meter, x0: Tensor) -> None:
    """Run SciPy's L-BFGS-B with torch's gradients."""

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = torch.from_numpy(x.copy()).view(x0.shape).requires_grad_()
        value = meter(w)
        value.backward()
        return value.item(), w.grad.numpy().ravel()

    options = {"maxcor": HISTORY, "maxiter": LIMIT, "maxfun": LIMIT, "ftol": 0, "gtol": 0}
    scipy.optimize.minimize(both, x0.numpy().ravel(), jac=True, method="L-BFGS-B", options=options)


def torchmins(meter: Meter, x0: Tensor) -> None:
    """Run pytorch-minimize's l-bfgs."""
    options = {"history_size": HISTORY, "gtol": 0.0, "xtol": 0.0}
    torchmin.minimize(meter, x0, method="l-bfgs", max_iter=LIMIT, options=options)


def torchzeros(meter: Meter, x0: Tensor) -> None:
    """Run the same chain in torchzero."""
    w = torch.nn.Parameter(x0.clone())
    opt = torchzero.Optimizer([w], torchzero.m.LBFGS(history_size=HISTORY), torchzero.m.StrongWolfe())

    def closure(backward: bool = True) -> Tensor:
        value = meter(w)
        if backward:
            opt.zero_grad()
            value.backward()
        return value

    while True:
        opt.step(closure)


def rosenbrock(x: Tensor) -> Tensor:
    """Return the value of the chained Rosenbrock function."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def rosenbrock_start(n: int, seed: int) -> Tensor:
    """Return the standard start for seed 0, and points near it for other seeds."""
    noise = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(n // 2) + 0.1 * noise * (seed > 0)


def digits() -> tuple[Loss, float]:
    """Return the loss of logistic regression on handwritten digits, and its minimum (see moduli.lab.problems)."""
    from sklearn.datasets import load_digits

    from moduli.lab.problems import DigitsLogistic

    data = load_digits()
    x = torch.tensor(data.data / 16, dtype=torch.float64)
    x, y = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1), torch.tensor(data.target)

    def loss(w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ w, y) + 0.5e-3 * w.square().sum()

    return loss, DigitsLogistic.optimum


def digits_start(seed: int) -> Tensor:
    """Return weights near zero."""
    return 0.01 * torch.randn(65, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def contenders() -> dict[str, Callable[[Meter, Tensor], None]]:
    """Return the installed solvers, by name."""
    out = {"moduli": ours, "torch": torchs, "scipy": scipys}
    if torchmin is not None:
        out["pytorch-minimize"] = torchmins
    if torchzero is not None:
        out["torchzero"] = torchzeros
    return out


def race(loss: Loss, minima: tuple[float, ...], starts: list[Tensor], names: list[str]) -> list[dict[str, Any]]:
    """Return for each start the seconds and evaluations by solver; only starts from which all reach the same minimum.

    Args:
        loss: The loss.
        minima: The values of its minima.
        starts: The starts.
        names: The solvers.
    """
    solvers, rows = contenders(), []
    for turn, x0 in enumerate(starts):
        row, minima_reached = {}, set()
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            meter = Meter(loss, minima)
            gc.collect()
            gc.disable()
            began = time.process_time()
            with contextlib.suppress(_Reached):
                solvers[name](meter, x0)
            row[name] = (time.process_time() - began, meter.count)
            gc.enable()
            minima_reached.add(meter.found)
        if len(minima_reached) == 1 and None not in minima_reached:
            rows.append(row)
    return rows


def table(starts: int = 10) -> list[dict[str, Any]]:
    """Return the rows for `run.py`."""
    torch.set_num_threads(1)
    everyone = list(contenders())
    loss, least = digits()
    problems = {
        "Rosenbrock-100": (rosenbrock, (0.0, 3.98662385429), [rosenbrock_start(100, s) for s in range(starts)], 0.60),
        "digits, logistic": (loss, (least,), [digits_start(s) for s in range(starts)], 0.75),
        "Rosenbrock-1000": (rosenbrock, (0.0,), [rosenbrock_start(1000, s) for s in range(min(starts, 3))], 0.80),
    }
    out = []
    for name, (fun, minima, points, bar) in problems.items():
        names = everyone if len(points[0]) < 1000 else ["moduli", "torch", "scipy"]
        rows = race(fun, minima, points, names)
        evals = {who: statistics.median(row[who][1] for row in rows) for who in names}
        for who in names[1:]:
            ratio = statistics.median(row["moduli"][0] / row[who][0] for row in rows)
            asked = {"torch": bar, "scipy": 1.0 if name != "Rosenbrock-1000" else None}.get(who)
            out.append(
                {
                    "name": f"{name}, time",
                    "value": ratio,
                    "bar": asked,
                    "unit": f"of {who}",
                    "ok": asked is None or ratio <= asked,
                }
            )
        best = min(names[1:], key=evals.__getitem__)
        counts = " / ".join(f"{evals[who]:g}" for who in names)
        ratio = evals["moduli"] / evals[best]
        bar = 1.03 if name == "Rosenbrock-100" else None
        out.append(
            {"name": f"{name}, evaluations over {len(rows)} starts ({counts}, in the order {', '.join(names)})",
             "value": ratio, "bar": bar, "unit": f"of {best}", "ok": bar is None or ratio <= bar}
        )  # fmt: skip
    return out


if __name__ == "__main__":
    for line in table(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
        print(f"{line['name']}: {line['value']:.3f} {line['unit']} (bar {line['bar']})")
