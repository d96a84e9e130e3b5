"""Minimisation under constraints: an augmented Lagrangian around any method."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._args import bind_args
from ._point import StartPoint, data_of, loss_of, value_of
from ._result import Result, ask_to_stop

_WRITTEN = "{'type': 'eq', 'fun': f} for f(x) = 0, or {'type': 'ineq', 'fun': f} for f(x) >= 0"


class Constraint(NamedTuple):
    """A function of the point that is zero, or at least zero."""

    fun: Callable[[Any], Any]
    inequality: bool

    def values(self, x: Any) -> Tensor:
        """Return the values of the function at a point as a vector."""
        out = self.fun(x)
        data = data_of(out)
        return torch.as_tensor(out if data is None else data).reshape(-1)


def read_constraints(constraints: Any) -> list[Constraint]:
    """Read constraints in SciPy's forms: dictionaries with "type" and "fun", or objects with fun (or A), lb and ub."""
    out: list[Constraint] = []
    for one in [constraints] if isinstance(constraints, Mapping) or hasattr(constraints, "lb") else list(constraints):
        if isinstance(one, Constraint):
            out.append(one)
            continue
        if hasattr(one, "lb"):
            out += _constrain_between(one)
            continue
        if not isinstance(one, Mapping):
            raise TypeError(f"minimize: a constraint is a dictionary, not a {type(one).__name__}: {_WRITTEN}")
        kind, fun = one.get("type"), one.get("fun")
        if kind not in ("eq", "ineq") or not callable(fun):
            raise ValueError(f"minimize: a constraint is {_WRITTEN}, with 'args' where f takes more than x")
        out.append(Constraint(bind_args(fun, one.get("args", ())), kind == "ineq"))
    return out


def _constrain_between(one: Any) -> list[Constraint]:
    """Read one of SciPy's constraint objects: equalities for equal ends, inequalities for finite ends."""
    A = torch.as_tensor(getattr(one, "A", ()))
    own = Constraint(one.fun if hasattr(one, "fun") else lambda x: A.to(data_of(x)) @ data_of(x), False)
    low, high = (torch.as_tensor(end, dtype=torch.float64) for end in (one.lb, one.ub))

    def constrain(sign: int, end: Tensor, chosen: Tensor, inequality: bool) -> Constraint:
        def distance(x: Any) -> Tensor:
            values = own.values(x)
            return sign * (values - end.to(values))[chosen.expand(values.shape)]

        return Constraint(distance, inequality)

    equal = low == high
    below, above = low.isfinite() & ~equal, high.isfinite() & ~equal
    parts = ((1, low, equal, False), (1, low, below, True), (-1, high, above, True))
    return [constrain(*part) for part in parts if bool(part[2].any())]


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
    with torch.no_grad():
        multipliers = [torch.zeros_like(one.values(point.result(point.leaves))) for one in constraints]
    mu, inner_tol, before = 10.0, 1e-2, math.inf
    x, history, spent, steps, success = x0, [], 0, 0, False

    def penalise(values: Sequence[Tensor]) -> list[Tensor]:
        """Return vectors whose halved squared norms are the terms of the augmented Lagrangian, up to a constant."""
        out = []
        for one, c, multiplier in zip(constraints, values, multipliers, strict=True):
            shifted = c - multiplier / mu if one.inequality else c + multiplier / mu
            out.append(math.sqrt(mu) * (shifted.clamp(max=0) if one.inequality else shifted))
        return out

    def evaluate_augmented(p: Any) -> Any:
        data, more = loss_of(fun(p), True), penalise([one.values(p) for one in constraints])
        if data.dim() == 1 and data.numel() > 1:
            return torch.cat([data, *more])
        return loss_of(data, False) + sum(value_of(one) for one in more)

    while True:
        left = None if max_steps is None else max_steps - steps
        last = minimize(evaluate_augmented, x, tol=inner_tol, max_evals=limit - spent, max_steps=left, **options)
        x, spent, steps = last.x, spent + last.evaluations, steps + last.steps
        with torch.no_grad():
            seen = [one.values(x).detach() for one in constraints]
            value = last.value - sum(float(value_of(one)) for one in penalise(seen))
        violation, slack = _update_multipliers(constraints, seen, multipliers, mu)
        # The gradient of the Lagrangian with these multipliers is that of the augmented one with the last.
        kkt = max(violation, slack, last.gradient_norm or 0.0)
        history.append((spent, value))
        if callback is not None and ask_to_stop(callback, dataclasses.replace(last, value=value, kkt_residual=kkt)):
            reason = "The callback asked to stop."
            break
        if not math.isfinite(last.value) or ("unbounded" in last.reason and mu > 1e8):
            reason = last.reason
            break
        success = kkt <= tol and _has_converged(last)
        if success:
            reason = f"The conditions of Karush, Kuhn and Tucker hold to {kkt:.2g}, at most {tol:.2g}."
            break
        if spent >= limit or steps == max_steps:
            what = f"{limit} evaluations" if spent >= limit else f"{max_steps} steps"
            reason = f"The limit of {what} was reached."
            break
        if violation > 0.25 * before:
            if mu >= 1e10:
                reason = f"The constraints can not be met: the least violation found is {violation:.2g}."
                break
            mu *= 10
        before = min(before, violation)
        inner_tol = max(0.1 * inner_tol, 0.5 * tol)
    triples = zip(seen, multipliers, constraints, strict=True)
    active = [one.fun for c, lam, one in triples if not one.inequality or bool((lam > c).all())]
    return dataclasses.replace(
        last,
        value=value,
        reason=reason,
        success=success,
        steps=steps,
        evaluations=spent,
        seconds=time.perf_counter() - began,
        history=tuple(history),
        multipliers=tuple(multipliers),
        kkt_residual=kkt,
        problem=last._require_problem()._replace(fun=fun, constraints=active),
    )


def _update_multipliers(
    constraints: Sequence[Constraint], values: Sequence[Tensor], multipliers: list[Tensor], mu: float
) -> tuple[float, float]:
    """Replace the multipliers by the next ones; return the largest violation, and the largest gap in complementarity."""
    from ..m import AugmentedLagrangian  # imported here because other methods do not need it

    violation = slack = 0.0
    for i, (c, one) in enumerate(zip(values, constraints, strict=True)):
        violation = max(violation, AugmentedLagrangian.violation(c, one.inequality))
        multipliers[i] = AugmentedLagrangian.next_multiplier(c, multipliers[i], mu, one.inequality)
        if one.inequality and c.numel():
            slack = max(slack, float(torch.minimum(c.abs(), multipliers[i]).max()))
    return violation, slack


def _has_converged(result: Result) -> bool:
    """Whether a run ended with a known gradient; without one, the success reported by the method decides."""
    return result.gradient_norm is not None or result.success
