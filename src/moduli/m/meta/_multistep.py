"""Several inner steps as one."""

from __future__ import annotations

import torch

from ...optim import Chainable, Module, Need, Objective
from ...optim import step as run


class Sequential(Module):
    """Inner steps, each by the next chain in turn; the update is how far they moved the parameters.

    Args:
        modules: Chains: inner step i is made by chain i, again from the first when they are through.
        steps: How often to go through all chains.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.Sequential([m.LR(0.25), m.LR(0.25)]))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.2500])
    """

    needs = frozenset({Need.GRADIENT, Need.CLOSURE})

    def __init__(self, modules: list[Chainable], *, steps: int = 1) -> None:
        super().__init__()
        if steps < 1 or not modules:
            raise ValueError(f"{type(self).__name__}: give at least one chain and one step (steps is {steps})")
        self.steps = steps
        self.set_children_sequence(modules)

    def apply(self, objective: Objective) -> Objective:
        """Make the inner steps and emit the displacement."""
        chains = self.get_children_sequence()
        first = True
        with objective.moved() as start:
            for _ in range(self.steps):
                for chain in chains:
                    inner = objective.clone(clone_updates=False)
                    inner.stop = inner.skip_update = False
                    inner.accepted = None
                    if not first:
                        inner.loss = inner.loss_approx = inner.grads = None
                        inner.updates = inner._graph = inner._residuals = None
                    elif objective.updates is not None:
                        inner.updates = [tensor.clone() for tensor in objective.updates]
                    out = run(inner, [chain])
                    out.update_parameters()
                    if first:
                        objective.update_attrs_from_clone_(out)
                        objective.skip_update = False
                    first = False
            moved = [a - param.detach() for a, param in zip(start, objective.params, strict=True)]
        objective.accepted = None
        objective.updates = moved
        return objective


class Multistep(Sequential):
    """Several inner steps of one chain as one step; the update is how far they moved the parameters.

    Args:
        module: The chain.
        steps: How many inner steps.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.Multistep(m.LR(0.25), steps=3)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.1250])
    """

    def __init__(self, module: Chainable, *, steps: int) -> None:
        super().__init__([module], steps=steps)


class NegateOnLossIncrease(Module):
    """Refuses an update that would make the loss larger.

    Args:
        backtrack: False does nothing instead; True goes the other way.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.LR(5.0), m.NegateOnLossIncrease()).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([1.])
    """

    decides_on_host = True

    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})

    def __init__(self, *, backtrack: bool = False) -> None:
        super().__init__({"backtrack": backtrack})

    def apply(self, objective: Objective) -> Objective:
        """Evaluate where the update leads."""
        here = objective.get_loss(backward=True)
        updates = objective.get_updates()
        with objective.moved() as start, torch.no_grad():
            for param, a, u in zip(objective.params, start, updates, strict=True):
                param.copy_(a - u)
            there = objective.get_loss(backward=False, at_x0=False)
        if not bool(there <= here):
            back = self.settings[objective.params[0]]["backtrack"]
            objective.updates = [-u if back else torch.zeros_like(u) for u in updates]
        return objective
