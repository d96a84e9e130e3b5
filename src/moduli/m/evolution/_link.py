"""What links around a search have in common: it is asked for models, they are evaluated, and it is told the losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._searches._base import Search
from ..._searches._distribution import GradientSearch
from ...optim import Module, Need, Objective, as_real
from .._flat import flat, unflat
from .._landing import land
from ._models import Models

__all__ = ["SearchLink"]

BLOCK = 1 << 22  # numbers that the models of one block have together


class SearchLink(Module):
    """A link around a search over the parameters of one model as one vector.

    Each step asks for a generation around the parameters, evaluates it (all at once where the closure is a function of the
    model, `mo.closure(lambda net: ...)`, and the optimizer was given the module; else one by one), and emits the way from
    the parameters to the new centre of the search; where the search estimates a gradient it emits that, for the next link.

    Args:
        seed: Decides every random number.
        **options: What the search is made with.
    """

    needs = frozenset({Need.CLOSURE})
    vector_state = True

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__()
        self.seed = seed
        self.options = options
        self._made: Search | None = None
        self._found: list[Tensor] = []
        self._models = Models()
        self.make(torch.zeros(2), seed, self._given())  # options that can't work are refused here

    def _given(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if value is not None}

    @abstractmethod
    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Search:
        """The search, around these parameters."""

    def __repr__(self) -> str:
        given = "".join(f", {key}={value!r}" for key, value in self.options.items() if value is not None)
        return f"{type(self).__name__}(seed={self.seed}{given})"

    def search(self, x0: Tensor) -> Search:
        """The search as it stands; made, or made again from what was saved, when it is not there."""
        if self._made is None:
            made = self.make(x0, self.seed, self._given())
            if isinstance(made, GradientSearch):
                # The next link descends, so the search only says along what.
                made._descend = self._collect  # type: ignore[method-assign]
            saved = self.global_state.get("search")
            if saved is not None:
                made.load_state_dict({"method": type(made).__name__, **saved})
            self._made = made
        return self._made

    def _collect(self, gradient: Tensor, columns: slice) -> None:
        # A part is overwritten by the next one.
        self._found.append(gradient.clone())

    def apply(self, objective: Objective) -> Objective:
        """One generation."""
        params = objective.params
        x = flat(params).clone()
        search = self.search(x)
        search.revise(mean=x.clone())
        fitness = self._evaluated(objective, search, x.numel())
        search.tell(fitness)
        self.global_state["search"] = search.state
        if isinstance(search, GradientSearch):
            # The way to the new centre would be the estimate rounded to the precision of the parameters.
            found = self._found[0] if len(self._found) == 1 else torch.cat(self._found)
            self._found.clear()
            search.state["step"] = float(torch.linalg.vector_norm(found, torch.inf))
            objective.updates = unflat(found, params)
            objective.grads = [tensor.clone() for tensor in objective.updates]
            objective.present = None
        else:
            centre = unflat(search.mean.to(x), params)
            objective.updates = [param.detach() - goal for param, goal in zip(params, centre, strict=True)]
            land(objective, centre)
        finite = fitness[fitness.isfinite()]
        objective.loss_approx = finite.mean() if len(finite) else fitness.mean()
        objective.attrs["best_loss"] = search.best_fitness
        reason = search.should_stop()
        if reason is not None:
            objective.terminate(str(reason))
        return objective

    def _evaluated(self, objective: Objective, search: Search, size: int) -> Tensor:
        evaluator = objective._closure("evaluations at other points")
        asked, net = evaluator.closure, objective.model
        if asked is None or not asked.of_model or not isinstance(net, torch.nn.Module):
            return self._one_by_one(objective, search)
        # Frozen parameters and buffers are copied for every model too.
        copied = sum(tensor.numel() for tensor in (*net.parameters(), *net.buffers()))
        block = max(1, min(search.population, BLOCK // max(copied, size, 1)))
        fitness = torch.empty(search.population, dtype=torch.float64)
        for start in range(0, search.population, block):
            stop = min(start + block, search.population)
            fitness[start:stop] = self._together(objective, search.rows(start, stop), asked.fn)
        return fitness

    def _one_by_one(self, objective: Objective, search: Search) -> Tensor:
        fitness = torch.empty(search.population, dtype=torch.float64)
        with objective.moved(), torch.no_grad():
            for i in range(search.population):
                row = search.rows(i, i + 1)[0]
                for param, part in zip(objective.params, unflat(row, objective.params), strict=True):
                    param.copy_(part)
                fitness[i] = objective.get_loss(backward=False, at_x0=False).double()
        return fitness

    def _together(self, objective: Objective, rows: Tensor, fn: Callable[..., Any]) -> Tensor:
        net: Any = objective.model
        pop = self._models.of(net, len(rows))
        leaves = dict(pop.named_parameters())
        names = {id(param): name for name, param in net.named_parameters()}
        at = 0
        with torch.no_grad():
            for param in objective.params:
                leaf = leaves[names[id(param)]]
                size = as_real(param.detach()).numel()
                part = rows[:, at : at + size]
                at += size
                as_real(leaf.detach()).copy_(part.reshape(as_real(leaf.detach()).shape))
            losses = pop.losses(fn).detach()
        if objective.evaluator is not None:
            objective.evaluator.count += len(rows)
        return (losses if objective.reduce is None else objective.reduce(losses)).double()

    def reset(self) -> None:
        """Begin again from the parameters as they are."""
        super().reset()
        self._made, self._models = None, Models()

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": None, "_found": [], "_models": Models()}
