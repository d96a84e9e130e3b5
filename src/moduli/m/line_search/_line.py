"""The objective along a line: what every line search evaluates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from .._flat import flat, masked, unflat

__all__ = ["Line"]

_SMALL = 20_000


class Line:
    """phi(a) = f(x - a u) and its slope, with every trial remembered, so that the accepted one can be handed on.

    Args:
        objective: The objective, with its parameters at x.
        update: u, one tensor per parameter.
    """

    def __init__(self, objective: Objective, update: list[Tensor]) -> None:
        self.objective = objective
        self.params = params = objective.params
        objective._remember_start()
        self.held = [param.grad for param in params]
        self.versions = tuple(param._version for param in params)
        # One vector: x, u and all trials; for small ones NumPy's dispatch costs less than torch's.
        x, u = flat(params), flat(masked(update, objective.present))
        same = x.dtype is u.dtype and all(param.dtype is x.dtype for param in params)
        self.numpy = same and x.device.type == "cpu" and x.numel() <= _SMALL
        self.exact = same
        self.x: Any = x.numpy().copy() if self.numpy else x.clone()
        self.u: Any = u.numpy() if self.numpy else u.to(x.dtype)
        self.start = None if same else [param.detach().clone() for param in params]
        self.trials = 0
        self.points: dict[float, tuple[float, Any, Any, Tensor, list[Tensor] | None]] = {}
        self.lowest: tuple[float, float] | None = None
        # Where the closure stays the same, a gradient at a trial point is the next step's, if the point is accepted.
        self.carries = objective.evaluator is not None and objective.evaluator.fixed
        # Links that differentiate twice evaluate the next point again, so for them a value alone is enough.
        self.eager = self.carries and not any(need.graph for need in objective.needs)

    def pieces(self, vector: Any) -> list[Tensor]:
        """A vector as tensors like the parameters."""
        return unflat(torch.from_numpy(vector) if self.numpy else vector, self.params)

    def along(self, tensors: list[Tensor]) -> float:
        """The inner product of a gradient with the update."""
        vector = flat(tensors)
        return float(vector.numpy() @ self.u) if self.numpy else torch.dot(vector, self.u.to(vector.dtype)).item()

    def _place(self, a: float) -> tuple[Any, Any]:
        scaled = self.u * a
        if self.start is None:
            point: Any = self.x - scaled
            for param, value in zip(self.params, self.pieces(point), strict=True):
                param.copy_(value)
        else:
            # Parameters of several precisions are rounded as the optimizer will round them.
            point = [x - u for x, u in zip(self.start, self.pieces(scaled), strict=True)]
            for param, value in zip(self.params, point, strict=True):
                param.copy_(value)
        return scaled, point

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
        """The objective with the update that leads to x - a u (to x itself for None); parameters go back to x."""
        objective = self.objective
        for param, value in zip(self.params, self.pieces(self.x) if self.start is None else self.start, strict=True):
            param.copy_(value)
        for param, grad in zip(self.params, self.held, strict=True):
            param.grad = grad
        if objective._graph is not None:
            # The parameters hold the same numbers as before, so the graph that was recorded there is still right.
            torch._C._autograd._unsafe_set_version_counter(tuple(self.params), self.versions)
        if a is None or a == 0.0:
            objective.updates = [torch.zeros_like(param) for param in self.params]
            return objective
        if a not in self.points:
            objective.updates = self.pieces(self.u * a)
            return objective
        _, scaled, point, loss, grads = self.points[a]
        objective.updates = self.pieces(scaled)
        if grads is not None and self.carries:
            objective.accepted = (self.pieces(point) if self.start is None else point, loss, grads)
        return objective
