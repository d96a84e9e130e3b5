"""Coordinate descent."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Module, Need, Objective
from .._checks import choice, positive


class CD(Module):
    r"""Moves along one coordinate at a time, whose slope is found from two or three values of the loss.

    The update is zero but for that coordinate, where it is the sign of the slope (or the slope); with a line search behind
    it this is coordinate descent, without any gradient. A coordinate that neither side of improves gets a smaller step to
    look with, one that does a larger one.

    Args:
        h: The first step to look with.
        grad: Use the slope itself, by differences, in place of its sign.
        adaptive: Adapt the step of each coordinate.
        index: How coordinates are chosen: "cyclic", "cyclic2" (forth and back) or "random".
        threepoint: Look to both sides; False: to one side only.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.CD(), m.AdaptiveBisection())
        >>> for _ in range(99):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        S. J. Wright, "Coordinate descent algorithms", Math. Programming 151 (2015).
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.LOSS, Need.CLOSURE})

    def __init__(
        self,
        *,
        h: Any = 1e-3,
        grad: bool = False,
        adaptive: bool = True,
        index: Literal["cyclic", "cyclic2", "random"] = "cyclic2",
        threepoint: bool = True,
        seed: int | None = None,
    ) -> None:
        positive("CD", h=h)
        choice("CD", "index", index, ("cyclic", "cyclic2", "random"))
        super().__init__({"h": h, "grad": grad, "adaptive": adaptive})
        self.index, self.threepoint, self.seed = index, threepoint, seed

    def _choose_index(self, count: int) -> int:
        if self.index == "random":
            return int(torch.randint(0, count, (), generator=self.get_generator("cpu", self.seed)))
        turn = self.increment_counter("turn", 0)
        if self.index == "cyclic" or count == 1:
            return turn % count
        place = turn % (2 * count - 2)
        return place if place < count else 2 * count - 2 - place

    def _place(self, objective: Objective) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The parameter, and the index of the number in it, whose turn it is."""
        params = [param for param in objective.params if param.numel()]
        at = self._choose_index(sum(param.numel() for param in params))
        for param in params:
            if at < param.numel():
                return param, torch.unravel_index(torch.tensor(at), param.shape) if param.dim() else ()
            at -= param.numel()
        raise ValueError("CD has no parameters to move")

    def apply(self, objective: Objective) -> Objective:
        """Looks along one coordinate."""
        for param in objective.params:
            if param.is_complex():
                raise TypeError(f"CD takes real parameters, got {param.dtype}; optimize torch.view_as_real(w)")
        param, at = self._place(objective)
        setting, state = self.settings[param], self.state[param]
        if "h" not in state:
            state["h"] = torch.full_like(param.detach(), float(setting["h"]))
        h = float(state["h"][at]) if setting["adaptive"] else float(setting["h"])
        here = float(objective.get_loss(backward=False))
        with objective.moved(), torch.no_grad():
            x = param[at].clone()
            values = []
            for sign in (1, -1) if self.threepoint else (1,):
                param[at] = x + sign * h
                values.append(float(objective.get_loss(backward=False, at_x0=False)))
        slope = (values[0] - values[1]) / (2 * h) if self.threepoint else (values[0] - here) / h
        better = min(values) < here or not self.threepoint
        if setting["adaptive"]:
            grown = min(2 * h, 1e10) if min(values) < here else max(h / 2, 1e-12)
            state["h"] = state["h"].clone()
            state["h"][at] = grown
        objective.updates = [torch.zeros_like(other) for other in objective.params]
        if better and slope == slope:
            mine = next(u for u, other in zip(objective.updates, objective.params, strict=True) if other is param)
            mine[at] = slope if setting["grad"] else float((slope > 0) - (slope < 0))
        return objective
