"""Jumping out of a place where nothing moves."""

from __future__ import annotations

import torch

from ...optim import Module, Need, Objective, sample_like
from .._checks import check_at_least_one, positive
from .._lists import measure_move


class EscapeAnnealing(Module):
    """Where the parameters are stuck, tries random points on growing spheres and jumps to the first that is better.

    Args:
        max_region: The radius of the largest sphere, per component.
        max_iter: How many points to try.
        tol: The largest change of a parameter that counts as none.
        n_tol: How many steps without change are stuck.
        seed: Seed of a generator of its own; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> opt = mo.Optimizer([w], m.EscapeAnnealing(n_tol=1, seed=0), m.LR(0.1))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (w**4 - w**2).sum()))
        >>> bool(w.abs() > 0)
        True
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})

    def __init__(
        self,
        *,
        max_region: float = 1.0,
        max_iter: int = 1000,
        tol: float = 1e-6,
        n_tol: int = 10,
        seed: int | None = None,
    ) -> None:
        positive("EscapeAnnealing", max_region=max_region)
        check_at_least_one("EscapeAnnealing", max_iter=max_iter, n_tol=n_tol)
        super().__init__({"max_region": max_region, "tol": tol})
        self.max_iter, self.n_tol, self.seed = max_iter, n_tol, seed

    def apply(self, objective: Objective) -> Objective:
        """Look whether anything moves; if not, search around."""
        params = objective.params
        setting = self.settings[params[0]]
        moved = measure_move(self, params, torch.inf)
        stuck = 0 if moved is None or moved > setting["tol"] else self.global_state.get("stuck", 0) + 1
        self.global_state["stuck"] = stuck
        if stuck < self.n_tol:
            return objective
        self.global_state["stuck"] = 0
        here = objective.get_loss(backward=True)
        generator = self.get_generator(params[0].device, self.seed)
        found = None
        with objective.moved() as start, torch.no_grad():
            for i in range(1, self.max_iter + 1):
                noise = sample_like(params, "sphere", 1.0, generator)
                radius = setting["max_region"] * i / self.max_iter
                for param, a, z in zip(params, start, noise, strict=True):
                    param.copy_(a + radius * z)
                if bool(objective.get_loss(backward=False, at_x0=False) < here):
                    found = [a - param.detach() for a, param in zip(start, params, strict=True)]
                    break
        if found is not None:
            objective.updates = found
            objective.stop = True
        return objective
