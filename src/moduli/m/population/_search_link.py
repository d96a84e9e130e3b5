"""What links around a search over a whole population have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..._searches._base import Search
from ...optim import Module, Need, Objective
from ...optim._vectors import as_real

__all__ = ["PopulationSearch"]


class PopulationSearch(Module):
    """A link around a search whose members are the population's.

    A step first makes the move that the links before it want (gradient steps), then asks the search for new members,
    evaluates them, tells the search, and leaves the population at what the search keeps.

    Args:
        seed: Decides every random number.
        **options: What the search is made with.
    """

    needs = frozenset({Need.CLOSURE, Need.LOSS, Need.MEMBERS})
    members = True

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__()
        self.seed = seed
        self.options = options
        self._made: Search | None = None

    @abstractmethod
    def make(self, members: Tensor, seed: int, options: dict[str, Any]) -> Search:
        """The search, begun at these members."""

    def kept(self, search: Search, asked: Tensor) -> Tensor:
        """The members after a generation."""
        found = search.state.get("x")
        return found if isinstance(found, Tensor) else asked

    def __repr__(self) -> str:
        given = "".join(f", {key}={value!r}" for key, value in self.options.items() if value is not None)
        return f"{type(self).__name__}(seed={self.seed}{given})"

    def _search(self, members: Tensor) -> Search:
        if self._made is None:
            options = {key: value for key, value in self.options.items() if value is not None}
            self._made = self.make(members, self.seed, options)
            saved = self.global_state.get("search")
            if saved is not None:
                self._made.load_state_dict({"method": type(self._made).__name__, **saved})
        return self._made

    def apply(self, objective: Objective) -> Objective:
        """One generation."""
        here = _rows(objective.params)
        base = here if objective.updates is None else here - _rows(objective.updates)
        search = self._search(base)
        first = search.generation == 0
        with objective.moved(), torch.no_grad():
            known = search.state.get("x")
            if not first and isinstance(known, Tensor) and not torch.equal(known, base):
                # Gradient links (or the user) moved the members, so what is known of their fitness is of other places.
                search.state["x"] = base.clone()
                if "fitness" in search.state:
                    self._put(objective, base)
                    found = self._clean(objective.get_loss(backward=False, at_x0=False))
                    search.state["fitness"] = found.to(search._tensor("fitness").dtype)
                search._pending = None
            asked = search.ask().clone()
            self._put(objective, asked)
            losses = objective.get_loss(backward=False, at_x0=False)
            search.tell(losses)
            rest = self.kept(search, asked)
        self.global_state["search"] = search.state
        objective.updates = _parts(here - rest.to(here), objective.params)
        if objective.loss is None:
            objective.loss_approx = losses
        objective.attrs["best_loss"] = search.best_fitness
        return objective

    @staticmethod
    def _clean(losses: Tensor) -> Tensor:
        return torch.where(losses.isnan(), torch.full_like(losses, torch.inf), losses).double()

    @staticmethod
    def _put(objective: Objective, rows: Tensor) -> None:
        for param, part in zip(objective.params, _parts(rows, objective.params), strict=True):
            param.copy_(part)

    def reset(self) -> None:
        """Begin again from the members as they are."""
        super().reset()
        self._made = None

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_made": None}


def _rows(tensors: list[Tensor]) -> Tensor:
    return torch.cat([as_real(tensor.detach()).reshape(len(tensor), -1) for tensor in tensors], 1)


def _parts(rows: Tensor, params: list[Tensor]) -> list[Tensor]:
    out, at = [], 0
    for param in params:
        shape = as_real(param.detach()).shape
        size = shape[1:].numel()
        part = rows[:, at : at + size].reshape(shape)
        at += size
        out.append(torch.view_as_complex(part.contiguous()) if param.is_complex() else part.to(param.dtype))
    return out
