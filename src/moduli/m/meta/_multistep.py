"""Links that decide which links step, how often, and what is stored.

* Several inner steps as one.
* Chains that alternate.
* Gradients of several small batches as one.
* Difference-based methods on minibatches.
* A copy of the best point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...optim import Chainable, Module, Need, Objective
from ...optim import ranges as check
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
        """Make the inner steps and return the objective with their displacement."""
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
        """Evaluate the point that the update leads to, and negate the update if the loss is larger there."""
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


class Alternate(Module):
    """Chains in turn, each for its own number of steps, again and again.

    Args:
        *modules: Links, or sequences of links.
        steps: How many steps each chain makes before the next one's turn: a number, or one for each.
        loop: False stays with the last chain for ever.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.Alternate(m.Mul(-1.0), m.Mul(-0.1), steps=[2, 1]))
        >>> for _ in range(4):
        ...     _ = opt.step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([3.1000])
    """

    differentiable = True
    needs = frozenset()
    members = "matrix"

    def __init__(self, *modules: Chainable, steps: int | Sequence[int] = 1, loop: bool = True) -> None:
        super().__init__()
        if not modules:
            raise ValueError(f"{type(self).__name__} needs at least one chain")
        counts = [steps] * len(modules) if isinstance(steps, int) else list(steps)
        wanted = len(modules) if loop or isinstance(steps, int) else len(modules) - 1
        if len(counts) not in (wanted, len(modules)) or any(count < 1 for count in counts):
            raise ValueError(
                f"{type(self).__name__}: steps is {steps!r} for {len(modules)} chains; give one number, at least 1, for each"
            )
        self.steps = counts
        self.loop = loop
        self.set_children_sequence(modules)

    def _turn(self) -> Module:
        now = self.global_state.get("steps", 0)
        chains = self.get_children_sequence()
        if self.loop:
            now %= sum(self.steps)
        for chain, count in zip(chains, self.steps, strict=False):
            if now < count:
                return chain
            now -= count
        return chains[-1]

    def update(self, objective: Objective) -> None:
        """Let the current chain learn."""
        self._turn().update(objective)

    def apply(self, objective: Objective) -> Objective:
        """Transform the update by the current chain, and advance to the next."""
        chain = self._turn()
        self.global_state["steps"] = self.global_state.get("steps", 0) + 1
        return chain.apply(objective)

    def step(self, objective: Objective) -> Objective:
        """Make a step of the current chain."""
        chain = self._turn()
        out = run(objective, [chain])
        self.global_state["steps"] = self.global_state.get("steps", 0) + 1
        return out


class Switch(Alternate):
    """Chains one after the other, each for its number of steps, the last one for ever.

    Args:
        *modules: Links, or sequences of links.
        steps: After how many steps each chain hands over to the next.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.Switch(m.Mul(-1.0), m.Mul(-0.1), steps=1))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([1.2000])
    """

    def __init__(self, *modules: Chainable, steps: int | Sequence[int]) -> None:
        super().__init__(*modules, steps=steps, loop=False)


class GradientAccumulation(Module):
    """Collects the updates of n steps; the links that follow, and the parameters, see only every n-th.

    The links that follow count the steps that they see: a function of the step (`m.LR(lambda step: ...)`) behind it is one of the
    updates of the parameters, as `state["step"]` is. `opt.current_step` and links before it count all steps.

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
        check.at_least_one("GradientAccumulation", "n", n)
        super().__init__({"mean": mean, "stop": stop})
        self.n = n

    def update(self, objective: Objective) -> None:
        """Add the update to the sum."""
        count = self.global_state.get("count", 0) % self.n + 1
        self.global_state["count"] = count
        if count == self.n:
            # A state that was saved by an earlier release has no count of the updates that passed.
            self.global_state["passed"] = self.global_state.get("passed", objective.current_step // self.n) + 1
        sums = self.get_state(objective.params, "sum")
        for total, tensor in zip(sums, objective.peek_updates(), strict=True):
            if count == 1:
                total.copy_(tensor)
            else:
                total.add_(tensor)

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the sum when it is complete; stop the chain otherwise."""
        count = self.global_state["count"]
        setting = self.settings[objective.params[0]]
        complete = count >= self.n
        if not complete and setting["stop"]:
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
            return objective
        if setting["stop"]:
            objective.current_step = self.settings.binding.step = self.global_state["passed"] - 1
        sums = self.get_state(objective.params, "sum")
        objective.updates = [total / count if setting["mean"] else total.clone() for total in sums]
        return objective


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

    points = ("previous",)
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
        """Transform the update by the inner links."""
        return self.children["module"].apply(objective)


class SaveBest(Module):
    """Keeps a copy of the parameters with the lowest loss seen.

    The optimizer's `attrs` get `best_loss`, `best_params` (in the order of the parameters) and `load_best_params`, a
    function that puts them back. A loss belongs to the parameters before the step, and those are kept, wherever the link is
    in the chain. For a population every member has its own best.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.SaveBest(), m.LR(1.5))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> opt.attrs["load_best_params"]()
        >>> w.data
        tensor([1.])
    """

    points = ("best",)
    decides_on_host = True

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    members = True

    def update(self, objective: Objective) -> None:
        """Compare the loss with the lowest so far, for each member of a population by itself."""
        loss = objective.get_loss(backward=True)
        fresh = any("best" not in self.state[param] for param in objective.params)
        best = self.global_state.get("best_loss", torch.full_like(loss, torch.inf))
        better = loss < best
        if fresh or bool(better.any()):
            self.global_state["best_loss"] = torch.where(better, loss, best)
            for param in objective.params:
                here, old = param.detach(), self.state[param].get("best")
                row = better.reshape(-1, *([1] * (param.dim() - 1))) if better.dim() else better
                self.state[param]["best"] = here.clone() if old is None else torch.where(row, here, old)
        best_params = self.get_state(objective.params, "best", init="param")
        objective.attrs["best_loss"] = self.global_state.get("best_loss")
        objective.attrs["best_params"] = best_params
        objective.attrs["load_best_params"] = partial(_load, list(objective.params), best_params)

    def apply(self, objective: Objective) -> Objective:
        """Return the objective unmodified."""
        return objective


def _load(params: list[Tensor], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)
