"""Runs of sequential quadratic programming on a user's function and constraints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ._constraints import Constraint, select_active
from ._derivatives import VectorFunction
from ._fit import read_side
from ._point import loss_of, to_numpy, to_vector, value_of
from ._result import Result
from ._single import EndOfRun, SingleRun
from ._sqp import Array, ConstrainedProblem, SqpState, minimize_by_sqp

SMALL = 300
"""The number of variables up to which a dense model of the Lagrangian is the default."""


class ConstrainedRun:
    """The functions of a constrained run on NumPy vectors, whose evaluations are counted in the record of the run.

    Args:
        run: The record, with the user's function.
        constraints: The user's constraints.
    """

    def __init__(self, run: SingleRun, constraints: Sequence[Constraint]) -> None:
        self.run, self.constraints = run, constraints
        self.like = to_vector(run.leaves)
        # Equations come first, whatever their order in the arguments.
        self.order = sorted(range(len(constraints)), key=lambda i: constraints[i].inequality)
        self.functions = [VectorFunction(constraints[i].values, run.point) for i in self.order]
        self.sizes: list[int] = []
        self.residuals, self.last = False, math.nan
        self._leaf = self._loss = self.like

    def locate(self, x: Array) -> Tensor:
        """Return a NumPy vector as a tensor like the variables."""
        return torch.from_numpy(x).to(self.like)

    def value(self, x: Array) -> float:
        """Evaluate the function; the graph is kept for the gradient."""
        run = self.run
        run.check_limit()
        with torch.enable_grad():
            self._leaf = self.locate(x).requires_grad_()
            leaves = VectorFunction(run.fun, run.point).point_of(self._leaf)
            data = loss_of(run.point.call(run.fun, leaves), True)
            self.residuals = data.numel() > 1
            self._loss = value_of(data) if self.residuals else loss_of(data, False)
        self.last = float(self._loss.detach())
        return self.last if math.isfinite(self.last) else math.inf

    def gradient(self, x: Array) -> Array:
        """Return the gradient at the point that was evaluated last."""
        if not self._loss.requires_grad:
            return np.zeros(len(x))
        (gradient,) = torch.autograd.grad(self._loss, self._leaf, allow_unused=True, materialize_grads=True)
        return to_numpy(gradient)

    def evaluate_constraints(self, x: Array) -> Array:
        """Return the values of all constraints, equations first."""
        with torch.no_grad():
            parts = [to_numpy(function(self.locate(x))) for function in self.functions]
        self.sizes = [len(part) for part in parts]
        return np.concatenate([*parts, np.zeros(0)])

    def differentiate(self, x: Array) -> Array:
        """Return the Jacobian of the constraints."""
        pairs = zip(self.functions, self.sizes, strict=True)
        rows = [to_numpy(function.jacobian(self.locate(x), size)) for function, size in pairs if size]
        return np.concatenate([*rows, np.zeros((0, len(x)))])

    def curve(self, x: Array) -> Array | None:
        """Return J'J of the residuals, an approximate Hessian of a fit; None if the function returns one value."""
        if not self.residuals:
            return None
        function = VectorFunction(self.run.fun, self.run.point)
        with torch.no_grad():
            count = function(self.locate(x)).numel()
        J = to_numpy(function.jacobian(self.locate(x), count))
        product: Array = J.T @ J
        return product

    def split(self, multipliers: Array) -> tuple[Tensor, ...]:
        """Return the multipliers of each constraint, in the user's order; those of equations have the sign of a penalty."""
        parts = np.split(multipliers, np.cumsum(self.sizes)[:-1]) if self.sizes else []
        out: dict[int, Tensor] = {}
        for i, part in zip(self.order, parts, strict=True):
            out[i] = torch.from_numpy(part if self.constraints[i].inequality else -part).to(self.like)
        return tuple(out[i] for i in range(len(self.constraints)))


def run_sqp(
    run: SingleRun,
    constraints: Sequence[Constraint],
    *,
    tol: float,
    steps: int | None,
    after: Callable[[], bool],
) -> Result:
    """Minimise under constraints, and return the result.

    Args:
        run: The record of the run, within its bounds.
        constraints: The constraints.
        tol: The residual of the conditions of Karush, Kuhn and Tucker at the end.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.
    """
    functions = ConstrainedRun(run, constraints)
    sides = (read_side(run, run.variables.low, -math.inf), read_side(run, run.variables.high, math.inf))
    start = to_numpy(functions.like)
    equalities = int(sum(len(one(functions.like)) for one, c in _pair(functions) if not c.inequality))
    problem = ConstrainedProblem(
        functions.value, functions.gradient, functions.evaluate_constraints, functions.differentiate,
        equalities, *sides, functions.curve,
    )  # fmt: skip
    state: SqpState | None = None
    try:
        state = SqpState(problem, start, tol)
        if not math.isfinite(state.f):
            raise EndOfRun(f"The loss is {functions.last} at the start.")
        _record(run, state)
        for reason, success in minimize_by_sqp(state):
            _record(run, state)
            if reason:
                run.end(reason, success)
            if run.count_step(after, steps):
                break
    except EndOfRun as end:
        run.end(str(end), False)
    result = run.result()
    if state is None:
        return result
    multipliers = functions.split(state.multipliers)
    active = select_active(constraints, [part > 0 for part in multipliers])
    problem_at_end = None if result.problem is None else result.problem._replace(constraints=active)
    return dataclasses.replace(result, multipliers=multipliers, kkt_residual=state.kkt, problem=problem_at_end)


def _pair(functions: ConstrainedRun) -> list[tuple[VectorFunction, Constraint]]:
    """Return the functions of the constraints with the constraints, equations first."""
    return [(one, functions.constraints[i]) for one, i in zip(functions.functions, functions.order, strict=True)]


def _record(run: SingleRun, state: SqpState) -> None:
    """Store the point of the run."""
    with torch.no_grad():
        leaves = VectorFunction(run.fun, run.point).point_of(torch.from_numpy(state.x).to(run.best[0].device))
        run.best = [leaf.detach() for leaf in leaves]
    run.values = run.lowest = np.float64(state.f)
    slope = state.g - state.A.T @ state.multipliers - state.bound_multipliers
    run.norms = np.abs(slope).max(initial=0.0)
