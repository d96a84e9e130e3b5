"""What links around a search have in common: it is asked for models, they are evaluated, and it is told the losses."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._searches._base import Search
from ...optim import Module, Need, Objective
from ...optim._vectors import as_real, from_vector, like, to_vector
from ...population import Population

__all__ = ["SearchLink"]

BLOCK = 1 << 22  # numbers that the models of one block have together


class SearchLink(Module):
    """A link around a search over the parameters of one model as one vector.

    Each step asks for a generation around the parameters, evaluates it (all at once where the closure is a function of the
    model, `mo.closure(lambda net: ...)`, and the optimizer was given the module; else one by one), and emits the way from
    the parameters to the new centre of the search.

    Args:
        seed: Decides every random number.
        **options: What the search is made with.
    """

    needs = frozenset({Need.CLOSURE})
    vector_state = True
    gradient: ClassVar[bool] = False

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__()
        self.seed = seed
        self.options = options
        self._made: Search | None = None

    @abstractmethod
    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Search:
        """The search, around these parameters."""

    def __repr__(self) -> str:
        given = "".join(f", {key}={value!r}" for key, value in self.options.items() if value is not None)
        return f"{type(self).__name__}(seed={self.seed}{given})"

    def search(self, x0: Tensor) -> Search:
        """The search as it stands; made, or made again from what was saved, when it is not there."""
        if self._made is None:
            options = {key: value for key, value in self.options.items() if value is not None}
            self._made = self.make(x0, self.seed, options)
            saved = self.global_state.get("search")
            if saved is not None:
                self._made.load_state_dict({"method": type(self._made).__name__, **saved})
        return self._made

    def apply(self, objective: Objective) -> Objective:
        """One generation."""
        x = to_vector([as_real(param.detach()) for param in objective.params]).clone()
        search = self.search(x)
        search.state["mean"] = x.clone()
        fitness = torch.empty(search.population, dtype=torch.float64)
        block = max(1, min(search.population, BLOCK // max(x.numel(), 1)))
        for start in range(0, search.population, block):
            stop = min(start + block, search.population)
            fitness[start:stop] = self._losses(objective, search.rows(start, stop))
        search.tell(fitness)
        self.global_state["search"] = search.state
        parts = from_vector(x - search.mean.to(x), [as_real(param.detach()) for param in objective.params])
        objective.updates = [like(part, param).clone() for part, param in zip(parts, objective.params, strict=True)]
        if self.gradient:
            objective.grads = [tensor.clone() for tensor in objective.updates]
            objective.present = None
        finite = fitness[fitness.isfinite()]
        objective.loss_approx = finite.mean() if len(finite) else fitness.mean()
        objective.attrs["best_loss"] = search.best_fitness
        reason = search.should_stop()
        if reason is not None:
            objective.terminate(str(reason))
        return objective

    def _losses(self, objective: Objective, rows: Tensor) -> Tensor:
        evaluator = objective._closure("evaluations at other points")
        asked = evaluator.closure
        if asked is not None and asked.of_model and isinstance(objective.model, torch.nn.Module):
            return self._together(objective, rows, asked.fn)
        out = torch.empty(len(rows), dtype=torch.float64)
        with objective.moved(), torch.no_grad():
            for i, row in enumerate(rows):
                self._put(objective, row)
                out[i] = objective.get_loss(backward=False, at_x0=False).double()
        return out

    def _put(self, objective: Objective, row: Tensor) -> None:
        shapes = [as_real(param.detach()) for param in objective.params]
        for param, part in zip(objective.params, from_vector(row, shapes), strict=True):
            param.copy_(like(part, param))

    def _together(self, objective: Objective, rows: Tensor, fn: Any) -> Tensor:
        net: Any = objective.model
        pop = Population.of(net, len(rows))
        leaves = dict(pop.named_parameters())
        names = {id(param): name for name, param in net.named_parameters()}
        at = 0
        with torch.no_grad():
            for param in objective.params:
                size = as_real(param.detach()).numel()
                part = rows[:, at : at + size].to(param.dtype if not param.is_complex() else rows.dtype)
                at += size
                leaf = leaves[names[id(param)]]
                if param.is_complex():
                    leaf.copy_(torch.view_as_complex(part.reshape(len(rows), *param.shape, 2).contiguous()))
                else:
                    leaf.copy_(part.view(len(rows), *param.shape))
            losses = pop.losses(fn).detach()
        if objective.evaluator is not None:
            objective.evaluator.count += len(rows)
        return losses.double()

    def reset(self) -> None:
        """Begin again from the parameters as they are."""
        super().reset()
        self._made = None

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": None}
