"""Many starts at once: the links of a method as they are, over the rows of a matrix like over a population's members."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..m import LineSearchBase
from ..optim import Closure, Module, Objective, step
from ._derivatives import FoundProblem
from ._loop import FAR, OUTSIDE, STRIDE, UNBOUNDED, falls_without_limit
from ._methods import CHAINS
from ._point import data_of
from ._result import Result
from ._variables import Variables

BATCHED = ("bfgs", "lbfgs", "cg", "gd", "adam")
"""The methods whose links take all members of a population at once."""


class BatchedRuns:
    """What is known of all runs: the best point of each, where it is now, and whether it goes on.

    Args:
        fun: The loss of one point.
        variables: The starts, in the rows of every leaf; bounds by transform of the variables.
        method: The name of the method.
        max_evals: How often each run may evaluate.
    """

    def __init__(self, fun: Callable[[Any], Any], variables: Variables, method: str, max_evals: int | None) -> None:
        point = variables.point
        counts = {leaf.shape[0] if leaf.dim() else None for leaf in point.leaves}
        if len(counts) != 1 or None in counts or point.module is not None:
            raise ValueError("minimize: with batched=True every tensor of x0 has the starts along its first axis")
        if any(leaf.is_complex() for leaf in point.leaves) or len({leaf.dtype for leaf in point.leaves}) > 1:
            raise TypeError("minimize: with batched=True the tensors of x0 are real, and of one dtype")
        self.fun, self.point, self.variables, self.method = fun, point, variables, method
        self.N = N = point.leaves[0].shape[0]
        self.shapes = [leaf.shape[1:] for leaf in point.leaves]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.began = time.perf_counter()
        self.x = torch.cat([leaf.detach().reshape(N, -1) for leaf in point.leaves], 1)
        self.max_evals = max(10_000, 200 * self.x.shape[1]) if max_evals is None else max_evals
        self.evaluations = self.steps = 0
        self.each = torch.zeros(N, dtype=torch.long)
        self.best, self.values = self.x.clone(), torch.full_like(self.x[:, 0], math.inf)
        self.active = torch.ones(N, dtype=torch.bool)
        self.good = torch.zeros(N, dtype=torch.bool)
        self.best_norms = torch.full_like(self.values, math.inf)
        self.reasons = ["Still running."] * N
        self.reason = ""
        self.history: list[tuple[int, Tensor]] = []
        self._pair = torch.func.vmap(torch.func.grad_and_value(self._one))
        #: Where each run was evaluated last, and what was found there; runs that have not moved are not evaluated again.
        self.at, self.f, self.g = self.x.clone(), torch.full_like(self.values, math.inf), torch.zeros_like(self.x)
        # Until they are known, nothing falls.
        self.first, self.steepness = torch.full_like(self.values, -math.inf), torch.zeros_like(self.values)
        self.start, self.size = self.x.clone(), self.x.abs().amax(1).clamp(min=1.0)
        self._evaluate(self.x, torch.arange(N))
        self.first, self.start, self.steepness = self.f, self.best.clone(), self.best_norms.clone()
        self.mark, self.way = self.x.clone(), torch.zeros_like(self.x)
        self.next = torch.full_like(self.each, 2 * STRIDE)
        self.x.requires_grad_()  # what links move, and closures differentiate by

    @property
    def value(self) -> float:
        """The lowest loss of all."""
        return float(self.values.min())

    def leaves(self, x: Tensor) -> list[Tensor]:
        """Rows as tensors like those of x0."""
        parts = torch.split(x, self.sizes, 1)
        return [part.reshape(len(x), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _one(self, row: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(torch.split(row, self.sizes), self.shapes, strict=True)]
        data: Tensor | None = data_of(self.point.call(self.fun, parts))
        if data is None or data.dim() != 0:
            raise ValueError("minimize: with batched=True the function takes one point and returns a 0-d tensor")
        return data

    def transform_rows(self, z: Tensor, rows: Tensor) -> Tensor:
        """What the function sees of the variables of these runs."""
        if not self.variables.bounded:
            return z
        seen = self.variables.seen(self.leaves(z), rows)
        return torch.cat([leaf.reshape(len(z), -1) for leaf in seen], 1)

    def losses(self, z: Tensor) -> Tensor:
        """The losses of all runs at the rows of z, differentiable once; a run that may not evaluate any more finds infinity."""
        losses: Tensor = _Losses.apply(z, self)  # type: ignore[no-untyped-call]
        return losses

    def look(self, z: Tensor) -> None:
        """Evaluate those runs that have moved since they were evaluated last."""
        moved = (z != self.at).any(1)
        spent = moved & (self.each >= self.max_evals)
        rows = (moved & ~spent).nonzero()[:, 0]
        self.f = torch.where(spent, math.inf, self.f)
        if len(rows):
            self._evaluate(z[rows], rows)

    def _evaluate(self, z: Tensor, rows: Tensor) -> None:
        """Losses and gradients of these runs at z, in one call; the best points are remembered."""
        self.evaluations += 1
        self.each[rows] += 1
        self.at[rows] = z
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            seen = self.transform_rows(z, rows)
        x = seen.detach()
        g, f = self._pair(x)
        followed = self.variables.follow(self.leaves(x), self.leaves(g), rows)
        norms = torch.cat([leaf.reshape(len(x), -1) for leaf in followed], 1).abs().amax(1)
        if seen is not z:
            (g,) = torch.autograd.grad(seen, z, g)
        f, g = f.detach(), g.detach()
        f = torch.where(f.isnan(), math.inf, f)
        # Among values that are equal to rounding the flatter point is the better one.
        best = self.values[rows]
        noise = 32 * torch.finfo(f.dtype).eps * torch.maximum(f.abs(), best.abs()).nan_to_num(posinf=0.0)
        lower = (f < best - noise) | ((f <= best + noise) & (norms <= self.best_norms[rows])) & f.isfinite()
        taken = rows[lower]
        self.values[taken], self.best[taken], self.best_norms[taken] = f[lower], x[lower], norms[lower]
        self.f, self.g = self.f.index_copy(0, rows, f), self.g.index_copy(0, rows, g)
        far = (x - self.start[rows]).abs().amax(1)
        falls = falls_without_limit(self.first[rows], f, self.steepness[rows], far, self.size[rows])
        if bool(falls.any()):
            self.end(torch.zeros_like(self.active).index_put((rows,), falls), False, UNBOUNDED)

    def end(self, rows: Tensor, good: Tensor | bool, reason: str) -> None:
        """These runs are over."""
        for row in (rows & self.active).nonzero()[:, 0].tolist():
            self.reasons[row] = reason
        self.active[rows] = False
        self.good[rows] = good

    def look_far(self) -> None:
        """One value of each run far along a way that goes on as it went; where it falls that far, the run is over."""
        if self.steps % STRIDE or self.variables.bounded:
            return
        here, before = self.x.detach().clone(), self.way
        self.way, self.mark = here - self.mark, here
        length = self.way.abs().amax(1)
        same = (length > 0) & ((self.way - before).abs().amax(1) <= 1e-3 * length)
        rows = (self.active & same & (self.next <= self.steps) & (self.each < self.max_evals)).nonzero()[:, 0]
        if len(rows):
            self.next[rows] = 2 * self.steps
            known = [kept.clone() for kept in (self.values, self.best, self.best_norms)]
            try:
                self._evaluate(here[rows] + (2 * FAR * self.size / length)[rows, None] * self.way[rows], rows)
            except OUTSIDE:
                self.at[rows] = math.nan  # nothing is known of this point
            # Only a run that ends there returns a point that far away.
            going = self.active
            for kept, before in zip((self.values, self.best, self.best_norms), known, strict=True):
                kept[going] = before[going]

    def stop(self, reason: str) -> None:
        """All runs are over, for this reason."""
        self.reason = reason
        self.reasons = [
            reason if going else said for said, going in zip(self.reasons, self.active.tolist(), strict=True)
        ]

    def result(self) -> Result:
        """All runs so far."""
        seconds = time.perf_counter() - self.began
        rows = self.leaves(self.best)
        starts = []
        for i in range(self.N):
            point = self.point.row(i)
            starts.append(
                Result(
                    point.result([leaf[i] for leaf in rows]),
                    float(self.values[i]),
                    self.reasons[i],
                    bool(self.good[i]),
                    self.steps,
                    int(self.each[i]),
                    float(self.best_norms[i]),
                    seconds,
                    tuple((count, float(values[i])) for count, values in self.history),
                    self.method,
                    problem=FoundProblem(self.fun, point, [None] * len(point.leaves)),
                )
            )
        return Result(
            self.point.result(rows),
            self.values.clone(),
            self.reason or "Still running.",
            bool(self.good.all()),
            self.steps,
            self.evaluations,
            self.best_norms.clone(),
            seconds,
            tuple(self.history),
            self.method,
            starts=tuple(starts),
        )


class _Losses(torch.autograd.Function):
    """The losses of all runs, whose gradients were found with them."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, runs: BatchedRuns) -> Tensor:
        runs.look(z.detach())
        ctx.save_for_backward(runs.g)
        return runs.f.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        (g,) = ctx.saved_tensors
        return g * given[:, None], None


