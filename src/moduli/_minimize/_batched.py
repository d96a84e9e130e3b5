"""Many starts at once: the links of a method as they are, over the rows of a matrix like over a population's members."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..m import LineSearchBase
from ..optim import Closure, Module, Objective, step
from ._methods import CHAINS
from ._point import data_of
from ._runs import RunRecord, read
from ._variables import Variables

BATCHED = ("bfgs", "lbfgs", "cg", "gd", "adam")
"""The methods whose links take all members of a population at once."""


class BatchedRuns(RunRecord):
    """Runs that are evaluated together, with what was found where each was evaluated last.

    Args:
        variables: The starts, in the rows of every leaf; bounds by transform of the variables.
        fun: The loss of one point.
        max_evals: How often each run may evaluate.
        method: The name of the method.
    """

    def __init__(self, variables: Variables, fun: Callable[[Any], Any], max_evals: int | None, method: str) -> None:
        point = variables.point
        counts = {leaf.shape[0] if leaf.dim() else None for leaf in point.leaves}
        if len(counts) != 1 or None in counts or point.module is not None:
            raise ValueError("minimize: with batched=True every tensor of x0 has the starts along its first axis")
        if any(leaf.is_complex() for leaf in point.leaves) or len({leaf.dtype for leaf in point.leaves}) > 1:
            raise TypeError("minimize: with batched=True the tensors of x0 are real, and of one dtype")
        count = point.leaves[0].shape[0]
        self.shapes = [leaf.shape[1:] for leaf in point.leaves]
        self.x = self._join([leaf.detach() for leaf in point.leaves])
        limit = max(10_000, 200 * self.x.shape[1]) if max_evals is None else max_evals
        super().__init__(variables, fun, limit, method, False, (count,))
        self._pair = torch.func.vmap(torch.func.grad_and_value(self._one))
        self._mark, self._way = [self.x.clone()], [self.x]
        #: Where each run was evaluated last; runs that have not moved are not evaluated again.
        self.at, self.g = torch.full_like(self.x, math.nan), torch.zeros_like(self.x)
        self.f = torch.full_like(self.x[:, 0], math.inf)
        self.look(self.x)
        self.first, self.steepness = read(self.f), self.norms
        self.start = [leaf.clone() for leaf in self.best]
        self.x.requires_grad_()  # what links move, and closures differentiate by

    def _join(self, leaves: list[Tensor]) -> Tensor:
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)

    def _part(self, x: Tensor) -> list[Tensor]:
        """Rows as tensors like those of x0."""
        parts = torch.split(x, [shape.numel() for shape in self.shapes], 1)
        return [part.reshape(len(x), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def put(self, numbers: Any) -> Tensor:
        """Numbers of runs where the runs are."""
        return torch.as_tensor(numbers, device=self.x.device)

    def _one(self, row: Tensor) -> Tensor:
        leaves = [leaf[0] for leaf in self._part(row[None])]
        data: Tensor | None = data_of(self.point.call(self.fun, leaves))
        if data is None or data.dim() != 0:
            raise ValueError("minimize: with batched=True the function takes one point and returns a 0-d tensor")
        return data

    def look(self, z: Tensor) -> None:
        """Evaluate those runs that have moved since they were evaluated last; those that may not any more find infinity."""
        moved = (z != self.at).any(1)
        spent = moved & self.put(self.each >= self.max_evals)
        self.f = torch.where(spent, math.inf, self.f)
        rows = (moved & ~spent).nonzero()[:, 0]
        if not len(rows):
            return
        self.evaluations += 1
        self.each[rows.cpu().numpy()] += 1
        self.at[rows] = math.nan  # unless the function fails, that is known in a moment
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            seen = z if not self.variables.bounded else self._join(self.variables.seen(self._part(z)))
        x = seen.detach()
        g, f = (found.detach() for found in self._pair(x[rows]))
        f = torch.where(f.isnan(), math.inf, f)
        by_x = torch.zeros_like(x).index_copy(0, rows, g)
        followed = self.variables.follow(self._part(x), self._part(by_x))
        by_z = by_x if seen is z else torch.autograd.grad(seen, z, by_x)[0]
        self.at = self.at.index_copy(0, rows, z.detach()[rows])
        self.f, self.g = self.f.index_copy(0, rows, f), self.g.index_copy(0, rows, by_z[rows])
        judged = torch.full_like(self.f, math.inf).index_copy(0, rows, f)
        self.judge(judged, self._part(x), self.largest(followed))


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
    f, g = runs.f, runs.g
    runs.check_gradient(f, runs.largest([g]), tol)
    while bool(runs.active.any()):
        before, lowest = runs.x.detach().clone(), runs.lowest
        f, g = _step(runs, links, f, g)
        runs.check_gradient(f, runs.largest([g]), tol)
        runs.count_step(after, max_steps)
        limit = f"The limit of {runs.max_evals} evaluations was reached."
        runs.end(limit, False, runs.each >= runs.max_evals)
        runs.look_far([runs.x], lambda far: runs.look(far[0]))
        stays = (runs.x == before).all(1).cpu().numpy()
        runs.check_progress(stays, lowest, lambda again: _begin_again(runs, links, f, g, runs.put(again)))  # noqa: B023


def _step(runs: BatchedRuns, links: list[Module], f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One step of all runs; the losses and gradients where it leads."""
    held = runs.x.detach().clone()
    out = step(_objective(runs, f, g), links)
    out.update_parameters()
    going = runs.put(runs.active)
    with torch.no_grad():  # runs that are over stay where they are
        runs.x.copy_(torch.where(going[:, None], runs.x, held))
    if out.accepted is not None:
        _, values, (slopes,) = out.accepted
        return torch.where(going, values, f), torch.where(going[:, None], slopes, g)
    runs.look(runs.x.detach())
    return runs.f, runs.g


def _objective(runs: BatchedRuns, f: Tensor, g: Tensor) -> Objective:
    closure = Closure(lambda: _Losses.apply(runs.x, runs), fixed=True)  # type: ignore[no-untyped-call]
    objective = Objective([runs.x], closure, f, current_step=runs.steps, members=len(runs.x))
    # Runs that are over have nowhere to go.
    objective.grads = [torch.where(runs.put(runs.active)[:, None], g, 0.0)]
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
