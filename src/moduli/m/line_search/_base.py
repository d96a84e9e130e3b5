"""The base of line searches: evaluation along one line, and along the lines of all members.

* The objective along a line, which every line search evaluates.
* A line search for each member of a population: each chooses its lengths, all are evaluated together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import kernels
from ...optim import Across, DeclaredLink, Module, Need, Objective, Ranges, keeps_graph
from ...optim import ranges as check
from .._vectors import array, dot, flat, flat_members, is_plain, mask_absent, tensors_of, unflat

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


def search_members(
    objective: Objective,
    trials: Callable[[float, float, Any, dict[str, Any]], Trials],
    setting: Any,
    remembered: dict[str, Any],
    slopes: bool,
) -> Objective:
    """Run a search by trials for each member of a population; return the objective with each member's step.

    Args:
        objective: The objective of a population.
        trials: The search of one member, as `LineSearchBase.trials`.
        setting: The settings of the link: numbers, or one for each member.
        remembered: The stacked search states of all members.
        slopes: Whether the search needs slopes.
    """
    losses, grads = objective.get_loss_grads()
    if losses is None:
        losses = objective.get_loss(backward=True)
    x, g = flat_members(objective.params), flat_members(mask_absent(grads, objective.present))
    u, slope, can = _turn_downhill(g, _update(objective), bool(setting.get("plus_minus")))
    rows = can.nonzero()[:, 0].tolist()
    # Scalars are passed as lists: an operation for each member would cost as much as a loop over models.
    memories, settings = _part(remembered, len(x)), _part_settings(setting, len(x))
    starts, falls = losses.tolist(), slope.tolist()
    searches = {i: trials(starts[i], falls[i], settings[i], memories[i]) for i in rows}
    reach = [0.0] * len(x)
    for i, search in searches.items():
        reach[i] = next(search)
    fixed = objective.evaluator is not None and objective.evaluator.fixed
    # As for one model: the gradient at an accepted trial point is that of the next step.
    carries = fixed and objective.blocks is None
    gradients = slopes or (carries and not keeps_graph(objective.needs))
    turns: list[tuple[Tensor, Tensor]] = []  # values and gradients of all members, at each round
    seen: list[dict[float, int]] = [{} for _ in reach]  # the round at which a member was at a length
    lengths = [0.0] * len(x)
    with objective.moved():
        while searches:
            # Members that are done stay at their last trial point.
            _place(objective, x - u * _as_column(reach, u))
            f, along, there = _evaluate(objective, u, gradients)
            values = f.tolist()
            if carries and there is not None:
                turns.append((f, there))
            for i, search in list(searches.items()):
                seen[i][reach[i]] = len(turns) - 1
                value = values[i] if math.isfinite(values[i]) or values[i] == -math.inf else math.inf
                try:
                    reach[i] = search.send((value, along[i] if math.isfinite(along[i]) else math.inf))
                except StopIteration as end:
                    del searches[i]
                    lengths[i] = 0.0 if end.value is None else end.value
    _remember(remembered, memories)
    length = _as_column(lengths, u)
    step = torch.where(length > 0, u * length, 0.0)
    objective.updates = unflat(step, objective.params)
    if carries and gradients:
        chosen = [seen[i][a] if a > 0 else -1 for i, a in enumerate(lengths)]
        loss, grad = losses, g
        for turn, (f, there) in enumerate(turns):
            if turn in chosen:
                here = torch.tensor([at == turn for at in chosen], device=u.device)
                loss, grad = torch.where(here, f, loss), torch.where(here[:, None], there, grad)
        point = unflat(x - step, objective.params)
        objective.accepted = (point, loss, unflat(grad, objective.params))
    return objective


def _as_column(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(like)[:, None]


def _update(objective: Objective) -> Tensor:
    return flat_members(mask_absent(objective.peek_updates(), objective.present))


def _place(objective: Objective, rows: Tensor) -> None:
    for param, value in zip(objective.params, unflat(rows, objective.params), strict=True):
        param.copy_(value)


def _evaluate(objective: Objective, u: Tensor, gradients: bool) -> tuple[Tensor, list[float], Tensor | None]:
    """Return losses, slopes along the update, and gradients at the current members."""
    if not gradients:
        f = objective.get_loss(backward=False, at_x0=False)
        return f, [0.0] * len(u), None
    losses, grads = objective.get_loss_grads(at_x0=False)
    if losses is None:
        raise RuntimeError("the closure returned no loss")
    there = flat_members(grads)
    return losses, (-(there * u).sum(1)).tolist(), there


def _turn_downhill(g: Tensor, u: Tensor, plus_minus: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the update (or the gradient with its length, if it points uphill), the slope, and whether there is a direction."""
    slope = -(g * u).sum(1).double()
    if plus_minus:
        up = slope > 0
        u, slope = torch.where(up[:, None], -u, u), torch.where(up, -slope, slope)
    down = (slope < 0) & slope.isfinite()
    size, length = (g * g).sum(1).double(), (u * u).sum(1).double()
    valid = length.isfinite() & (length > 0)
    ratio = torch.where(valid, (length / size).sqrt(), size.rsqrt())
    can = down | ((size > 0) & size.isfinite())
    u = torch.where(down[:, None], u, g * ratio.to(g)[:, None])
    # Without a direction the point must not become NaN.
    return torch.where(can[:, None], u, torch.zeros_like(u)), torch.where(down, slope, -size * ratio), can


def _part_settings(setting: Any, members: int) -> list[dict[str, Any]]:
    """Return the settings of each member."""
    lists = {
        key: value.tolist() if isinstance(value, Tensor) and value.dim() == 1 else [value] * members
        for key, value in setting.items()
    }
    return [{key: values[i] for key, values in lists.items()} for i in range(members)]


def _part(stored: dict[str, Any], members: int) -> list[dict[str, Any]]:
    """Return the search state of each member; zeros stand for none."""
    out: list[dict[str, Any]] = [{} for _ in range(members)]
    for key, rows in stored.items():
        for memory, row in zip(out, rows.tolist() if isinstance(rows, Tensor) else (), strict=False):
            if isinstance(row, list) and any(row):
                memory[key] = tuple(row)
            elif not isinstance(row, list) and row:
                memory[key] = row
    return out


def _remember(states: dict[str, Any], memories: list[dict[str, Any]]) -> None:
    """Store the stacked search states of all members, zeros for none."""
    for key, value in {key: value for memory in memories for key, value in memory.items()}.items():
        nothing = (0.0,) * len(value) if isinstance(value, tuple) else 0.0
        rows = [memory.get(key, nothing) for memory in memories]
        states[key] = torch.tensor(rows, dtype=torch.float64)


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
