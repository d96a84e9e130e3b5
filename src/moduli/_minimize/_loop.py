"""The loop around a chain of links, for one run or for many starts, which are treated like members of a population."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..m import LineSearchBase
from ..optim import Closure, ClosureError, Module, Need, Objective, step
from ._methods import CHAINS, IN_BOX
from ._point import data_of, from_vector
from ._quasi_newton import MATRICES, fits_numpy, run_quasi_newton
from ._runs import Numbers, RunRecord, choose, read
from ._single import SingleRun
from ._variables import Variables


class BatchedRuns(SingleRun):
    """Runs that are evaluated together, with the loss and gradient of each at its last evaluation.

    Args:
        variables: The starts, in the rows of every leaf; bounds by transform of the variables.
        fun: The loss of one point.
        max_evals: The largest number of evaluations of each run.
        method: The name of the method.
    """

    def __init__(self, variables: Variables, fun: Callable[[Any], Any], max_evals: int | None, method: str) -> None:
        leaves = variables.leaves
        counts = {leaf.shape[0] if leaf.dim() else None for leaf in leaves}
        if len(counts) != 1 or None in counts or variables.point.module is not None:
            raise ValueError("minimize: with batched=True every tensor of x0 has the starts along its first axis")
        if any(leaf.is_complex() for leaf in leaves) or len({leaf.dtype for leaf in leaves}) > 1:
            raise TypeError("minimize: with batched=True the tensors of x0 are real, and of one dtype")
        #: Tensors like those of one start.
        self.like = [leaf.detach()[0] for leaf in leaves]
        # The tensor that links move and closures differentiate by.
        self.x = self._join([leaf.detach() for leaf in leaves]).requires_grad_()
        super().__init__(variables, [self.x], fun, max_evals, method, batch=(len(self.x),))
        self._pair = torch.func.vmap(torch.func.grad_and_value(self._one))
        #: The point of each run's last evaluation; runs that have not moved are not evaluated again.
        self.at, self.g = torch.full_like(self.x, math.nan), torch.zeros_like(self.x)
        self.f = torch.full_like(self.x[:, 0], math.inf)
        self.links: list[Module] = []
        self.accepted: tuple[Any, Tensor | None, list[Tensor] | None] | None = None

    def _join(self, leaves: list[Tensor]) -> Tensor:
        return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)

    def _one(self, row: Tensor) -> Tensor:
        data: Tensor | None = data_of(self.point.call(self.fun, from_vector(row, self.like)))
        if data is None or data.dim() != 0:
            raise ValueError("minimize: with batched=True the function takes one point and returns a 0-d tensor")
        return data

    def look(self, z: Tensor) -> None:
        """Evaluate the runs that have moved since their last evaluation; runs beyond their limit get infinity."""
        moved = (z != self.at).any(1)
        spent = moved & torch.as_tensor(self.each >= self.max_evals, device=z.device)
        self.f = torch.where(spent, math.inf, self.f)
        rows = (moved & ~spent).nonzero()[:, 0]
        if not len(rows):
            return
        self.evaluations += 1
        self.each[rows.cpu().numpy()] += 1
        self.at[rows] = math.nan  # stays so if the function raises
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            seen = z if not self.variables.bounded else self._join(self.variables.seen(from_vector(z, self.like)))
        x = seen.detach()
        g, f = (tensor.detach() for tensor in self._pair(x[rows]))
        f = torch.where(f.isnan(), math.inf, f)
        by_x = torch.zeros_like(x).index_copy(0, rows, g)
        followed = self.variables.follow(from_vector(x, self.like), from_vector(by_x, self.like))
        by_z = by_x if seen is z else torch.autograd.grad(seen, z, by_x)[0]
        self.at = self.at.index_copy(0, rows, z.detach()[rows])
        self.f, self.g = self.f.index_copy(0, rows, f), self.g.index_copy(0, rows, by_z[rows])
        self.first = choose(self.first == -math.inf, read(self.f), self.first)
        judged = torch.full_like(self.f, math.inf).index_copy(0, rows, f)
        self.judge(judged, from_vector(x, self.like), self.largest(followed))

    def evaluate(self) -> Tensor:
        """Return the losses of all runs."""
        return _Losses.apply(self.x, self)  # type: ignore[no-untyped-call, no-any-return]

    def begin(self, links: list[Module]) -> None:
        """Take the links of the runs."""
        self.links = links

    def advance(self, closure: Closure) -> str:
        """Make a step of all runs; return the reason why all of them have ended, or ""."""
        before = self.x.detach().clone()
        out = step(self._make_objective(closure), self.links)
        out.update_parameters()
        with torch.no_grad():  # runs that are over stay where they are
            self.x.copy_(torch.where(self.spread(self.active, before), self.x, before))
        self.accepted = out.accepted
        self.end(f"The limit of {self.max_evals} evaluations was reached.", False, self.each >= self.max_evals)
        return self.reason if out.should_terminate else ""

    def _make_objective(self, closure: Closure) -> Objective:
        _, losses, grads = self.accepted or (None, None, None)
        objective = Objective([self.x], closure, losses, current_step=self.steps, members=len(self.x))
        objective.grads = grads
        return objective

    def begin_again(self, rows: Numbers) -> None:
        """Reset the links' state of some runs to that of new links at the present point."""
        fresh, chosen = CHAINS[self.method](), torch.as_tensor(rows, device=self.x.device)
        objective = self._make_objective(Closure(self.evaluate, fixed=True))
        step(objective, [link for link in fresh if not isinstance(link, LineSearchBase)])
        for link, new in zip(self.links[-len(fresh) :], fresh, strict=True):
            pairs = [(link.state[self.x], new.state[self.x]), (link.global_state, new.global_state)]
            for state, fresh_state in pairs:
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape[:1] == chosen.shape:
                        value[chosen] = fresh_state[key][chosen] if key in fresh_state else 0


