"""Gradients of several small batches as one."""

from __future__ import annotations

import torch

from ...optim import Module, Objective
from .._checks import check_at_least_one


class GradientAccumulation(Module):
    """Collects the updates of n steps; the links that follow, and the parameters, see only every n-th.

    Args:
        n: How many steps make one.
        mean: Their mean, or their sum.
        stop: Whether the chain stops (and nothing moves) in between; False passes the running mean or sum on.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.GradientAccumulation(2), m.LR(1.0))
        >>> for k in (1.0, 3.0):
        ...     _ = opt.step(mo.closure(lambda: (k * w).sum()))
        >>> w.data
        tensor([-2.])
    """

    shared_settings = True
    differentiable = True
    members = "matrix"

    def __init__(self, n: int, *, mean: bool = True, stop: bool = True) -> None:
        check_at_least_one("GradientAccumulation", n=n)
        super().__init__({"mean": mean, "stop": stop})
        self.n = n

    def update(self, objective: Objective) -> None:
        """Add the update to the sum."""
        count = self.global_state.get("count", 0) % self.n + 1
        self.global_state["count"] = count
        sums = self.get_state(objective.params, "sum")
        for total, tensor in zip(sums, objective.peek_updates(), strict=True):
            if count == 1:
                total.copy_(tensor)
            else:
                total.add_(tensor)

    def apply(self, objective: Objective) -> Objective:
        """Pass the sum on when it is complete; stop the chain otherwise."""
        count = self.global_state["count"]
        setting = self.settings[objective.params[0]]
        complete = count >= self.n
        if not complete and setting["stop"]:
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
            return objective
        sums = self.get_state(objective.params, "sum")
        objective.updates = [total / count if setting["mean"] else total.clone() for total in sums]
        return objective
