"""Remembering the best point."""

from __future__ import annotations

from torch import Tensor

from ...optim import Module, Need, Objective

__all__ = ["SaveBest"]


class SaveBest(Module):
    """Keeps a copy of the parameters with the lowest loss seen.

    The optimizer's `attrs` get `best_loss`, `best_params` (in the order of the parameters) and `load_best_params`, a
    function that puts them back. A loss belongs to the parameters before the step.

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

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def update(self, objective: Objective) -> None:
        """Compare with the best so far."""
        loss = objective.get_loss(backward=True)
        best = self.global_state.get("best_loss")
        if bool(loss.isfinite()) and (best is None or bool(loss < best)):
            self.global_state["best_loss"] = loss.clone()
            self.store(objective.params, "best", [param.detach().clone() for param in objective.params])
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
