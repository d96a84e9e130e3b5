"""Just minimise it: one function for points of any form, by name of a method or with links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..optim import Module, Need
from ._batched import BATCHED, BatchedRuns, minimize_batched
from ._constraints import minimize_constrained, read_constraints
from ._direct import DIRECT
from ._loop import EndOfRun, SingleRun, run_chain
from ._methods import IN_BOX, RESIDUALS, VALUES_ONLY, canonical, make_chain
from ._point import StartPoint, data_of, from_vector, to_vector
from ._result import Result, ask_to_stop
from ._runs import RunRecord
from ._variables import Variables, read_bounds

__all__ = ["Result", "minimize"]


def minimize(
    fun: Callable[[Any], Any],
    x0: Any,
    method: str | Module | Sequence[Module] = "auto",
    *,
    bounds: Any = None,
    lower: Any = None,
    upper: Any = None,
    bounds_by: str = "auto",
    constraints: Any = (),
    tol: float | None = None,
    max_evals: int | None = None,
    max_steps: int | None = None,
    callback: Callable[[Result], Any] | None = None,
    progress: bool = False,
    batched: bool = False,
) -> Result:
    """Minimise a function from a starting point, and say how it went.

    Args:
        fun: Takes a point in the form of x0 and returns the loss, a 0-d tensor; for least squares a vector of residuals r,
            whose loss is half of |r|^2.
        x0: A tensor, nested dictionaries and lists of tensors, a labelled tensor, or a module. It is not changed.
        method: "auto" (least squares for vectors, else BFGS up to 200 numbers and L-BFGS beyond), a name (bfgs, lbfgs, cg,
            newton, damped-newton, newton-cg, trust-ncg, trust-exact, dogleg, lm, gn, gd, adam, nelder-mead, powell, spsa,
            cd, cmaes; SciPy's spellings and torchzero's class names are understood), or links.
        bounds: As SciPy's: an interval (low, high) for each variable, None for open, equal for fixed. One interval is for all
            variables; for dictionaries, intervals (or lists of them) by name.
        lower: Lower bounds instead: a number, or in the form of x0, None where open.
        upper: Upper bounds.
        bounds_by: "projection" (bfgs, lbfgs, cg, gd, adam project onto the box, lm and damped-newton keep an active set),
            "transform" of the variables, or "auto", which is projection where there is one.
        constraints: {"type": "eq", "fun": c} for c(x) = 0 and {"type": "ineq", "fun": c} for c(x) >= 0, one or a list, as in
            SciPy. They are met by an augmented Lagrangian around the method; `Result` has their multipliers and the residual
            of the conditions of Karush, Kuhn and Tucker, which `tol` is then of (1e-6 in double precision, else 1e-3).
        tol: Stop when the largest component of the gradient is at most this; 1e-8 in double precision, else 1e-4.
        max_evals: The largest number of evaluations; by default 10000, or 200 per number if that is more.
        max_steps: The largest number of steps.
        callback: Called after each step with the `Result` so far; a true answer, or StopIteration, ends the run.
        progress: Show a progress bar.
        batched: Whether every tensor of x0 holds many starts along its first axis, while `fun` is of one point. They run
            vectorised (bfgs, lbfgs, cg, gd, adam; "auto" is lbfgs; bounds, of one point, by transform), each as if it
            were alone.

    Returns:
        A `Result` with the best point seen, also where the run was ended by a limit.

    Raises:
        TypeError: x0 or the function's result is of a kind that can't be minimised.
        ValueError: The start is not finite or outside of the bounds, the loss is not one number, or no such method.

    `Result` has derivatives and standard errors at the point that was found.

    Example:
        >>> import torch, moduli as mo
        >>> start = {"a": torch.zeros(2, dtype=torch.float64), "b": [torch.ones((), dtype=torch.float64)]}
        >>> found = mo.minimize(lambda p: ((p["a"] - 3) ** 2).sum() + p["b"][0] ** 2, start)
        >>> found.x["a"].round(decimals=3), found.success
        (tensor([3., 3.], dtype=torch.float64), True)

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed.
    """
    if not callable(fun):
        raise TypeError(f"minimize: fun is a {type(fun).__name__}; give a function of a point")
    if tol is not None and not tol >= 0:
        raise ValueError(f"minimize: tol is {tol}; it is a size of the gradient, not negative")
    for name, limit in (("max_evals", max_evals), ("max_steps", max_steps)):
        if limit is not None and limit < 1:
            raise ValueError(f"minimize: {name} is {limit}; allow at least one")
    if bounds_by not in ("auto", "projection", "transform"):
        raise ValueError(f"minimize: bounds_by is {bounds_by!r}; it is 'auto', 'projection' or 'transform'")
    if constraints:
        if batched:
            raise ValueError("minimize: constraints take one start at a time; call minimize for each")
        same = {"method": method, "bounds": bounds, "lower": lower, "upper": upper, "bounds_by": bounds_by}
        return minimize_constrained(
            minimize, fun, x0, read_constraints(constraints), tol=tol, max_evals=max_evals, callback=callback,
            max_steps=max_steps, progress=progress, **same,
        )  # fmt: skip
    name = canonical(method) if isinstance(method, str) else "links"
    point = StartPoint(x0)
    low, high = read_bounds(point, bounds, lower, upper, batched)
    bounded = any(bound is not None for bound in (*low, *high))
    if batched:
        name = "lbfgs" if name == "auto" else name
        if name not in BATCHED:
            raise ValueError(
                f"minimize: batched starts run with {', '.join(BATCHED)}; for {name} call minimize for each start"
            )
        if bounded and bounds_by == "projection":
            raise ValueError("minimize: batched starts take bounds by transform; leave bounds_by out")
        runs = BatchedRuns(Variables(point, low, high, True), fun, max_evals, name)
        with _show_progress(progress, runs, callback) as after:
            minimize_batched(runs, tol=point.choose_tol(tol, 1e-8, 1e-4), max_steps=max_steps, after=after)
        return runs.result()
    links = None if isinstance(method, str) else ([method] if isinstance(method, Module) else list(method))
    projects = name in IN_BOX or name == "auto"
    transform = bounded and (bounds_by == "transform" or (bounds_by == "auto" and not projects))
    if bounded and not transform and not projects:
        raise ValueError(f"minimize: {name} takes bounds by transform; projection works with {', '.join(IN_BOX)}")
    variables = Variables(point, low, high, transform)
    values_only = name in VALUES_ONLY or name in DIRECT
    run = SingleRun(variables, fun, max_evals or max(10_000, 200 * point.size), name, values_only)
    if name == "auto":
        run.method = name = _choose(run)
    residuals = name in RESIDUALS
    if links is not None:
        residuals = any(Need.RESIDUALS in link.all_needs() for link in links)
    size = point.choose_tol(tol, 1e-8, 1e-4)
    with _show_progress(progress, run, callback) as after:
        try:
            if all(fixed is not None and bool(fixed.all()) for fixed in variables.find_fixed()):
                run.evaluate(residuals)
                run.norms = 0.0 * run.size
                run.end("All variables are fixed by their bounds.", True)
            elif name in DIRECT:
                _run_direct(run, name, point.choose_tol(None, 1e-12, 1e-6), max_steps, after)
            else:
                chain = make_chain(name, variables) if links is None else links
                run_chain(run, chain, tol=size, residuals=residuals, steps=max_steps, after=after)
        except EndOfRun as stop:
            run.end(str(stop), False)
        run.finish(residuals, size)
    return run.result()


def _choose(run: SingleRun) -> str:
    """Least squares for a vector; the dense quasi-Newton method where its matrix is small."""
    data = data_of(run.peek())
    if data is not None and data.dim() == 1 and data.numel() > 1:
        return "lm"
    return "bfgs" if run.point.size <= 200 else "lbfgs"


def _run_direct(run: SingleRun, name: str, tol: float, steps: int | None, after: Callable[[], bool]) -> None:
    leaves = run.variables.leaves
    start = to_vector(leaves).double().numpy().copy()

    def value(x: Any) -> float:
        pieces = from_vector(torch.from_numpy(np.ascontiguousarray(x)), leaves)
        with torch.no_grad():
            for leaf, piece in zip(leaves, pieces, strict=True):
                leaf.copy_(piece)
            found = float(run.evaluate(residuals=False))
        return found if not math.isnan(found) else math.inf

    for reason, success in DIRECT[name](value, start, tol):
        if reason:
            run.end(reason, success)
        if not run.active or run.count_step(after, steps):
            return


@contextmanager
def _show_progress(
    wanted: bool, runs: RunRecord, callback: Callable[[Result], Any] | None
) -> Iterator[Callable[[], bool]]:
    """What is to be called after each step: it shows the progress, and says whether the callback ends the run."""

    def ask() -> bool:
        return callback is not None and ask_to_stop(callback, runs.result())

    if not wanted:
        yield ask
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("minimize", total=runs.max_evals)

        def show_and_ask() -> bool:
            progress.update(task, completed=runs.evaluations, description=f"loss {runs.value:.6g}")
            return ask()

        yield show_and_ask
