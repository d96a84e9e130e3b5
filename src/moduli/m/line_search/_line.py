"""The objective along a line: what every line search evaluates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...optim import Objective, keeps_graph
from .._flat import array, dot, flat, is_plain, mask_absent, tensors_of, unflat


class Line:
    """phi(a) = f(x - a u) and its slope, with every trial remembered, so that the accepted one can be handed on.

    Args:
        objective: The objective, with its parameters at x.
        update: u, one tensor per parameter.
        last: Whether nothing follows: then the parameters may stay at the accepted point.
    """

    def __init__(self, objective: Objective, update: list[Tensor], last: bool = False) -> None:
        self.objective = objective
        self.params = params = objective.params
        self.held = [param.grad for param in params]
        # Where the closure stays the same, a gradient at a trial point is the next step's, if the point is accepted.
        self.carries = objective.evaluator is not None and objective.evaluator.fixed
        # Links that differentiate twice evaluate the next point again, so for them a value alone is enough.
        self.eager = self.carries and not keeps_graph(objective.needs)
        self.last = last and objective._graph is None
        # Parameters go back to where the graph was recorded, which then is still right: autograd need not notice trials.
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
        """Remember x and u as they are calculated with."""
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
        """A vector as tensors like the parameters."""
        return tensors_of(vector, self.params) if self.numpy else unflat(vector, self.params)

    def along(self, tensors: list[Tensor]) -> float:
        """The inner product of a gradient with the update, over all processes where they hold pieces."""
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
        """f(x - a u); infinite where it is not a number."""
        if self.eager:
            return self.slope(a)[0]
        scaled, point = self._place(a)
        loss = self.objective.get_loss(backward=False, at_x0=False)
        f = self._remember(a, loss.item())
        self.points[a] = (f, scaled, point, loss, None)
        return f

    def slope(self, a: float) -> tuple[float, float]:
        """f(x - a u), and its derivative by a."""
        scaled, point = self._place(a)
        loss, grads = self.objective.get_loss_grads(at_x0=False)
        if loss is None:
            raise RuntimeError("the closure returned no loss")
        f = self._remember(a, loss.item())
        self.points[a] = (f, scaled, point, loss, grads)
        slope = -self.along(grads)
        return f, slope if math.isfinite(slope) else math.inf

    def finish(self, a: float | None) -> Objective:
        """The objective with the update that leads to x - a u (to x itself for None); parameters go back to x.

        Where nothing follows they stay at the accepted point instead, as going back and moving again would end there.
        """
        objective = self.objective
        found = None if a is None or a == 0.0 else self.points.get(a)
        if found is not None and self.last and not objective.post_step_hooks:
            if self.at != a:
                self._write(found[2])
            objective.skip_update = True
        else:
            self._write(self.start)
        for param, grad in zip(self.params, self.held, strict=True):
            param.grad = grad
        if a is None or a == 0.0:
            objective.updates = [torch.zeros_like(param) for param in self.params]
        elif found is None:
            objective.updates = self.pieces(self.u * a)
        else:
            _, scaled, point, loss, grads = found
            if not objective.skip_update:
                objective.updates = self.pieces(scaled)
            if grads is not None and self.carries:
                objective.accepted = (point, loss, grads)
        return objective
