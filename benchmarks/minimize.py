"""Evaluations of `minimize` to 1e-8 on the standard problems, beside SciPy, torch, pytorch-minimize and torchzero

Each library runs all of its methods that apply, and its best one counts. An evaluation is a point at which the function
is evaluated, with its gradient or without; Hessians and products with them are free for everyone. A run is over when a
value is within 1e-8 of a known minimum. Dense Hessians are left out above 200 numbers.

    python benchmarks/minimize.py            print the table
    python benchmarks/minimize.py --write    and put it into docs/minimize.md
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # SciPy's threads would be counted twice

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

import moduli as mo

try:
    import torchmin
except ModuleNotFoundError:
    torchmin = None
try:
    import torchzero
except ModuleNotFoundError:
    torchzero = None

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "minimize"))
from problems import PROBLEMS, digits_logistic  # noqa: E402

PAGE = HERE.parent / "docs" / "minimize.md"
MARKS = ("<!-- evaluations, written by benchmarks/minimize.py -->", "<!-- end of evaluations -->")
LIMIT, SECONDS = 1500, 3.0
OURS = ("bfgs", "lbfgs", "cg", "newton-cg", "trust-ncg")
OURS_DENSE = ("newton", "damped-newton", "trust-exact", "dogleg")


class _Reached(Exception):
    """Raised at the evaluation that reaches the tolerance, to end a run."""


class _Spent(Exception):
    """Raised when a run takes too long."""


class Meter:
    """The function with a counter of points."""

    def __init__(self, fun: Callable[[Tensor], Tensor], minima: tuple[float, ...]) -> None:
        self.fun, self.minima = fun, minima
        self.count, self.last = 0, None
        self.began = time.process_time()

    def __call__(self, x: Tensor) -> Tensor:
        value = self.fun(x)
        here = x.detach()
        if self.last is None or not torch.equal(here, self.last):
            self.count, self.last = self.count + 1, here.clone()
            number = value.item()
            if any(abs(number - minimum) <= 1e-8 for minimum in self.minima):
                raise _Reached
        if self.count >= LIMIT or time.process_time() - self.began > SECONDS:
            raise _Spent
        return value


def moduli_runs(x0: Tensor, dense: bool) -> dict[str, Callable[[Meter], Any]]:
    """Return the methods of moduli."""
    names = OURS + (OURS_DENSE if dense else ())
    return {name: lambda fun, name=name: mo.minimize(fun, x0, name, tol=0.0, max_evals=10 * LIMIT) for name in names}


def scipy_runs(x0: Tensor, dense: bool) -> dict[str, Callable[[Meter], Any]]:
    """Return SciPy's methods, with torch's derivatives."""

    def run(fun: Meter, method: str) -> None:
        def both(x: np.ndarray) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(x.copy()).requires_grad_()
            value = fun(w)
            value.backward()
            return value.item(), w.grad.numpy()

        def product(x: np.ndarray, v: np.ndarray) -> np.ndarray:
            w = torch.from_numpy(x.copy()).requires_grad_()
            (g,) = torch.autograd.grad(fun.fun(w), w, create_graph=True)
            return torch.autograd.grad(g @ torch.from_numpy(v.copy()), w)[0].numpy()

        def hessian(x: np.ndarray) -> np.ndarray:
            return torch.autograd.functional.hessian(fun.fun, torch.from_numpy(x.copy())).numpy()

        more = {}
        if method in ("Newton-CG", "trust-ncg", "trust-krylov"):
            more = {"hessp": product}
        elif method in ("trust-exact", "dogleg"):
            more = {"hess": hessian}
        scipy.optimize.minimize(
            both, x0.numpy(), jac=True, method=method, tol=1e-15, options={"maxiter": LIMIT}, **more
        )

    names = ["BFGS", "L-BFGS-B", "CG", "Newton-CG", "trust-ncg", "trust-krylov"]
    names += ["trust-exact", "dogleg"] if dense else []
    return {name: lambda fun, name=name: run(fun, name) for name in names}


def torch_runs(x0: Tensor, dense: bool) -> dict[str, Callable[[Meter], Any]]:
    """Return torch.optim.LBFGS with the history size of moduli and with its default."""

    def run(fun: Meter, history: int) -> None:
        w = torch.nn.Parameter(x0.clone())
        opt = torch.optim.LBFGS(
            [w], history_size=history, line_search_fn="strong_wolfe", max_iter=LIMIT, max_eval=LIMIT,
            tolerance_grad=0, tolerance_change=0,
        )  # fmt: skip

        def closure() -> Tensor:
            opt.zero_grad()
            value = fun(w)
            value.backward()
            return value

        opt.step(closure)

    return {f"LBFGS({h})": lambda fun, h=h: run(fun, h) for h in (10, 100)}


def torchmin_runs(x0: Tensor, dense: bool) -> dict[str, Callable[[Meter], Any]]:
    """Return pytorch-minimize's methods."""
    names = ["bfgs", "l-bfgs", "cg", "newton-cg", "trust-ncg", "trust-krylov"]
    names += ["newton-exact", "trust-exact", "dogleg"] if dense else []
    return {
        name: lambda fun, name=name: torchmin.minimize(fun, x0, method=name, max_iter=LIMIT, tol=1e-15)
        for name in names
    }


