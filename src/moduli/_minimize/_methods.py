"""Methods by name, as chains of links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import m
from ..optim import Module
from ._bounded import BoundedLevenbergMarquardt, Free
from ._direct import DIRECT
from ._variables import Variables

# Nocedal and Wright, Numerical Optimization, algorithm 4.1.
_RADIUS: dict[str, Any] = {"nplus": 2.0, "nminus": 0.25, "rho_good": 0.75, "rho_bad": 0.25}

CHAINS: dict[str, Callable[[], list[Module]]] = {
    "bfgs": lambda: [m.BFGS(), m.StrongWolfe()],
    "lbfgs": lambda: [m.LBFGS(history_size=10), m.StrongWolfe()],
    "cg": lambda: [m.PolakRibiere(), m.StrongWolfe(c2=0.1, a_init="first-order", maxiter=40)],
    "newton": lambda: [m.Newton(eigval_fn=torch.abs, eigv_tol=1e-14), m.Backtracking(maxiter=40)],
    "damped-newton": lambda: [m.LevenbergMarquardt(m.Newton(), max_attempts=30)],
    # Looser systems (in both, and by the square root of the gradient) cost more evaluations than they save products.
    "newton-cg": lambda: [m.NewtonCG(tol=1e-2, reg=0.0), m.Backtracking(maxiter=40)],
    "trust-ncg": lambda: [m.TrustCG(m.NewtonCG(reg=0.0), cg_tol=0.03, max_attempts=30, **_RADIUS)],
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


IN_BOX: dict[str, Callable[[Variables], list[Module]]] = {
    "bfgs": lambda v: [Free(v), m.LBFGS(history_size=30), Free(v), m.Backtracking(maxiter=40)],
    "lbfgs": lambda v: [Free(v), m.LBFGS(history_size=10), Free(v), m.Backtracking(maxiter=40)],
    "cg": lambda v: [Free(v), m.PolakRibiere(), Free(v), m.AdaptiveBacktracking(maxiter=40)],
    "gd": lambda v: [Free(v), m.AdaptiveBacktracking(maxiter=40)],
    "adam": lambda v: [Free(v), m.Adam(), m.LR(1e-2), Free(v)],
    "lm": lambda v: [BoundedLevenbergMarquardt(v, m.GaussNewton(), max_attempts=30)],
    "damped-newton": lambda v: [BoundedLevenbergMarquardt(v, m.Newton(), max_attempts=30)],
}
"""Chains that stay within bounds by themselves; the others get theirs by a change of variables."""


def make_chain(name: str, variables: Variables) -> list[Module]:
    """The chain of a method for these variables."""
    inside = variables.bounded and not variables.transform
    return IN_BOX[name](variables) if inside else CHAINS[name]()


# SciPy's names, and those of torchzero's classes; spelling, case and hyphens do not matter.
_ALIASES = {
    "lbfgsb": "lbfgs",
    "levenbergmarquardt": "lm",
    "gaussnewton": "gn",
    "trustcg": "trust-ncg",
    "leastsq": "lm",
    "coordinatedescent": "cd",
    "gradientdescent": "gd",
    "polakribiere": "cg",
    "conjugategradient": "cg",
    "newtonexact": "newton",
}

# Methods of SciPy that have no chain here, with what to use instead.
_INSTEAD = {
    "tnc": "'newton-cg', or 'lbfgs' with bounds",
    "trustkrylov": "'trust-ncg'",
    "slsqp": "constraints= with any method, for instance 'bfgs'",
    "trustconstr": "constraints= with any method, for instance 'bfgs'",
    "cobyla": "constraints= with 'nelder-mead' or 'bfgs'",
    "cobyqa": "constraints= with 'nelder-mead' or 'bfgs'",
    "trf": "'lm', which takes bounds",
    "dogbox": "'lm', which takes bounds",
}


def canonical(name: str) -> str:
    """A name as it is in the tables."""
    known = sorted({*CHAINS, *DIRECT, "auto"})
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    spelled = {"".join(filter(str.isalnum, other)): other for other in known}
    if plain in spelled:
        return spelled[plain]
    if plain in _ALIASES:
        return _ALIASES[plain]
    if plain in _INSTEAD:
        raise ValueError(f"minimize: there is no method {name!r} here; use {_INSTEAD[plain]}")
    raise ValueError(f"minimize: there is no method {name!r}; it can be {', '.join(known)}, or a list of links")
