"""Remembering the best point."""

from __future__ import annotations

import torch
from torch import Tensor

from ...optim import Module, Need, Objective


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

    decides_on_host = True

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    members = True

    def update(self, objective: Objective) -> None:
        """Compare with the best so far, for each member of a population by itself."""
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
        kept = self.get_state(objective.params, "best", init="param")
        objective.attrs["best_loss"] = self.global_state.get("best_loss")
        objective.attrs["best_params"] = kept
        objective.attrs["load_best_params"] = _Load(list(objective.params), kept)

    def apply(self, objective: Objective) -> Objective:
        """The update stays as it is."""
        return objective


class _Load:
    """A class and not a closure, so that an optimizer that holds it can be copied and pickled."""

    def __init__(self, params: list[Tensor], values: list[Tensor]) -> None:
        self.params = params
        self.values = values

    def __call__(self) -> None:
        for param, value in zip(self.params, self.values, strict=True):
            param.data.copy_(value)
