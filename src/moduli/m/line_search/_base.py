"""The base of line searches, and the objective along a line, which every line search evaluates."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import kernels
from ...optim import Across, DeclaredLink, Module, Need, Objective, Ranges, keeps_graph
from ...optim import ranges as check
from .._vectors import array, dot, flat, is_plain, mask_absent, tensors_of, unflat
from ._members import search_members

Trials = Generator[float, tuple[float, float], float | None]
"""A search that yields lengths and is sent the value and slope there."""


def run_trials(trials: Trials, evaluate: Callable[[float], tuple[float, float]]) -> float | None:
    """Return the result of a search whose trials are evaluated one by one."""
    try:
        a = next(trials)
        while True:
            a = trials.send(evaluate(a))
    except StopIteration as end:
        length: float | None = end.value
        return length


class Line:
    """phi(a) = f(x - a u) and its slope, with every trial stored, so that the accepted one can be reused.

    Args:
        objective: The objective, with its parameters at x.
        update: u, one tensor per parameter.
        last: Whether nothing follows: then the parameters may stay at the accepted point.
    """

    def __init__(self, objective: Objective, update: list[Tensor], last: bool = False) -> None:
        self.objective = objective
        self.params = params = objective.params
        self.held = [param.grad for param in params]
        # With a fixed closure, the gradient at an accepted trial point is that of the next step.
        self.carries = objective.evaluator is not None and objective.evaluator.fixed
        # Links that differentiate twice evaluate the next point again, so they need values only.
        self.eager = self.carries and not keeps_graph(objective.needs)
        self.last = last and objective._graph is None
        # Parameters are restored to the values for which the graph was recorded, so their versions need not change.
        self.unnoticed = objective._graph is not None
        if objective.present is not None:
            update = mask_absent(update, objective.present)
        self.x: Any
        self.u: Any
        self.trials = 0
        self.at: float | None = 0.0
        self.points: dict[float, tuple[float, Any, list[Tensor], Tensor, list[Tensor] | None]] = {}
        self.lowest: tuple[float, float] | None = None
        self.start = [param.detach().clone() for param in params]
        objective._remember_start(self.start)
        self._lay_out(update)

    def _lay_out(self, update: list[Tensor]) -> None:
        """Store x and u in the form used for arithmetic."""
        params = self.params
        # One vector: x, u and all trials; for small ones NumPy's dispatch costs less than torch's.
        self.numpy = is_plain(params) and all(tensor.dtype is params[0].dtype for tensor in update)
        # Parameters of several precisions are rounded as the optimizer will round them.
        self.mixed = False
        if self.numpy:
            self.x, self.u = array(self.start), array(update)
        else:
            u = flat(update)
            self.x = flat(self.start)
            self.u = u.to(self.x.dtype)
            self.mixed = self.x.dtype is not u.dtype or any(param.dtype is not self.x.dtype for param in params)

    def pieces(self, vector: Any) -> list[Tensor]:
        """Return a vector as tensors like the parameters."""
        return tensors_of(vector, self.params) if self.numpy else unflat(vector, self.params)

    def along(self, tensors: list[Tensor]) -> float:
        """Return the inner product of a gradient with the update, over all processes for sharded parameters."""
        if kernels.over_processes() is not None:
            return dot(tensors, self.pieces(self.u))
        if self.numpy:
            return float(array(tensors).dot(self.u))
        vector = flat(tensors)
        return torch.dot(vector, self.u.to(vector.dtype)).item()

    def _place(self, a: float) -> tuple[Any, list[Tensor]]:
        scaled = self.u * a
        if self.mixed:
            point = [x - u for x, u in zip(self.start, self.pieces(scaled), strict=True)]
        else:
            point = self.pieces(self.x - scaled)
        self._write(point)
        self.at = a
        return scaled, point

    def _write(self, values: list[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            (param.data if self.unnoticed else param).copy_(value)

    def _remember(self, a: float, f: float) -> float:
        self.trials += 1
        if not math.isfinite(f):
            return -math.inf if f == -math.inf else math.inf
        if self.lowest is None or f < self.lowest[1]:
            self.lowest = (a, f)
        return f

    def value(self, a: float) -> float:
        """Return f(x - a u); infinity for NaN."""
        if self.eager:
            return self.slope(a)[0]
        scaled, point = self._place(a)
        loss = self.objective.get_loss(backward=False, at_x0=False)
        f = self._remember(a, loss.item())
        self.points[a] = (f, scaled, point, loss, None)
        return f

    def slope(self, a: float) -> tuple[float, float]:
        """Return f(x - a u), and its derivative by a."""
        scaled, point = self._place(a)
        loss, grads = self.objective.get_loss_grads(at_x0=False)
        if loss is None:
            raise RuntimeError("the closure returned no loss")
        f = self._remember(a, loss.item())
        self.points[a] = (f, scaled, point, loss, grads)
        slope = -self.along(grads)
        return f, slope if math.isfinite(slope) else math.inf

    def finish(self, a: float | None) -> Objective:
        """Return the objective with the update that leads to x - a u (to x itself for None), and restore the parameters.

        If no link follows, the parameters stay at the accepted point instead, which gives the same result.
        """
        objective = self.objective
        trial = None if a is None or a == 0.0 else self.points.get(a)
        if trial is not None and self.last and not objective.post_step_hooks:
            if self.at != a:
                self._write(trial[2])
            objective.skip_update = True
        else:
            self._write(self.start)
        for param, grad in zip(self.params, self.held, strict=True):
            param.grad = grad
        if a is None or a == 0.0:
            objective.updates = [torch.zeros_like(param) for param in self.params]
        elif trial is None:
            objective.updates = self.pieces(self.u * a)
        else:
            _, scaled, point, loss, grads = trial
            if not objective.skip_update:
                objective.updates = self.pieces(scaled)
            if grads is not None and self.carries:
                objective.accepted = (point, loss, grads)
        return objective


class LineSearchBase(DeclaredLink):
    r"""A search for a step length along the update: override `search` or `trials`.

    It looks at $\phi(a) = f(x - a u)$ and multiplies the update by the length it finds. Where the update points uphill
    (a quasi-Newton matrix that is not positive definite, rounding), the search goes along the gradient instead, at the
    length of the update. A search that is written as `trials` and says `members = "matrix"` also searches for each member of
    a population, all of whose trials are evaluated together.

    Args:
        defaults: The settings.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> class Halving(m.LineSearchBase):
        ...     def search(self, line, loss, slope, settings):
        ...         a = 1.0
        ...         while line.value(a) >= loss and a > 1e-6:
        ...             a /= 2
        ...         return a
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], Halving()).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})
    across = Across.SUMS
    ranges: ClassVar[Ranges] = {
        check.positive: ("init", "init_value", "a_max", "beta", "nminus"),
        check.fraction: ("beta", "nminus", "c"),
        check.above_one: ("nplus",),
        check.at_least_one: ("maxiter",),
        check.non_negative: ("target_iters",),
        check.one_of("armijo", "decrease", "goldstein"): ("condition",),
    }
    uses_slopes: ClassVar[bool] = False
    """Whether `trials` looks at the slopes that it is sent."""

    def __init__(self, defaults: dict[str, Any] | None = None) -> None:
        Module.__init__(self, defaults)
        for key, value in self.defaults.items():
            self.check_setting(key, value)

    def search(self, line: Line, loss: float, slope: float, settings: Any) -> float | None:
        """The step length, or None where there is none that is better than staying.

        Args:
            line: Evaluates: `line.value(a)`, and `line.slope(a)` for the value and the derivative.
            loss: The value at 0.
            slope: The derivative at 0, negative.
            settings: The settings in force.
        """
        evaluate = line.slope if self.uses_slopes else lambda a: (line.value(a), 0.0)
        return run_trials(self.trials(loss, slope, settings, self.global_state), evaluate)

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        """The search as a generator: yields lengths, is sent the value and slope there, returns the length or None.

        Args:
            loss: The value at 0.
            slope: The derivative at 0, negative.
            settings: The settings in force.
            memory: What is remembered from one search to the next: numbers that are not zero, or tuples of numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither search nor trials")

    def apply(self, objective: Objective) -> Objective:
        """Multiply the update by the length that the search returns; by that of each member for a population."""
        if objective.members is not None:
            setting = self.settings[objective.params[0]]
            return search_members(objective, self.trials, setting, self.global_state, self.uses_slopes)
        loss, grads = objective.get_loss_grads()
        if loss is None:
            loss = objective.get_loss(backward=True)
        settings = self.settings[objective.params[0]]
        last = objective.tail is self
        line = Line(objective, objective.peek_updates(), last)
        slope = -line.along(grads)
        if slope > 0 and settings.get("plus_minus"):
            line.u, slope = -line.u, -slope
        if not slope < 0 or not math.isfinite(slope):
            size = dot(grads, grads)
            if size == 0.0 or not math.isfinite(size):
                return line.finish(None)
            update = objective.peek_updates()
            length = dot(update, update)
            ratio = math.sqrt(length / size) if math.isfinite(length) and length > 0 else 1 / math.sqrt(size)
            line = Line(objective, [grad * ratio for grad in grads], last)
            slope = -size * ratio
        return line.finish(self.search(line, loss.item(), slope, settings))
