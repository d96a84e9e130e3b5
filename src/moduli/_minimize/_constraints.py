"""Minimisation under constraints: an augmented Lagrangian around any method."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..labels import Tensor as Labelled
from ._args import bind_args
from ._direct import DIRECT
from ._functions import accept_numbers, attach_derivatives, holds_numpy
from ._names import canonical
from ._point import StartPoint, align_numbers, data_of, loss_of, value_of
from ._result import Result, ask_to_stop

_WRITTEN = "{'type': 'eq', 'fun': f} for f(x) = 0, or {'type': 'ineq', 'fun': f} for f(x) >= 0"


class Constraint(NamedTuple):
    """A function of the point that is zero, or at least zero."""

    fun: Callable[[Any], Any]
    inequality: bool

    def values(self, x: Any) -> Tensor:
        """Return the values of the function at a point as a vector."""
        return self.flatten(self.fun(x))

    @staticmethod
    def flatten(out: Any) -> Tensor:
        """Return the values of a function as a vector."""
        data = data_of(out)
        values = torch.as_tensor(out if data is None else data).reshape(-1)
        if values.dtype is torch.bool:
            raise TypeError(f"minimize: a constraint returned True or False; it returns numbers: {_WRITTEN}")
        return values

    def select(self, chosen: Tensor) -> Callable[[Any], Tensor]:
        """Return the function of the chosen values only."""
        return lambda x: self.values(x)[chosen]


def select_active(constraints: Sequence[Constraint], active: Sequence[Tensor]) -> list[Callable[[Any], Any]]:
    """Return the functions that are zero at a result: equations, and the inequalities that hold with equality.

    Args:
        constraints: The constraints.
        active: For each constraint which of its values are active; for equations all are.
    """
    out = []
    for one, chosen in zip(constraints, active, strict=True):
        if not one.inequality or bool(chosen.all()):
            out.append(one.fun)
        elif bool(chosen.any()):
            out.append(one.select(chosen))
    return out


def read_constraints(constraints: Any, x0: Any = None, method: Any = None) -> list[Constraint]:
    """Read constraints in SciPy's forms: dictionaries with "type" and "fun", or objects with fun (or A), lb and ub.

    Args:
        constraints: One constraint or several.
        x0: The starting point, if functions get NumPy arrays where it is NumPy arrays.
        method: The method.
    """
    single = isinstance(constraints, Mapping) or hasattr(constraints, "lb") or callable(constraints)
    numpy = holds_numpy(x0)
    direct = numpy and isinstance(method, str) and canonical(method) in DIRECT

    def wrap(fun: Callable[[Any], Any], jac: Any) -> Callable[[Any], Any]:
        """Return a function of tensors; one of NumPy arrays if it has derivatives of its own, or needs none."""
        if direct:
            return accept_numbers(fun, x0)
        return attach_derivatives(fun, x0, jac, None) if numpy and callable(jac) else fun

    out: list[Constraint] = []
    for one in [constraints] if single else list(constraints):
        if isinstance(one, Constraint):
            out.append(one)
            continue
        if hasattr(one, "lb"):
            out += _constrain_between(one, wrap)
            continue
        out.append(_read_dictionary(one, wrap))
    return out


def _read_dictionary(one: Any, wrap: Callable[[Callable[[Any], Any], Any], Callable[[Any], Any]]) -> Constraint:
    """Return the constraint of a dictionary with "type", "fun", and perhaps "jac" and "args"; `wrap` makes functions of tensors."""
    if not isinstance(one, Mapping):
        raise TypeError(f"minimize: a constraint is a dictionary, not a {type(one).__name__}: {_WRITTEN}")
    kind, fun = one.get("type"), one.get("fun")
    if kind not in ("eq", "ineq") or not callable(fun):
        raise ValueError(f"minimize: a constraint is {_WRITTEN}, with 'args' where f takes more than x")
    args, jac = one.get("args", ()), one.get("jac")
    jac = bind_args(jac, args) if callable(jac) else None
    return Constraint(wrap(bind_args(fun, args), jac), kind == "ineq")


def _multiply_by(A: Any) -> Callable[[Any], Tensor]:
    """Return the function of a linear constraint, whose matrix has a column for each variable."""
    A = A.toarray() if hasattr(A, "toarray") else A
    matrix = A if isinstance(A, Tensor) else torch.from_numpy(np.atleast_2d(np.array(A)))

    def multiply(x: Any) -> Tensor:
        data = data_of(x)
        if data is None or data.dim() != 1 or matrix.shape[1] != len(data):
            there = f"x0 is a {type(x).__name__}" if data is None else f"x0 has the shape {tuple(data.shape)}"
            fact = f"minimize: A of a linear constraint has the shape {tuple(matrix.shape)}, and {there}"
            raise ValueError(f"{fact}; it has a column for each entry of a vector x0")
        product: Tensor = matrix.to(data) @ data
        return product

    return multiply


def _constrain_between(one: Any, wrap: Callable[[Callable[[Any], Any], Any], Callable[[Any], Any]]) -> list[Constraint]:
    """Read one of SciPy's constraint objects: equalities for equal ends, inequalities for finite ends.

    Args:
        one: The constraint.
        wrap: Converts a user's function and its derivatives to a function of tensors.
    """
    linear = not hasattr(one, "fun")
    own = Constraint(_multiply_by(one.A) if linear else wrap(one.fun, getattr(one, "jac", None)), False)

    def constrain(kind: str) -> Constraint:
        def distance(x: Any) -> Tensor:
            out = own.fun(x)
            values = Constraint.flatten(out)
            low, high = (_read_end(end, out) for end in (one.lb, one.ub))
            chosen = _choose(kind, low, high).expand(values.shape)
            difference = high.to(values) - values if kind == "above" else values - low.to(values)
            return difference[chosen]

        return Constraint(distance, kind != "equal")

    ends = [_read_end(end, None) for end in (one.lb, one.ub)]
    return [constrain(kind) for kind in ("equal", "below", "above") if bool(_choose(kind, *ends).any())]


def _read_end(end: Any, out: Any) -> Tensor:
    """Return one end of an interval in double precision; a labelled one in the order of the values of the function."""
    if isinstance(end, Labelled) and isinstance(out, Labelled):
        end = align_numbers(end, out.data, out.dims, "minimize: ends of a constraint", "its function").reshape(-1)
    data = data_of(end)
    ends = torch.as_tensor(np.array(end, dtype=float) if data is None else data, dtype=torch.float64)
    if bool(ends.isnan().any()):
        raise ValueError("minimize: an end of a constraint is not a number; where it is open it is infinite")
    return ends


def _choose(kind: str, low: Tensor, high: Tensor) -> Tensor:
    """Return which values have an equation ("equal"), a lower end ("below") or an upper end ("above")."""
    equal = low == high
    return equal if kind == "equal" else (low if kind == "below" else high).isfinite() & ~equal


def minimize_constrained(
    minimize: Callable[..., Result],
    fun: Callable[[Any], Any],
    x0: Any,
    constraints: Sequence[Constraint],
    *,
    tol: float | None,
    max_evals: int | None,
    callback: Callable[[Result], Any] | None,
    max_steps: int | None,
    **options: Any,
) -> Result:
    """Call `minimize` on the augmented Lagrangian, each time from the last result, until the KKT conditions hold.

    Args:
        minimize: Minimises the augmented Lagrangian.
        fun: The function.
        x0: The starting point.
        constraints: The constraints.
        tol: The residual of the conditions of Karush, Kuhn and Tucker at the end; None for the default.
        max_evals: The largest number of evaluations.
        callback: Called after each run with the result so far.
        max_steps: The largest number of steps.
        **options: Other arguments of `minimize`.
    """
    began, point = time.perf_counter(), StartPoint(x0)
    tol, limit = point.choose_tol(tol, 1e-6, 1e-3), max_evals or max(20_000, 400 * point.size)
    run = _AugmentedLagrangian(fun, constraints, point, tol)
    # Arrays of NumPy become tensors, as they are in every run but the first.
    x = point.result(point.leaves) if holds_numpy(x0) else x0
    history, spent, steps = list[tuple[int, float]](), 0, 0
    method = options.get("method")
    exact = isinstance(method, str) and canonical(method) in DIRECT  # their tolerances are not those of a gradient
    while True:
        left = None if max_steps is None else max_steps - steps
        run_tol = None if exact else run.inner_tol
        last = minimize(run.evaluate, x, tol=run_tol, max_evals=limit - spent, max_steps=left, **options)
        x, spent, steps = last.x, spent + last.evaluations, steps + last.steps
        run.update(last)
        history.append((spent, run.value))
        so_far = dataclasses.replace(last, value=run.value, kkt_residual=run.kkt)
        if callback is not None and ask_to_stop(callback, so_far):
            reason, success = "The callback asked to stop.", False
            break
        reason, success = run.find_end(last)
        if not reason and (spent >= limit or steps == max_steps):
            what = f"{limit} evaluations" if spent >= limit else f"{max_steps} steps"
            reason = f"The limit of {what} was reached."
        reason = reason or run.tighten()
        if reason:
            break
    return dataclasses.replace(
        so_far,
        reason=reason,
        success=success,
        steps=steps,
        evaluations=spent,
        seconds=time.perf_counter() - began,
        history=tuple(history),
        multipliers=tuple(run.multipliers),
        # The Jacobian of the last run has rows of penalties.
        problem=last._require_problem()._replace(fun=fun, J=None, constraints=run.select_active()),
    )


class _AugmentedLagrangian:
    """The augmented Lagrangian of a function with constraints, whose multipliers and penalty change from run to run.

    Attributes:
        mu: The factor of the penalty.
        inner_tol: The tolerance of the next run.
        value: The function at the end of the last run.
        kkt: The residual there of the conditions of Karush, Kuhn and Tucker.

    Args:
        fun: The function.
        constraints: The constraints.
        point: The starting point.
        tol: The residual at the end.
    """

    def __init__(
        self, fun: Callable[[Any], Any], constraints: Sequence[Constraint], point: StartPoint, tol: float
    ) -> None:
        self.fun, self.constraints, self.tol = fun, constraints, tol
        with torch.no_grad():
            self.seen = [one.values(point.result(point.leaves)) for one in constraints]
        self.multipliers = [torch.zeros_like(values) for values in self.seen]
        self.mu, self.inner_tol, self.least_violation = 10.0, 1e-2, math.inf
        self.value = self.violation = self.kkt = math.inf

    def penalise(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return vectors whose halved squared norms are the terms of the augmented Lagrangian, up to a constant."""
        out = []
        for one, c, multiplier in zip(self.constraints, values, self.multipliers, strict=True):
            shifted = c - multiplier / self.mu if one.inequality else c + multiplier / self.mu
            out.append(math.sqrt(self.mu) * (shifted.clamp(max=0) if one.inequality else shifted))
        return out

    def evaluate(self, p: Any) -> Any:
        """Return the augmented Lagrangian at a point, as residuals if the function returns residuals."""
        data, more = loss_of(self.fun(p), True), self.penalise([one.values(p) for one in self.constraints])
        if data.dim() == 1 and data.numel() > 1:
            return torch.cat([data, *more])
        return loss_of(data, False) + sum(value_of(one) for one in more)

    def update(self, last: Result) -> None:
        """Measure the conditions at the end of a run, and replace the multipliers by the next ones."""
        from ..m import AugmentedLagrangian  # imported here because other methods do not need it

        with torch.no_grad():
            self.seen = [one.values(last.x).detach() for one in self.constraints]
            self.value = last.value - sum(float(value_of(one)) for one in self.penalise(self.seen))
        self.violation = slack = 0.0
        for i, (c, one) in enumerate(zip(self.seen, self.constraints, strict=True)):
            self.violation = max(self.violation, AugmentedLagrangian.violation(c, one.inequality))
            multiplier = AugmentedLagrangian.next_multiplier(c, self.multipliers[i], self.mu, one.inequality)
            self.multipliers[i] = multiplier
            if one.inequality and c.numel():
                slack = max(slack, float(torch.minimum(c.abs(), multiplier).max()))
        # The gradient of the Lagrangian with these multipliers is that of the augmented one with the last.
        self.kkt = max(self.violation, slack, last.gradient_norm or 0.0)

    def find_end(self, last: Result) -> tuple[str, bool]:
        """Return why the last run was the last one, or "", and whether the conditions hold."""
        if not math.isfinite(last.value) or ("unbounded" in last.reason and self.mu > 1e8):
            return last.reason, False
        if self.kkt <= self.tol and _has_converged(last):
            return f"The conditions of Karush, Kuhn and Tucker hold to {self.kkt:.2g}, at most {self.tol:.2g}.", True
        return "", False

    def tighten(self) -> str:
        """Choose the penalty and tolerance of the next run; return "", or why there is none."""
        if self.violation > 0.25 * self.least_violation:
            if self.mu >= 1e10:
                return f"The constraints can not be met: the least violation found is {self.violation:.2g}."
            self.mu *= 10
        self.least_violation = min(self.least_violation, self.violation)
        self.inner_tol = max(0.1 * self.inner_tol, 0.5 * self.tol)
        return ""

    def select_active(self) -> list[Callable[[Any], Any]]:
        """Return the functions that are zero at the end of the last run."""
        active = [multiplier > c for multiplier, c in zip(self.multipliers, self.seen, strict=True)]
        return select_active(self.constraints, active)


def _has_converged(result: Result) -> bool:
    """Whether a run ended with a known gradient; without one, the success reported by the method decides."""
    return result.gradient_norm is not None or result.success
