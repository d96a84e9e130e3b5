"""Just minimise it: one function for points of any form, by name of a method or with links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..m._flat import flat, unflat
from ..optim import Module, Need
from ._batched import Runs, minimize_batched
from ._bounds import Box, Free
from ._direct import coordinate_descent, nelder_mead, powell
from ._loop import Record, Stop, run_chain
from ._methods import CHAINS, DIRECT, PROJECTED, RESIDUALS, VALUES_ONLY, canonical
from ._point import Point
from ._result import Result
from ._rows import DIRECTIONS

__all__ = ["Result", "minimize"]


def minimize(
    fun: Callable[[Any], Any],
    x0: Any,
    method: str | Module | Sequence[Module] = "auto",
    *,
    bounds: Any = None,
    bounds_by: str = "auto",
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
            cd), or links.
        bounds: (low, high): each None, a number, or in the form of x0.
        bounds_by: "projection" onto the box (gd, cg, lbfgs, bfgs, adam), "transform" of the variables, or "auto".
        tol: Stop when the largest component of the gradient is at most this; 1e-8 in double precision, else 1e-4.
        max_evals: The largest number of evaluations; by default 10000, or 200 per number if that is more.
        max_steps: The largest number of steps.
        callback: Called after each step with the `Result` so far; a true answer ends the run.
        progress: Show a progress bar.
        batched: Whether every tensor of x0 holds many starts along its first axis, while `fun` is of one point. They run
            vectorised (bfgs, lbfgs, cg, gd, adam; "auto" is lbfgs; bounds by transform), each as if it were alone.

    Returns:
        A `Result` with the best point seen, also where the run was ended by a limit.

    Raises:
        TypeError: x0 or the function's result is of a kind that can't be minimised.
        ValueError: The start is not finite or outside of the bounds, the loss is not one number, or no such method.

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
    name = canonical(method) if isinstance(method, str) else "links"
    point = Point(x0)
    if batched:
        name = "lbfgs" if name == "auto" else name
        if name not in DIRECTIONS:
            raise ValueError(
                f"minimize: batched starts run with {', '.join(DIRECTIONS)}; for {name} call minimize for each start"
            )
        if bounds is not None and bounds_by == "projection":
            raise ValueError("minimize: batched starts take bounds by transform; leave bounds_by out")
        held = None if bounds is None else _put_inside(point, Box(point, bounds, True))
        runs = Runs(fun, point, held, name, max_evals)
        with _bar(progress, runs) as show:

            def shown(now: Runs) -> bool:
                show(now)
                return callback is not None and bool(callback(now.result()))

            return minimize_batched(runs, tol=tol, max_steps=max_steps, after=shown)
    links = None if isinstance(method, str) else ([method] if isinstance(method, Module) else list(method))
    if name == "auto":
        name = _choose(fun, point)
    box = None
    if bounds is not None:
        transform = bounds_by == "transform" or (bounds_by == "auto" and name not in PROJECTED)
        if not transform and name not in PROJECTED:
            raise ValueError(
                f"minimize: {name} takes bounds by transform; projection works with {', '.join(PROJECTED)}"
            )
        box = _put_inside(point, Box(point, bounds, transform))
    dtype = point.leaves[0].dtype
    exact = dtype in (torch.float64, torch.complex128)
    size = (1e-8 if exact else 1e-4) if tol is None else tol
    record = Record(point, box, fun, max_evals or max(10_000, 200 * point.size), name)
    with _bar(progress, record) as show:

        def after(now: Record) -> bool:
            show(now)
            return callback is not None and bool(callback(_result(now, name)))

        if name in DIRECT:
            _run_direct(record, name, 1e-12 if exact else 1e-6, max_steps, after)
        else:
            residuals = name in RESIDUALS
            if links is not None:
                residuals = any(Need.RESIDUALS in link.all_needs() for link in links)
            chain = links if links is not None else _chain(name, box)
            run_chain(
                record,
                chain,
                tol=size,
                residuals=residuals,
                values_only=name in VALUES_ONLY,
                steps=max_steps,
                after=after,
            )
    return _result(record, name)


def _choose(fun: Callable[[Any], Any], point: Point) -> str:
    """Least squares for a vector; the dense quasi-Newton method where its matrix is small."""
    found = fun(point.arguments(point.leaves))
    data = found if isinstance(found, Tensor) else getattr(found, "data", None)
    if isinstance(data, Tensor) and data.dim() == 1 and data.numel() > 1:
        return "lm"
    return "bfgs" if point.size <= 200 else "lbfgs"


def _put_inside(point: Point, box: Box) -> Box:
    """Let the variables start where the function sees x0."""
    with torch.no_grad():
        for leaf, start in zip(point.leaves, box.start(point.leaves), strict=True):
            leaf.copy_(start)
    return box


def _chain(name: str, box: Box | None) -> list[Module]:
    if box is None or box.transform:
        return CHAINS[name]()
    direction, along = PROJECTED[name]()
    return [Free(box), *direction, Free(box), *along]


def _run_direct(record: Record, name: str, tol: float, steps: int | None, after: Callable[[Record], bool]) -> None:
    leaves = record.point.leaves
    start = flat(leaves).double().numpy().copy()

    def value(x: Any) -> float:
        pieces = unflat(torch.from_numpy(np.ascontiguousarray(x)).to(flat(leaves).dtype), leaves)
        with torch.no_grad():
            for leaf, piece in zip(leaves, pieces, strict=True):
                leaf.copy_(piece)
            found = float(record.evaluate(residuals=False))
        return found if not math.isnan(found) else math.inf

    runs = {"nelder-mead": nelder_mead, "powell": powell, "cd": coordinate_descent}
    try:
        for _, best, reason in runs[name](value, start, tol):
            if not math.isfinite(record.value):
                record.end(f"The loss is {best} at the start.", False)
                return
            if reason:
                record.end(reason, True)
                return
            record.steps += 1
            record.history.append((record.evaluations, record.value))
            if after(record):
                record.end("The callback asked to stop.", False)
                return
            if steps is not None and record.steps >= steps:
                record.end(f"The limit of {steps} steps was reached.", False)
                return
    except Stop as stop:
        record.end(str(stop), False)


def _result(record: Record, method: str) -> Result:
    import time

    return Result(
        record.point.result(record.best),
        record.value,
        record.reason or "Still running.",
        record.success,
        record.steps,
        record.evaluations,
        record.gradient_norm,
        time.perf_counter() - record.began,
        tuple(record.history),
        method,
    )


def _bar(wanted: bool, record: Record | Runs) -> Any:
    if not wanted:
        return nullcontext(lambda now: None)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    class Bar:
        def __enter__(self) -> Callable[[Record | Runs], None]:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.progress = Progress(*columns, transient=True)
            self.progress.start()
            self.task = self.progress.add_task("minimize", total=record.max_evals)
            return self.show

        def show(self, now: Record | Runs) -> None:
            self.progress.update(self.task, completed=now.evaluations, description=f"loss {now.value:.6g}")

        def __exit__(self, *error: object) -> None:
            self.progress.stop()

    return Bar()
