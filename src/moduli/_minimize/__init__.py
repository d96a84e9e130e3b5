"""Just minimise it: one function for points of any form, by name of a method or with links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..optim import Module, Need
from ._args import bind_args
from ._constrained import SMALL, run_sqp
from ._constraints import Constraint, minimize_constrained, read_constraints
from ._direct import DIRECT, DirectMethod
from ._fit import run_fit
from ._implicit import minimize_implicit
from ._least_squares import LeastSquaresOptions
from ._loop import BATCHED, BatchedRuns, EndOfRun, SingleRun, run_chain
from ._methods import CHAINS, IN_BOX, RESIDUALS, VALUES_ONLY, canonical
from ._point import StartPoint, choose_tolerance, data_of, from_vector, to_vector
from ._proximal import PROXIMAL, read_proximal, run_proximal
from ._result import Result, ask_to_stop
from ._runs import RunRecord
from ._variables import Variables, read_bounds

__all__ = ["Result", "choose_tolerance", "minimize"]


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    method: str | Module | Sequence[Module] = "auto",
    *,
    args: Any = (),
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
    implicit: bool = False,
    prox: Any = None,
) -> Result:
    """Minimise a function from a starting point, and say how it went.

    Args:
        fun: Takes a point in the form of x0 and returns the loss, a 0-d tensor; for least squares a vector of residuals r,
            whose loss is half of |r|^2.
        x0: A tensor, nested dictionaries and lists of tensors, a labelled tensor, or a module. It is not changed.
        method: "auto" (least squares for vectors, else BFGS up to 200 numbers and L-BFGS beyond), a name (bfgs, lbfgs, cg,
            newton, damped-newton, newton-cg, trust-ncg, trust-exact, dogleg, lm, gn, gd, adam, nelder-mead, powell, spsa,
            cd, cmaes; SciPy's spellings and torchzero's class names are understood), or links.
        args: What the function takes after the point: a tuple, or one argument.
        bounds: As SciPy's: an interval (low, high) for each variable, None for open, equal for fixed. One interval is for all
            variables; for dictionaries, intervals (or lists of them) by name.
        lower: Lower bounds instead: a number, or in the form of x0, None where open.
        upper: Upper bounds.
        bounds_by: "projection" (bfgs, lbfgs, cg, gd, adam project onto the box, lm and damped-newton keep an active set),
            "transform" of the variables, or "auto", which is projection where there is one.
        constraints: {"type": "eq", "fun": c} for c(x) = 0 and {"type": "ineq", "fun": c} for c(x) >= 0, one or a list, as in
            SciPy. They are met by an augmented Lagrangian around the method; `Result` has their multipliers and the residual
            of the conditions of Karush, Kuhn and Tucker, which `tol` is then of (1e-6 in double precision, else 1e-3).
        tol: Stop when the largest component of the gradient is at most this; 1e-8 in double precision, else 1e-4. Fits by
            lm end by default when the point is known to 8 digits, whatever the units of the residuals.
        max_evals: The largest number of evaluations; by default 10000, or 200 per number if that is more.
        max_steps: The largest number of steps.
        callback: Called after each step with the `Result` so far; a true answer, or StopIteration, ends the run.
        progress: Show a progress bar.
        batched: Whether every tensor of x0 holds many starts along its first axis, while `fun` is of one point. They run
            vectorised (bfgs, lbfgs, cg, gd, adam; "auto" is lbfgs; bounds, of one point, by transform), each as if it
            were alone.
        implicit: Whether `Result.x` depends on the tensors in `args`, and in the args of constraints: first and second
            derivatives, in forward and reverse mode, by the implicit function theorem at the solution.
        prox: The proximal operator of a penalty that is added to the function (`m.prox`): one for all tensors of x0, or
            in its form with None where there is none. The method is "fista", or "proximal-gradient".

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
    fun = bind_args(fun, args)
    if prox is not None:
        if batched or implicit or constraints or any(side is not None for side in (bounds, lower, upper)):
            raise ValueError("minimize: prox= stands alone; bounds are prox=m.prox.BoxSet(lower, upper)")
        return _minimize_proximal(fun, x0, method, prox, tol, max_evals, max_steps, callback, progress)
    if implicit:
        return minimize_implicit(
            minimize, fun, x0, constraints, method=method, bounds=bounds, lower=lower, upper=upper, bounds_by=bounds_by,
            tol=tol, max_evals=max_evals, max_steps=max_steps, callback=callback, progress=progress, batched=batched,
        )  # fmt: skip
    if tol is not None and not tol >= 0:
        raise ValueError(f"minimize: tol is {tol}; it is a size of the gradient, not negative")
    for name, limit in (("max_evals", max_evals), ("max_steps", max_steps)):
        if limit is not None and limit < 1:
            raise ValueError(f"minimize: {name} is {limit}; allow at least one")
    if bounds_by not in ("auto", "projection", "transform"):
        raise ValueError(f"minimize: bounds_by is {bounds_by!r}; it is 'auto', 'projection' or 'transform'")
    name = canonical(method) if isinstance(method, str) else "links"
    if constraints or name == "sqp":
        if batched:
            raise ValueError("minimize: constraints take one start at a time; call minimize for each")
        if name == "sqp" or (name == "auto" and StartPoint(x0).size <= SMALL):
            return _minimize_by_sqp(
                fun, x0, read_constraints(constraints), read_bounds(StartPoint(x0), bounds, lower, upper),
                tol, max_evals, max_steps, callback, progress,
            )  # fmt: skip
        return minimize_constrained(
            minimize, fun, x0, read_constraints(constraints), tol=tol, max_evals=max_evals, callback=callback,
            max_steps=max_steps, progress=progress, method=method, bounds=bounds, lower=lower, upper=upper, bounds_by=bounds_by,
        )  # fmt: skip
    if batched:
        name = "lbfgs" if name == "auto" else name
        if name not in BATCHED:
            raise ValueError(f"minimize: {', '.join(BATCHED)} are batched; for {name} call minimize for each start")
    point = StartPoint(x0)
    low, high = read_bounds(point, bounds, lower, upper, batched)
    projects = not batched and (name in IN_BOX or name in ("lm", "auto"))
    bounded = any(bound is not None for bound in (*low, *high))
    if bounded and bounds_by == "projection" and not projects:
        raise ValueError(f"minimize: {name} takes bounds by transform; by projection lm, {', '.join(IN_BOX)} do")
    transform = batched or (bounded and (bounds_by == "transform" or not projects))
    variables = Variables(point, low, high, transform)
    if batched:
        run: SingleRun = BatchedRuns(variables, fun, max_evals, name)
    else:
        values_only = name in VALUES_ONLY or name in DIRECT
        run = SingleRun(variables, point.leaves, fun, max_evals, name, values_only)
        if name == "auto":
            # Least squares for a vector; the dense quasi-Newton method where its matrix is small.
            run.ready = run.call()
            data = data_of(run.ready[1])
            several = data is not None and data.numel() > 1
            run.method = name = "lm" if several else "bfgs" if point.size <= 200 else "lbfgs"
    run.residuals = name in RESIDUALS
    if not isinstance(method, str):
        links = [method] if isinstance(method, Module) else list(method)
        run.residuals = any(Need.RESIDUALS in link.all_needs() for link in links)
    elif name not in DIRECT and name != "lm":
        links = IN_BOX[name](variables) if bounded and not transform else CHAINS[name]()
    size = point.choose_tol(tol, choose_tolerance(True), choose_tolerance(False))
    with _show_progress(progress, run, callback) as after:
        try:
            if not batched and all(fixed is not None and bool(fixed.all()) for fixed in variables.find_fixed()):
                run.evaluate()
                run.norms = 0.0 * run.size
                run.end("All variables are fixed by their bounds.", True)
            elif name in DIRECT:
                _run_direct(run, DIRECT[name], point.choose_tol(None, 1e-12, 1e-6), max_steps, after)
            elif name == "lm":
                run_fit(run, LeastSquaresOptions(tol=tol or 0.0), None, steps=max_steps, after=after)
            else:
                run_chain(run, links, tol=size, steps=max_steps, after=after)
        except EndOfRun as stop:
            run.end(str(stop), False)
        run.finish(size)
    return run.result()


