"""`minimize`: one function for points of any form, by method or links; above 400 lines because half of them are docstrings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ._args import bind_args
from ._arguments import MinimizeRequest, read_request
from ._constrained import SMALL, run_sqp
from ._constraints import Constraint, minimize_constrained, read_constraints
from ._curve_fit import curve_fit
from ._derivatives import allow_derivatives
from ._direct import DIRECT, DirectMethod
from ._fit import run_fit
from ._functions import accept_numbers, attach_derivatives, change_residuals
from ._names import BATCHED, PROJECTED, RESIDUALS, VALUES_ONLY
from ._point import StartPoint, choose_tolerance, data_of, from_vector, to_vector
from ._proximal import PROXIMAL, read_proximal, run_proximal
from ._result import Result, ask_to_stop
from ._runs import RunRecord
from ._scipy_method import scipy_method
from ._single import EndOfRun, SingleRun
from ._variables import Variables, read_bounds

if TYPE_CHECKING:
    from ..optim import Module

__all__ = ["Result", "choose_tolerance", "curve_fit", "minimize", "scipy_method"]


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    method: str | Module | Sequence[Module] = "auto",
    *,
    args: Any = (),
    jac: Any = None,
    hess: Callable[[Any], Any] | None = None,
    bounds: Any = None,
    lower: Any = None,
    upper: Any = None,
    bounds_by: str = "auto",
    constraints: Any = (),
    tol: float | None = None,
    max_evals: int | None = None,
    max_steps: int | None = None,
    callback: Callable[..., Any] | None = None,
    progress: bool = False,
    batched: bool = False,
    loss: str = "linear",
    f_scale: float = 1.0,
    x_scale: Any = None,
    nan: str | None = None,
    options: Mapping[str, Any] | None = None,
    implicit: bool = False,
    prox: Any = None,
) -> Result:
    """Minimise a function from a starting point, and return the best point and a report of the run.

    Args:
        fun: Takes a point in the form of x0 and returns the loss, a 0-d tensor; for least squares a vector of residuals r,
            whose loss is half of |r|^2.
        x0: A tensor, nested dictionaries and lists of tensors, a labelled tensor, or a module. It is not changed.
        method: "auto" (least squares for vectors, else BFGS up to 200 numbers and L-BFGS beyond), a name (bfgs, lbfgs, cg,
            newton, damped-newton, newton-cg, trust-ncg, trust-exact, dogleg, lm, sqp, gn, gd, adam, nelder-mead, powell,
            spsa, cd, cmaes; SciPy's spellings and torchzero's class names are understood), or links.
        args: The arguments of the function after the point: a tuple, or one argument.
        jac: Without it torch differentiates. A function that returns the gradient, or for residuals their Jacobian, in the
            form of x0; or True where `fun` returns (value, gradient). Functions with derivatives of their own may return
            floats and NumPy arrays, and are given NumPy arrays where x0 is. "forward" or "reverse" is the mode in which
            fits compute Jacobians; by default the cheaper one.
        hess: A function that returns the Hessian, in the form of `Result.hessian`.
        bounds: As SciPy's: an interval (low, high) for each variable, None for open, equal for fixed. One interval is for all
            variables; for dictionaries, intervals (or lists of them) by name.
        lower: Lower bounds instead: a number, or in the form of x0, None where open.
        upper: Upper bounds.
        bounds_by: "projection" (bfgs, lbfgs, cg, gd, adam project onto the box, lm and damped-newton keep an active set),
            "transform" of the variables, or "auto", which is projection where there is one.
        constraints: {"type": "eq", "fun": c} for c(x) = 0 and {"type": "ineq", "fun": c} for c(x) >= 0, one or a list, as in
            SciPy; functions of NumPy arrays need their "jac", or a method without gradients. They are met by sequential
            quadratic programming (sqp, up to 300 variables) or by an augmented Lagrangian around the method; `Result` has
            their multipliers and the residual of the conditions of Karush, Kuhn and Tucker, which `tol` is then of (1e-6 in
            double precision, else 1e-3).
        tol: Stop when the largest component of the gradient is at most this; 1e-8 in double precision, else 1e-4. Fits by
            lm end by default when the point is known to 8 digits, whatever the units of the residuals. For
            nelder-mead, powell and cd it is the relative decrease that counts as none, for cmaes the size of a step.
        max_evals: The largest number of evaluations; by default 10000, or 200 per number if that is more.
        max_steps: The largest number of steps.
        callback: Called after each step with the `Result` so far; a true answer, or StopIteration, ends the run. A
            callback whose argument is called `xk` is given the point, as SciPy does.
        progress: Show a progress bar.
        batched: Whether every tensor of x0 holds many starts along its first axis, while `fun` is of one point. They run
            vectorised (bfgs, lbfgs, cg, gd, adam; "auto" is lbfgs; bounds, of one point, by transform), each as if it
            were alone.
        loss: Of residuals: "linear" (least squares), or "soft_l1", "huber", "cauchy" or "arctan" as in SciPy, with which
            large residuals count less.
        f_scale: The size of a residual beyond which it counts less.
        x_scale: For lm the size of a change of each variable, one number or in the form of x0; by default from the columns
            of the Jacobian.
        nan: "mask" leaves out the residuals that are not a number at x0.
        options: SciPy's options by name: maxiter, maxfev, gtol, disp; for lm ftol, xtol, gtol, factor, and `broyden` and
            `geodesic` (whether Broyden's updates replace Jacobians, and steps follow the curvature).
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
    if prox is not None or implicit:
        _refuse_changes(jac=jac, hess=hess, loss=loss, nan=nan, implicit=implicit)
    if prox is not None:
        if batched or implicit or constraints or any(side is not None for side in (bounds, lower, upper)):
            raise ValueError("minimize: prox= stands alone; bounds are prox=m.prox.BoxSet(lower, upper)")
        request = read_request(
            method, options, tol=tol, max_evals=max_evals, max_steps=max_steps, callback=callback, progress=progress,
            x0=x0, x_scale=x_scale, jac=None, name="fista" if PROXIMAL[read_proximal(method)] else "proximal-gradient",
        )  # fmt: skip
        return _minimize_proximal(fun, x0, prox, request)
    if implicit:
        from ._implicit import minimize_implicit  # with `linalg`, which only this needs

        return minimize_implicit(
            minimize, fun, x0, constraints, method=method, bounds=bounds, lower=lower, upper=upper, bounds_by=bounds_by,
            tol=tol, max_evals=max_evals, max_steps=max_steps, callback=callback, progress=progress, batched=batched,
            options=options, x_scale=x_scale,
        )  # fmt: skip
    request = read_request(
        method, options, tol=tol, max_evals=max_evals, max_steps=max_steps, callback=callback, progress=progress, x0=x0,
        x_scale=x_scale, jac=jac,
    )  # fmt: skip
    if bounds_by not in ("auto", "projection", "transform"):
        raise ValueError(f"minimize: bounds_by is {bounds_by!r}; it is 'auto', 'projection' or 'transform'")
    fun = _prepare_function(fun, x0, request, jac, hess, batched)
    fun = change_residuals(fun, loss, f_scale, nan)
    box = {"bounds": bounds, "lower": lower, "upper": upper}
    if constraints or request.name == "sqp":
        if batched:
            raise ValueError("minimize: constraints take one start at a time; call minimize for each")
        return _minimize_constrained(
            fun, x0, read_constraints(constraints, x0, method), request, bounds_by, box, x_scale
        )
    return _minimize_free(fun, x0, request, bounds_by, box, batched)


@allow_derivatives()
def _minimize_free(
    fun: Callable[[Any], Any], x0: Any, request: MinimizeRequest, bounds_by: str, box: dict[str, Any], batched: bool
) -> Result:
    """Minimise without constraints other than bounds.

    Args:
        fun: The function.
        x0: The starting point, or many.
        request: The method, limits and tolerances.
        bounds_by: "projection", "transform" or "auto".
        box: The arguments `bounds`, `lower` and `upper`.
        batched: Whether there are many starts.
    """
    point = StartPoint(x0)
    sides = read_bounds(point, **box, batched=batched)
    run = _start_run(fun, point, sides, request, bounds_by, batched)
    _make_all_steps(run, request)
    result = run.result()
    problem = None if result.problem is None else result.problem._replace(sides=sides)
    return dataclasses.replace(result, jacobians=run.jacobians, problem=problem)


def _prepare_function(
    fun: Callable[[Any], Any], x0: Any, request: MinimizeRequest, jac: Any, hess: Any, batched: bool
) -> Callable[[Any], Any]:
    """Return the function with the user's derivatives, or one that may return floats if no derivatives are needed."""
    own = jac is not None and jac is not False and request.mode is None
    if own or hess is not None:
        if batched:
            raise ValueError("minimize: batched starts are differentiated together; leave jac= and hess= out")
        return attach_derivatives(fun, x0, jac if own else None, hess)
    return accept_numbers(fun, x0) if request.name in VALUES_ONLY or request.name in DIRECT else fun


@allow_derivatives()
def _minimize_constrained(
    fun: Callable[[Any], Any],
    x0: Any,
    constraints: list[Constraint],
    request: MinimizeRequest,
    bounds_by: str,
    box: dict[str, Any],
    x_scale: Any,
) -> Result:
    """Minimise by sequential quadratic programming, or by an augmented Lagrangian around another method.

    Args:
        fun: The function.
        x0: The starting point.
        constraints: The constraints.
        request: The method, limits and tolerances.
        bounds_by: "projection", "transform" or "auto".
        box: The arguments `bounds`, `lower` and `upper`.
        x_scale: The size of a change of each variable, for lm.
    """
    request.check_fit("sqp" if request.name in ("sqp", "auto") else request.name)
    point = StartPoint(x0)
    if request.name == "sqp" or (request.name == "auto" and point.size <= SMALL):
        variables = Variables(point, *read_bounds(point, **box), False)
        run = SingleRun(variables, point.leaves, fun, request.max_evals, "sqp")
        with _show_progress(request.progress, run, request.callback) as after:
            size = point.choose_tol(request.tol, 1e-6, 1e-3)
            return run_sqp(run, constraints, tol=size, steps=request.max_steps, after=after)
    return minimize_constrained(
        minimize, fun, x0, constraints, tol=request.tol, max_evals=request.max_evals, callback=request.callback,
        max_steps=request.max_steps, progress=request.progress, method=request.method, bounds_by=bounds_by, **box,
        options={name: getattr(request.fit, name) for name in request.fit_options if name != "x_scale"}, x_scale=x_scale,
    )  # fmt: skip


def _start_run(
    fun: Callable[[Any], Any], point: StartPoint, sides: Any, request: MinimizeRequest, bounds_by: str, batched: bool
) -> SingleRun:
    """Return the record of a run, with its variables and its method; "auto" evaluates the function once to choose.

    Args:
        fun: The function.
        point: The starting point.
        sides: The lower and upper bounds of every leaf.
        request: The method, limits and tolerances.
        bounds_by: "projection", "transform" or "auto".
        batched: Whether there are many starts.
    """
    name = "lbfgs" if batched and request.name == "auto" else request.name
    if batched and name not in BATCHED:
        raise ValueError(f"minimize: {', '.join(BATCHED)} are batched; for {name} call minimize for each start")
    low, high = sides
    variables = Variables(point, low, high, _choose_transform(name, (*low, *high), bounds_by, batched))
    if batched:
        from ._loop import BatchedRuns

        return BatchedRuns(variables, fun, request.max_evals, name)
    run = SingleRun(variables, point.leaves, fun, request.max_evals, name, name in VALUES_ONLY or name in DIRECT)
    if name == "auto":
        _choose_method(run)
    request.check_fit(run.method)
    return run


def _choose_transform(name: str, bounds: Sequence[Any], bounds_by: str, batched: bool) -> bool:
    """Return whether bounds hold by a change of variables; otherwise points are projected.

    Args:
        name: The method.
        bounds: The lower and upper bounds of the leaves.
        bounds_by: "projection", "transform" or "auto".
        batched: Whether there are many starts.
    """
    projects = not batched and (name in PROJECTED or name in ("lm", "auto"))
    bounded = any(bound is not None for bound in bounds)
    if bounded and bounds_by == "projection" and not projects:
        raise ValueError(f"minimize: {name} takes bounds by transform; by projection lm, {', '.join(PROJECTED)} do")
    return batched or (bounded and (bounds_by == "transform" or not projects))


def _choose_method(run: SingleRun) -> None:
    """Choose the method by a first evaluation: least squares for a vector, BFGS where its matrix is small, else L-BFGS."""
    run.ready = run.call()
    data = data_of(run.ready[1])
    several = data is not None and data.numel() > 1
    run.method = "lm" if several else "bfgs" if run.point.size <= 200 else "lbfgs"


def _make_all_steps(run: SingleRun, request: MinimizeRequest) -> None:
    """Make steps until the run ends, and finish its record."""
    tol = run.point.choose_tol(request.tol, choose_tolerance(True), choose_tolerance(False))
    with _show_progress(request.progress, run, request.callback) as after:
        try:
            _make_steps(run, request, tol, after)
        except EndOfRun as stop:
            run.end(str(stop), False)
        run.finish(tol)


def _make_steps(run: SingleRun, request: MinimizeRequest, tol: float, after: Callable[[], bool]) -> None:
    """Make steps of the method until the run ends.

    Args:
        run: The record of the run.
        request: The method, limits and tolerances.
        tol: The largest component of the gradient at the end.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: If an evaluation ends it.
    """
    name, variables, steps = run.method, run.variables, request.max_steps
    run.residuals = name in RESIDUALS
    fixed = variables.find_fixed()
    if not run.batch and all(mask is not None and bool(mask.all()) for mask in fixed):
        run.evaluate()
        run.norms = 0.0 * run.size
        run.end("All variables are fixed by their bounds.", True)
    elif name in DIRECT:
        _run_direct(run, DIRECT[name], run.point.choose_tol(request.tol, 1e-12, 1e-6), steps, after)
    elif name == "lm":
        run_fit(run, request.fit, request.mode, steps=steps, after=after)
    else:
        from ._loop import run_links  # imports all links, which takes as long as a hundred small fits

        run_links(run, request.method, tol=tol, steps=steps, after=after)


def _refuse_changes(*, jac: Any, hess: Any, loss: str, nan: str | None, implicit: bool) -> None:
    """Raise ValueError for arguments that change the function, whose own derivatives are needed."""
    which = "implicit=True" if implicit else "prox="
    changes = {"jac": jac is not None, "hess": hess is not None, "loss": loss != "linear", "nan": nan is not None}
    for name, present in changes.items():
        if present:
            raise ValueError(
                f"minimize: {which} differentiates the function itself; leave {name}= out, or write it into fun"
            )


@allow_derivatives()
def _minimize_proximal(fun: Callable[[Any], Any], x0: Any, prox: Any, request: MinimizeRequest) -> Result:
    """Minimise a function plus a penalty.

    Args:
        fun: The function.
        x0: The starting point.
        prox: The proximal operators.
        request: The method, limits and tolerances.
    """
    request.check_fit(request.name)
    point, momentum = StartPoint(x0), request.name == "fista"
    several = point.match(prox, "prox", callable)
    variables = Variables(point, *read_bounds(point, None, None, None), False)
    run = SingleRun(variables, point.leaves, fun, request.max_evals, request.name)
    with _show_progress(request.progress, run, request.callback) as after:
        size = point.choose_tol(request.tol, choose_tolerance(True), choose_tolerance(False))
        return run_proximal(run, several, momentum=momentum, tol=size, steps=request.max_steps, after=after)


def _run_direct(run: SingleRun, find: DirectMethod, tol: float, steps: int | None, after: Callable[[], bool]) -> None:
    start = to_vector(run.leaves).double().numpy().copy()

    def value(x: Any) -> float:
        pieces = from_vector(torch.from_numpy(np.ascontiguousarray(x)), run.leaves)
        with torch.no_grad():
            for leaf, piece in zip(run.leaves, pieces, strict=True):
                leaf.copy_(piece)
            loss = float(run.evaluate())
        return loss if not math.isnan(loss) else math.inf

    for reason, success in find(value, start, tol):
        if reason:
            run.end(reason, success)
        if not run.active or run.count_step(after, steps):
            return


@contextmanager
def _show_progress(
    wanted: bool, run: RunRecord, callback: Callable[[Result], Any] | None
) -> Iterator[Callable[[], bool]]:
    """Yield the function to call after each step, which shows the progress and returns whether the callback ends the run."""

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