def minimize_batched(runs: BatchedRuns, *, tol: float, max_steps: int | None, after: Callable[[], bool]) -> None:
    """Step all runs until each has ended, by the rules of a single run.

    Args:
        runs: The runs.
        tol: The largest component of a run's gradient at its end.
        max_steps: The largest number of steps.
        after: Called after each step; a true answer ends all runs.
    """
    links = CHAINS[runs.method]()
    still, quiet = torch.zeros(runs.N, dtype=torch.long), torch.zeros(runs.N, dtype=torch.long)
    patience = 200 if runs.method == "adam" else 30
    f, g = runs.f, runs.g
    while True:
        norms = g.abs().amax(1)
        runs.end(runs.active & ~(f.isfinite() & norms.isfinite()), False, "The loss or its gradient is not finite.")
        runs.end(runs.active & (norms <= tol), True, "The gradient vanishes.")
        if not bool(runs.active.any()):
            runs.reason = "Every start has reached a point where the gradient vanishes, or can get no lower."
            if not bool(runs.good.all()):
                bad = int((~runs.good).sum())
                runs.reason = (
                    f"{bad} of {runs.N} starts ended where the gradient does not vanish; the others converged."
                )
            break
        if max_steps is not None and runs.steps >= max_steps:
            runs.stop(f"The limit of {max_steps} steps was reached.")
            break
        before, values = runs.x.detach().clone(), runs.values.clone()
        f, g = _step(runs, links, f, g)
        runs.steps += 1
        runs.history.append((runs.evaluations, runs.values.clone()))
        if after():
            runs.stop("The callback asked to stop.")
            break
        spent = runs.active & (runs.each >= runs.max_evals)
        if bool(spent.any()):
            runs.end(spent, False, f"The limit of {runs.max_evals} evaluations was reached.")
            if not bool(runs.active.any()):
                runs.reason = f"The limit of {runs.max_evals} evaluations was reached."
                break
        runs.look_far()
        stays = (runs.x == before).all(1)
        still = torch.where(stays, still + 1, 0)
        silent = values.isfinite() & (values - runs.values <= 1e-15 * runs.values.abs())
        quiet = torch.where(silent, quiet + 1, 0)
        again = runs.active & (stays | ((quiet == patience // 2) & (runs.method != "adam")))
        if bool(again.any()):
            _begin_again(runs, links, f, g, again)
        rest = runs.active & ((still > 2) | (quiet >= patience))
        eps = torch.finfo(runs.x.dtype).eps
        small = (norms <= eps**0.5 * 10 * runs.values.abs().clamp(min=1.0))[rest]
        runs.end(rest, small, "No lower point was found: the loss is at the limit of its precision.")


def _step(runs: BatchedRuns, links: list[Module], f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One step of all runs; the losses and gradients where it leads."""
    objective = _objective(runs, f, g)
    held = runs.x.detach().clone()
    out = step(objective, links)
    out.update_parameters()
    with torch.no_grad():  # runs that are over stay where they are
        runs.x.copy_(torch.where(runs.active[:, None], runs.x, held))
    if out.accepted is not None:
        _, values, (slopes,) = out.accepted
        return torch.where(runs.active, values, f), torch.where(runs.active[:, None], slopes, g)
    runs.look(runs.x.detach())
    return runs.f, runs.g


def _objective(runs: BatchedRuns, f: Tensor, g: Tensor) -> Objective:
    closure = Closure(lambda: runs.losses(runs.x), fixed=True)
    objective = Objective([runs.x], closure, f, current_step=runs.steps, members=runs.N)
    # Runs that are over have nowhere to go.
    objective.grads = [torch.where(runs.active[:, None], g, 0.0)]
    return objective


def _begin_again(runs: BatchedRuns, links: list[Module], f: Tensor, g: Tensor, rows: Tensor) -> None:
    """Give these runs what new links know when they have seen the point where the runs are."""
    fresh = CHAINS[runs.method]()
    step(_objective(runs, f, g), [link for link in fresh if not isinstance(link, LineSearchBase)])
    for link, new in zip(links, fresh, strict=True):
        known = [(link.state[runs.x], new.state[runs.x]), (link.global_state, new.global_state)]
        for held, begun in known:
            for key, value in held.items():
                if isinstance(value, Tensor) and value.shape[:1] == rows.shape:
                    value[rows] = begun[key][rows] if key in begun else 0