def _minimize_by_sqp(
    fun: Callable[[Any], Any],
    x0: Any,
    constraints: list[Constraint],
    sides: tuple[list[Any], list[Any]],
    tol: float | None,
    max_evals: int | None,
    max_steps: int | None,
    callback: Callable[[Result], Any] | None,
    progress: bool,
) -> Result:
    point = StartPoint(x0)
    run = SingleRun(Variables(point, *sides, False), point.leaves, fun, max_evals, "sqp")
    with _show_progress(progress, run, callback) as after:
        size = point.choose_tol(tol, 1e-6, 1e-3)
        return run_sqp(run, constraints, tol=size, steps=max_steps, after=after)


def _minimize_proximal(
    fun: Callable[[Any], Any],
    x0: Any,
    method: Any,
    prox: Any,
    tol: float | None,
    max_evals: int | None,
    max_steps: int | None,
    callback: Callable[[Result], Any] | None,
    progress: bool,
) -> Result:
    name, point = read_proximal(method), StartPoint(x0)
    several = point.match(prox, "prox", callable)
    momentum = PROXIMAL[name]
    variables = Variables(point, *read_bounds(point, None, None, None), False)
    run = SingleRun(variables, point.leaves, fun, max_evals, "fista" if momentum else "proximal-gradient")
    with _show_progress(progress, run, callback) as after:
        size = point.choose_tol(tol, choose_tolerance(True), choose_tolerance(False))
        return run_proximal(run, several, momentum=momentum, tol=size, steps=max_steps, after=after)


def _run_direct(run: SingleRun, find: DirectMethod, tol: float, steps: int | None, after: Callable[[], bool]) -> None:
    start = to_vector(run.leaves).double().numpy().copy()

    def value(x: Any) -> float:
        pieces = from_vector(torch.from_numpy(np.ascontiguousarray(x)), run.leaves)
        with torch.no_grad():
            for leaf, piece in zip(run.leaves, pieces, strict=True):
                leaf.copy_(piece)
            found = float(run.evaluate())
        return found if not math.isnan(found) else math.inf

    for reason, success in find(value, start, tol):
        if reason:
            run.end(reason, success)
        if not run.active or run.count_step(after, steps):
            return


@contextmanager
def _show_progress(
    wanted: bool, run: RunRecord, callback: Callable[[Result], Any] | None
) -> Iterator[Callable[[], bool]]:
    """What is to be called after each step: it shows the progress, and says whether the callback ends the run."""

    def ask() -> bool:
        return callback is not None and ask_to_stop(callback, run.result())

    if not wanted:
        yield ask
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("minimize", total=run.max_evals)

        def show_and_ask() -> bool:
            progress.update(task, completed=run.evaluations, description=f"loss {run.value:.6g}")
            return ask()

        yield show_and_ask
