"""What links around a search over a whole population have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..._searches._base import Search
from ...optim import Module, Need, Objective, Optimizer
from .._flat import flat_members as _rows
from .._flat import unflat_members as _parts
from .._landing import land

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
        self.make(torch.zeros(64, 2), seed, self._given())  # options that can't work are refused here

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
            made = self.make(members, self.seed, self._given())
            saved = self.global_state.get("search")
            if saved is not None:
                made.load_state_dict({"method": type(made).__name__, **saved})
            self._made = made
        return self._made

    def attached(self, optimizer: Optimizer) -> None:
        """Refuse a population that is too small for the method."""
        self.make(torch.zeros(optimizer.binding.members or 1, 2), self.seed, self._given())

    def _given(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if value is not None}

    def apply(self, objective: Objective) -> Objective:
        """One generation."""
        params = objective.params
        here = _rows(params)
        base = (
            here
            if objective.updates is None
            else _rows([param.detach() - update for param, update in zip(params, objective.updates, strict=True)])
        )
        shapes = [list(param.shape) for param in params]
        if self.global_state.setdefault("shapes", shapes) != shapes:
            # Other parameters are searched over than before (some were frozen or thawed), so it begins afresh.
            self.global_state["shapes"], self._made = shapes, None
            self.global_state.pop("search", None)
        search = self._search(base)
        with objective.moved(), torch.no_grad():
            known = search.state.get("x")
            if search.generation and isinstance(known, Tensor) and not torch.equal(known, base):
                self._follow(objective, search, base)
            asked = search.ask().clone()
            self._put(objective, asked)
            losses = objective.get_loss(backward=False, at_x0=False)
            search.tell(losses)
        self.global_state["search"] = search.state
        goal = _parts(self.kept(search, asked).to(here), params)
        objective.updates = [param.detach() - there for param, there in zip(params, goal, strict=True)]
        # Whoever is moved by a generation moves all parameters, those without a gradient too.
        objective.present = None
        land(objective, goal)
        if objective.loss is None:
            objective.loss_approx = losses
        objective.attrs["best_loss"] = search.best_fitness
        reason = search.should_stop()
        if reason is not None:
            objective.terminate(str(reason))
        return objective

    def _follow(self, objective: Objective, search: Search, base: Tensor) -> None:
        """Gradient links (or the user) moved members, so what is known of their fitness is of other places."""
        entries = {"x": base.clone()}
        if "fitness" in search.state:
            self._put(objective, base)
            losses = self._clean(objective.get_loss(backward=False, at_x0=False))
            entries["fitness"] = losses.to(search.device)
        search.revise(**entries)

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
