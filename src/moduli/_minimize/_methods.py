"""Methods by name, as chains of links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import m
from ..optim import Module

__all__ = ["CHAINS", "DIRECT", "PROJECTED", "RESIDUALS", "VALUES_ONLY", "canonical"]


def _newton() -> list[Module]:
    return [m.Newton(eigval_fn=torch.abs, eigv_tol=1e-14), m.Backtracking(maxiter=40)]


# Nocedal and Wright, Numerical Optimization, algorithm 4.1.
_RADIUS: dict[str, Any] = {"nplus": 2.0, "nminus": 0.25, "rho_good": 0.75, "rho_bad": 0.25}

CHAINS: dict[str, Callable[[], list[Module]]] = {
    "bfgs": lambda: [m.BFGS(), m.StrongWolfe()],
    "lbfgs": lambda: [m.LBFGS(history_size=10), m.StrongWolfe()],
    "cg": lambda: [m.PolakRibiere(), m.StrongWolfe(c2=0.1, a_init="first-order", maxiter=40)],
    "newton": _newton,
    "damped-newton": lambda: [m.LevenbergMarquardt(m.Newton(), max_attempts=30)],
    # Looser systems (a tolerance of the square root of the gradient) cost more evaluations than they save products.
    "newton-cg": lambda: [m.NewtonCG(tol=1e-2, reg=0.0), m.Backtracking(maxiter=40)],
    "trust-ncg": lambda: [m.TrustCG(m.NewtonCG(reg=0.0), cg_tol=0.1, max_attempts=30, **_RADIUS)],
    "trust-exact": lambda: [m.TrustExact(m.Newton(), max_attempts=30, **_RADIUS)],
    "dogleg": lambda: [m.Dogleg(m.Newton(), max_attempts=30)],
    "lm": lambda: [m.LevenbergMarquardt(m.GaussNewton(), max_attempts=30)],
    "gn": lambda: [m.GaussNewton(reg=1e-14), m.Backtracking(maxiter=40)],
    "gd": lambda: [m.AdaptiveBacktracking(maxiter=40)],
    "adam": lambda: [m.Adam(), m.LR(1e-2)],
    "spsa": lambda: [m.SPSA(h=1e-4, n_samples=4, seed=0), m.AdaptiveBacktracking(maxiter=20)],
}
"""Chains that `minimize` knows by name."""

RESIDUALS = frozenset({"lm", "gn"})
VALUES_ONLY = frozenset({"spsa"})
DIRECT = frozenset({"nelder-mead", "powell", "cd"})
PROJECTED: dict[str, Callable[[], tuple[list[Module], list[Module]]]] = {
    "bfgs": lambda: ([m.LBFGS(history_size=30)], [m.Backtracking(maxiter=40)]),
    "lbfgs": lambda: ([m.LBFGS(history_size=10)], [m.Backtracking(maxiter=40)]),
    "cg": lambda: ([m.PolakRibiere()], [m.AdaptiveBacktracking(maxiter=40)]),
    "gd": lambda: ([], [m.AdaptiveBacktracking(maxiter=40)]),
    "adam": lambda: ([m.Adam(), m.LR(1e-2)], []),
}
"""For methods that work by projection: the links that make the direction, and those that go along it."""


_ALIASES = {
    "l-bfgs": "lbfgs",
    "l-bfgs-b": "lbfgs",
    "levenberg-marquardt": "lm",
    "gauss-newton": "gn",
    "neldermead": "nelder-mead",
}


def canonical(name: str) -> str:
    """A name as it is in the tables: case, underscores and spaces do not matter."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    plain = _ALIASES.get(plain, plain)
    known = sorted({*CHAINS, *DIRECT, "auto"})
    if plain not in known:
        raise ValueError(f"minimize: there is no method {name!r}; it can be {', '.join(known)}, or a list of links")
    return plain