class _Losses(torch.autograd.Function):
    """The losses of all runs, whose gradients were computed with them."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, runs: BatchedRuns) -> Tensor:
        runs.look(z.detach())
        ctx.save_for_backward(runs.g)
        return runs.f.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        (g,) = ctx.saved_tensors
        return g * given[:, None], None


class GradientWatch(Module):
    """Checks the gradients before every step, and ends the runs whose gradient vanishes.

    Args:
        run: The runs.
        tol: The largest component of the gradient at the end.
    """

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    members = True

    def __init__(self, run: RunRecord, tol: float) -> None:
        super().__init__()
        self.run, self.tol = run, tol

    def apply(self, objective: Objective) -> Objective:
        """End the chain if all runs have ended."""
        run, variables = self.run, self.run.variables
        loss, grads = objective.get_loss_grads()
        norm = run.largest(grads if variables.transform else variables.follow(objective.params, grads))
        if run.steps == 0:
            run.steepness = choose(np.isfinite(norm), norm, run.steepness)
        run.check_gradient(0.0 if loss is None else read(loss), norm, self.tol)
        if loss is not None and not variables.transform and math.isfinite(norm):
            run.judge(loss, variables.seen(), norm)
        if run.some(run.active):
            run.look_far(lambda points: _evaluate_at(objective, points))
        if run.batch:  # runs that are over have nowhere to go
            objective.grads = [torch.where(run.spread(run.active, grad), grad, 0.0) for grad in grads]
        if run.reason:
            objective.terminate(run.reason)
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
        return objective


def _evaluate_at(objective: Objective, points: list[Tensor]) -> None:
    """Evaluate the closure at other points, and restore the present ones."""
    with objective.moved():
        objective.move_to(points)
        objective.get_loss(backward=False, at_x0=False)


@np.errstate(over="ignore")  # a run that ends for it says so
def run_chain(run: SingleRun, links: list[Module], *, tol: float, steps: int | None, after: Callable[[], bool]) -> None:
    """Make steps of a chain until the run ends.

    Args:
        run: The record of the run, or of many.
        links: The chain.
        tol: The largest component of the gradient at the end.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: Where an evaluation ended it.
    """
    run.begin(links if run.values_only else [GradientWatch(run, tol), *links])
    closure = Closure(run.evaluate, fixed=True)
    try:
        while run.some(run.active):
            before, lowest = [leaf.detach().clone() for leaf in run.leaves], run.lowest
            if reason := run.advance(closure):
                run.end(reason, True)
            elif not run.count_step(after, steps):
                again = run.check_progress(run.find_still(before), lowest)
                if run.some(again):
                    run.begin_again(again)
    except ClosureError as error:
        if "does not depend" not in str(error) and "without a graph" not in str(error):
            raise
        fact = "The function does not depend on x in a way that can be differentiated"
        run.end(f"{fact}; method='nelder-mead' looks at values only.", False)


def run_links(run: SingleRun, method: Any, *, tol: float, steps: int | None, after: Callable[[], bool]) -> None:
    """Run the user's links, or those of a method by name; quasi-Newton methods over small vectors in NumPy.

    Args:
        run: The record of the run, with the name of the method.
        method: A link or a list of them, or the name of the method.
        tol: The largest component of the gradient at the end.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: Where an evaluation ended it.
    """
    variables = run.variables
    projects = variables.bounded and not variables.transform
    if run.method in MATRICES and not run.batch and not projects and fits_numpy(run.leaves):
        run_quasi_newton(run, tol=tol, steps=steps, after=after)
        return
    if isinstance(method, str):
        links = IN_BOX[run.method](variables) if projects else CHAINS[run.method]()
    else:
        links = [method] if isinstance(method, Module) else list(method)
        run.residuals = any(Need.RESIDUALS in link.all_needs() for link in links)
    run_chain(run, links, tol=tol, steps=steps, after=after)