def torchzero_runs(x0: Tensor, dense: bool) -> dict[str, Callable[[Meter], Any]]:
    """Return chains of torchzero."""
    tz = torchzero.m

    def run(fun: Meter, *links: Any) -> None:
        w = torch.nn.Parameter(x0.clone())
        opt = torchzero.Optimizer([w], *links)

        def closure(backward: bool = True) -> Tensor:
            value = fun(w)
            if backward:
                opt.zero_grad()
                value.backward()
            return value

        for _ in range(LIMIT):
            opt.step(closure)

    out = {
        "BFGS": lambda fun: run(fun, tz.BFGS(), tz.StrongWolfe()),
        "LBFGS": lambda fun: run(fun, tz.LBFGS(history_size=10), tz.StrongWolfe()),
        "TrustCG(BFGS)": lambda fun: run(fun, tz.TrustCG(tz.BFGS(inverse=False))),
        "NewtonCG": lambda fun: run(fun, tz.NewtonCG(), tz.Backtracking()),
        "NewtonCGSteihaug": lambda fun: run(fun, tz.NewtonCGSteihaug()),
    }
    if dense:
        out["Newton"] = lambda fun: run(fun, tz.Newton(), tz.Backtracking())
        out["TrustCG(Newton)"] = lambda fun: run(fun, tz.TrustCG(tz.Newton()))
        out["LevenbergMarquardt(Newton)"] = lambda fun: run(fun, tz.LevenbergMarquardt(tz.Newton()))
    return out


def libraries() -> dict[str, Callable[[Tensor, bool], dict[str, Callable[[Meter], Any]]]]:
    """Return the installed libraries, moduli first."""
    out = {"moduli": moduli_runs, "SciPy": scipy_runs, "torch": torch_runs}
    if torchmin is not None:
        out["pytorch-minimize"] = torchmin_runs
    if torchzero is not None:
        out["torchzero"] = torchzero_runs
    return out


def measure(
    fun: Callable[[Tensor], Tensor], minima: tuple[float, ...], run: Callable[[Meter], Any], ours: bool
) -> int | None:
    """Return the evaluations of one run; None if it does not end at a minimum."""
    meter = Meter(fun, minima)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            run(meter)
    except _Reached:
        return meter.count
    except _Spent:
        return None
    except Exception:
        if ours:
            raise
        return None  # a peer that raises has not reached a minimum
    return None


def counts() -> dict[str, dict[str, dict[str, int | None]]]:
    """Return the evaluations by problem, library and method."""
    torch.set_num_threads(1)
    out: dict[str, dict[str, dict[str, int | None]]] = {}
    for name, (fun, x0, minima) in {**PROBLEMS, "digits, logistic": digits_logistic()}.items():
        out[name] = {
            who: {how: measure(fun, minima, run, who == "moduli") for how, run in make(x0, x0.numel() <= 200).items()}
            for who, make in libraries().items()
        }
    return out


def best(runs: dict[str, int | None]) -> tuple[int, str] | None:
    """Return the fewest evaluations and their method."""
    return min(((count, how) for how, count in runs.items() if count is not None), default=None)


def table(measured: dict[str, dict[str, dict[str, int | None]]] | None = None) -> list[dict[str, Any]]:
    """Return the rows for `run.py`."""
    rows, within = [], 0
    for name, by_library in (counts() if measured is None else measured).items():
        mine = best(by_library["moduli"])
        peers = [(*b, who) for who, runs in by_library.items() if who != "moduli" and (b := best(runs)) is not None]
        if mine is None or not peers:
            rows.append({"name": name, "value": float("inf"), "bar": None, "unit": "of nothing", "ok": True})
            continue
        count, how, who = min(peers)
        ratio = mine[0] / count
        within += ratio <= 1.05
        rows.append(
            {"name": f"{name}: {mine[0]} with {mine[1]}", "value": ratio, "bar": None, "ok": True,
             "unit": f"of the {count} of {who} {how}"}
        )  # fmt: skip
    problems = len(rows)
    rows += [*quadratic_rows(), bounded_row()]
    rows.append(
        {"name": "problems with at most 1.05 x the evaluations of the best peer", "value": within, "bar": "at least 10",
         "unit": f"of {problems}", "ok": within >= 10}
    )  # fmt: skip
    return rows


