"""Minimisation under constraints: an augmented Lagrangian around any method."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..m import AugmentedLagrangian
from ._loop import loss_of, value_of
from ._point import StartPoint, data_of
from ._result import FoundProblem, Result, ask_to_stop


class Constraint(NamedTuple):
    """A function of the point that is zero, or at least zero."""

    fun: Callable[[Any], Any]
    inequality: bool

    def values(self, x: Any) -> Tensor:
        """The function as a vector."""
        found = self.fun(x)
        data = data_of(found)
        return torch.as_tensor(found if data is None else data).reshape(-1)


def read_constraints(given: Any) -> list[Constraint]:
    """Constraints as SciPy has them: dictionaries with "type" and "fun", or objects with fun (or A), lb and ub."""
    out: list[Constraint] = []
    for one in [given] if isinstance(given, Mapping) or hasattr(given, "lb") else list(given):
        if hasattr(one, "lb"):
            out += _constrain_between(one)
            continue
        if not isinstance(one, Mapping):
            raise TypeError(
                f"minimize: a constraint is a dictionary with 'type' and 'fun', not a {type(one).__name__}; write a linear "
                "one as {'type': 'eq', 'fun': lambda x: A @ x - b}"
            )
        kind, fun = one.get("type"), one.get("fun")
        if kind not in ("eq", "ineq") or not callable(fun) or one.get("args"):
            raise ValueError(
                "minimize: a constraint is {'type': 'eq', 'fun': f} for f(x) = 0, or {'type': 'ineq', 'fun': f} for f(x) >= 0; "
                "its args are not passed on, close over them in f"
            )
        out.append(Constraint(fun, kind == "ineq"))
    return out


def _constrain_between(one: Any) -> list[Constraint]:
    """SciPy's objects: equalities where both ends are the same, inequalities where an end is finite."""
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
    """Runs of `minimize` on the augmented Lagrangian, each from where the last ended, until the KKT conditions hold."""
    began = time.perf_counter()
    point = StartPoint(x0)
    tol = point.choose_tol(tol, 1e-6, 1e-3)
    spent, limit = 1, max_evals or max(20_000, 400 * point.size)
    # The value at the start, where there is no budget for more.
    data = loss_of(point.call(fun, point.leaves), True)
    residuals = data.dim() == 1 and data.numel() > 1
    with torch.no_grad():
        seen = [one.values(point.result(point.leaves)).detach() for one in constraints]
    multipliers = [torch.zeros_like(c) for c in seen]
    mu, inner_tol, before = 10.0, 1e-2, math.inf
    x, history, steps, success, kkt = x0, [], 0, False, math.inf
    reason = f"The limit of {limit} evaluations was reached."
    start, problem = point.result(point.leaves), FoundProblem(fun, point, [None] * len(point.leaves))
    last = Result(start, math.inf, reason, False, 0, 1, None, 0.0, (), "auto", problem=problem)

    def evaluate_augmented(p: Any) -> Any:
        total = loss_of(fun(p), residuals)
        values = [one.values(p) for one in constraints]
        if residuals:
            # Half the square of these is the augmented Lagrangian, up to a constant.
            parts = [total]
            for one, c, multiplier in zip(constraints, values, multipliers, strict=True):
                shifted = c - multiplier / mu if one.inequality else c + multiplier / mu
                parts.append(math.sqrt(mu) * (shifted.clamp(max=0) if one.inequality else shifted))
            return torch.cat(parts)
        for one, c, multiplier in zip(constraints, values, multipliers, strict=True):
            total = total + AugmentedLagrangian.term(c, multiplier, mu, one.inequality)
        return total

    while spent < limit - 1:
        left = None if max_steps is None else max_steps - steps
        if left == 0:
            reason = f"The limit of {max_steps} steps was reached."
            break
        last = minimize(evaluate_augmented, x, tol=inner_tol, max_evals=limit - spent - 1, max_steps=left, **options)
        x, spent, steps = last.x, spent + last.evaluations, steps + last.steps
        with torch.no_grad():
            seen = [one.values(x).detach() for one in constraints]
        violation = slack = 0.0
        for i, (c, one) in enumerate(zip(seen, constraints, strict=True)):
            violation = max(violation, AugmentedLagrangian.violation(c, one.inequality))
            multipliers[i] = AugmentedLagrangian.next_multiplier(c, multipliers[i], mu, one.inequality)
            if one.inequality and c.numel():
                slack = max(slack, float(torch.minimum(c.abs(), multipliers[i]).max()))
        # The gradient of the Lagrangian with these multipliers is that of the augmented one with the last.
        kkt = max(violation, slack, last.gradient_norm or 0.0)
        history.append((spent, last.value))
        if callback is not None and ask_to_stop(callback, dataclasses.replace(last, kkt_residual=kkt)):
            reason = "The callback asked to stop."
            break
        if not math.isfinite(last.value):
            reason = last.reason
            break
        # Without a gradient the method's own word has to do.
        if kkt <= tol and (last.gradient_norm is not None or last.success):
            reason, success = f"The conditions of Karush, Kuhn and Tucker hold to {kkt:.2g}, at most {tol:.2g}.", True
            break
        if "unbounded" in last.reason and mu > 1e8:
            reason = last.reason
            break
        if violation > 0.25 * before:
            if mu >= 1e10:
                reason = f"The constraints can not be met: the least violation found is {violation:.2g}."
                break
            mu *= 10
        before = min(before, violation)
        inner_tol = max(0.1 * inner_tol, 0.5 * tol)
    if history:
        spent += 1
        with torch.no_grad():
            data = loss_of(fun(x), residuals)
    found = zip(seen, multipliers, constraints, strict=True)
    active = [one.fun for c, lam, one in found if not one.inequality or bool((lam > c).all())]
    return dataclasses.replace(
        last,
        value=float(value_of(data.detach() if residuals else data.detach().reshape(()))),
        reason=reason,
        success=success,
        steps=steps,
        evaluations=spent,
        seconds=time.perf_counter() - began,
        history=tuple(history),
        multipliers=tuple(multipliers),
        kkt_residual=kkt,
        problem=FoundProblem(fun, point, last._require_problem().fixed, active),
    )
