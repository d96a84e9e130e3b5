"""Difference-based methods on minibatches."""

from __future__ import annotations

import torch

from ...optim import Chainable, Module, Need, Objective


class Online(Module):
    """Lets a method that compares gradients of successive points compare them on the same batch.

    At each step the links inside first learn at the previous parameters with the current batch, then at the current
    ones, so that their gradient difference has no sampling noise between batches.

    Args:
        module: The links; they need separate `update` and `apply`, as all links of the catalogue that learn have.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.Online(m.EMA()), m.LR(0.1))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.num_evaluations
        3

    References:
        N. N. Schraudolph, J. Yu, S. Günter, "A stochastic quasi-Newton method for online convex optimization", AISTATS
        2007.
    """

    needs = frozenset({Need.GRADIENT, Need.CLOSURE})

    def __init__(self, module: Chainable) -> None:
        super().__init__()
        self.set_child("module", module)

    def update(self, objective: Objective) -> None:
        """Learn at the previous point with this batch, then at the current point."""
        child = self.children["module"]
        before = self.get_state(objective.params, "previous", init="param")
        if self.increment_counter("steps", 0) > 0:
            child.reset_for_online()
            there = objective.clone(clone_updates=False)
            there.loss = there.loss_approx = there.grads = None
            there.updates = there._graph = there._residuals = None
            there.accepted = None
            grads = [param.grad for param in objective.params]
            with objective.moved(), torch.no_grad():
                for param, value in zip(objective.params, before, strict=True):
                    param.copy_(value)
                child.update(there)
            for param, grad in zip(objective.params, grads, strict=True):
                param.grad = grad
        child.update(objective)
        for param, value in zip(objective.params, before, strict=True):
            value.copy_(param.detach())

    def apply(self, objective: Objective) -> Objective:
        """What the links inside make of the update."""
        return self.children["module"].apply(objective)