def quadratic_rows() -> list[dict[str, Any]]:
    """Return rows for BFGS on rotated quadratics in 20 variables with condition 1e6, for three scales of the function."""
    rows = []
    for low, high in ((0, 6), (-3, 3), (-6, 0)):
        g = torch.Generator().manual_seed(0)
        Q, _ = torch.linalg.qr(torch.randn(20, 20, generator=g, dtype=torch.float64))
        A = Q @ torch.diag(torch.logspace(low, high, 20, dtype=torch.float64)) @ Q.T
        x0 = torch.ones(20, dtype=torch.float64)

        def both(x: np.ndarray, A: Tensor = A) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(x)
            return float(0.5 * w @ (A @ w)), (A @ w).numpy()

        theirs = scipy.optimize.minimize(both, x0.numpy(), jac=True, method="BFGS", options={"gtol": 1e-8}).nfev
        ours = mo.minimize(lambda x, A=A: 0.5 * x @ (A @ x), x0, "bfgs").evaluations
        rows.append(
            {"name": f"quadratic of condition 1e6, eigenvalues 1e{low} to 1e{high}: {ours} with bfgs", "value": ours / theirs,
             "bar": 1.2, "unit": f"of the {theirs} of SciPy BFGS", "ok": ours <= 1.2 * theirs}
        )  # fmt: skip
    return rows


def bounded_row() -> dict[str, Any]:
    """Return a row for least squares with the optimum on a bound: the number of evaluated points."""
    t = torch.linspace(0, 3, 20, dtype=torch.float64)
    data = 2.5 * torch.exp(-1.3 * t) + 0.5
    points = set()

    def residuals(p: Tensor) -> Tensor:
        points.add(tuple(p.tolist()))
        return p[0] * torch.exp(-p[1] * t) + p[2] - data

    mo.minimize(residuals, torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64), "lm", bounds=[(0, 2), (0, None), (0, 1)])
    theirs = scipy.optimize.least_squares(
        lambda p: p[0] * np.exp(-p[1] * t.numpy()) + p[2] - data.numpy(), [1.0, 0.5, 0.1],
        bounds=([0, 0, 0], [2, np.inf, 1]), gtol=1e-8, ftol=None, xtol=None,
    ).nfev  # fmt: skip
    return {
        "name": f"least squares with the optimum on a bound: {len(points)} with lm", "value": len(points) / theirs,
        "bar": 1.3, "unit": f"of the {theirs} of SciPy trf", "ok": len(points) <= 1.3 * theirs,
    }  # fmt: skip


def page(measured: dict[str, dict[str, dict[str, int | None]]]) -> str:
    """Return the tables of the best methods and of all methods of moduli, for the docs."""
    whos = list(libraries())
    lines = [f"| problem | {' | '.join(whos)} | ratio to the best peer |", "|---|" + "---|" * (len(whos) + 1)]
    for name, by_library in measured.items():
        bests = {who: best(by_library[who]) for who in whos}
        mine, peers = bests["moduli"], [b[0] for who, b in bests.items() if who != "moduli" and b is not None]
        cells = ["-" if b is None else f"{b[0]} ({b[1]})" for b in bests.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {'-' if mine is None else f'{mine[0] / min(peers):.2f}'} |")
    lines += ["", "Our methods one by one; a dash where no minimum was reached, or the method does not apply:", ""]
    names = OURS + OURS_DENSE
    lines += [f"| problem | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for name, by_library in measured.items():
        lines.append(f"| {name} | {' | '.join(str(by_library['moduli'].get(how) or '-') for how in names)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the table, and write it with --write."""
    measured = counts()
    text = page(measured)
    print(text)
    for row in table(measured)[-1:]:
        print(f"{row['name']}: {row['value']} {row['unit']} ({row['bar']})")
    if "--write" in argv:
        old = PAGE.read_text(encoding="utf-8")
        first, last = map(re.escape, MARKS)
        new = re.sub(f"{first}.*{last}", lambda _: f"{MARKS[0]}\n\n{text}\n\n{MARKS[1]}", old, flags=re.DOTALL)
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
