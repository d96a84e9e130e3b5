"""Evaluations of `minimize` to 1e-8 on the standard problems, beside SciPy's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize as scipy_minimize

from moduli._minimize import minimize

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "minimize"))
from problems import PROBLEMS


class _Reached(Exception):
    pass


def theirs(fun, x0, minima, method):
    """Evaluations until the value is within 1e-8 of a known minimum; None where it never is."""
    count = 0

    def both(x: np.ndarray):
        nonlocal count
        count += 1
        w = torch.from_numpy(x.copy()).requires_grad_()
        value = fun(w)
        value.backward()
        if min(abs(value.item() - best) for best in minima) < 1e-8:
            raise _Reached
        return value.item(), w.grad.numpy()

    try:
        scipy_minimize(both, x0.numpy(), jac=True, method=method, tol=1e-14, options={"maxiter": 5000})
    except _Reached:
        return count
    return None


def ours(fun, x0, minima, method):
    """The same for `minimize`."""
    count, reached = 0, None

    def watched(x):
        nonlocal count, reached
        count += 1
        value = fun(x)
        if reached is None and min(abs(value.item() - best) for best in minima) < 1e-8:
            reached = count
        return value

    minimize(watched, x0, method, max_evals=5000)
    return reached


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| problem | bfgs | lbfgs | trust-exact | SciPy BFGS | SciPy L-BFGS-B | best ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, (fun, x0, minima) in PROBLEMS.items():
        mine = [ours(fun, x0, minima, method) for method in ("bfgs", "lbfgs", "trust-exact")]
        peers = [theirs(fun, x0, minima, method) for method in ("BFGS", "L-BFGS-B")]
        best, other = min(filter(None, mine), default=None), min(filter(None, peers), default=None)
        ratio = f"{best / other:.2f}" if best and other else "-"
        print(f"| {name} | {' | '.join(str(v or '-') for v in (*mine, *peers))} | {ratio} |")


if __name__ == "__main__":
    main()
