"""The objective along a line: what every line search evaluates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...optim import Objective
from .._flat import dot, masked

__all__ = ["Line"]


class Line:
    """phi(a) = f(x - a u) and its slope, with every trial remembered, so that the accepted one can be handed on."""

    def __init__(self, objective: Objective, update: list[Tensor]) -> None:
        self.objective = objective
        self.params = objective.params
        self.update = [
            u if u.dtype is p.dtype else u.to(p.dtype)
            for u, p in zip(masked(update, objective.present), self.params, strict=True)
        ]
        objective._remember_start()
        self.start = [param.detach().clone() for param in self.params]
        self.held = [param.grad for param in self.params]
        self.trials = 0
        self.points: dict[float, tuple[float, list[Tensor], list[Tensor], Tensor, list[Tensor] | None]] = {}
        self.lowest: tuple[float, float] | None = None
        fixed = objective.evaluator is not None and objective.evaluator.fixed
        # Where the closure stays the same, a gradient at a trial point is the next step's, if the point is accepted.
        self.carries = fixed

    def _place(self, a: float) -> tuple[list[Tensor], list[Tensor]]:
        scaled = torch._foreach_mul(self.update, a)
        point = torch._foreach_sub(self.start, scaled)
        torch._foreach_copy_(self.params, point)
        return list(scaled), list(point)

    def _remember(self, a: float, f: float) -> None:
        self.trials += 1
        if math.isfinite(f) and (self.lowest is None or f < self.lowest[1]):
            self.lowest = (a, f)

    def value(self, a: float) -> float:
        """f(x - a u); infinite where it is not a number."""
        if self.carries:
            return self.slope(a)[0]
        scaled, point = self._place(a)
        loss = self.objective.get_loss(backward=False, at_x0=False)
        f = float(loss)
        f = f if math.isfinite(f) else (-math.inf if f == -math.inf else math.inf)
        self.points[a] = (f, scaled, point, loss, None)
        self._remember(a, f)
        return f

    def slope(self, a: float) -> tuple[float, float]:
        """f(x - a u), and its derivative by a."""
        scaled, point = self._place(a)
        loss, grads = self.objective.get_loss_grads(at_x0=False)
        if loss is None:
            raise RuntimeError("the closure returned no loss")
        f = loss.item()
        f = f if math.isfinite(f) else (-math.inf if f == -math.inf else math.inf)
        self.points[a] = (f, scaled, point, loss, grads)
        self._remember(a, f)
        slope = -dot(grads, self.update)
        return f, slope if math.isfinite(slope) else math.inf

    def finish(self, a: float | None) -> Objective:
        """The objective with the update that leads to x - a u (to x itself for None); parameters go back to x."""
        objective = self.objective
        torch._foreach_copy_(self.params, self.start)
        for param, grad in zip(self.params, self.held, strict=True):
            param.grad = grad
        if a is None or a == 0.0:
            objective.updates = [torch.zeros_like(u) for u in self.update]
            return objective
        if a not in self.points:
            objective.updates = list(torch._foreach_mul(self.update, a))
            return objective
        _, scaled, point, loss, grads = self.points[a]
        objective.updates = scaled
        if grads is not None and self.carries:
            objective.accepted = (point, loss, [grad.clone() for grad in grads])
        return objective
