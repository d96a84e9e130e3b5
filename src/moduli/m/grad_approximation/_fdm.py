"""Gradients from values along coordinates.

* The base of approximations of the gradient.
* Finite differences: their formulas, and the gradient coordinate by coordinate.
* Coordinate descent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable, DeclaredLink, Need, Objective, Reformulation, Setting
from ...optim import ranges as check


class GradApproximator(Reformulation):
    """Replaces the gradient by one computed from values of the loss; override `approximate`.

    The links that follow (or `modules`) see the loss with that gradient, wherever they evaluate it.

    Args:
        defaults: The settings.
        modules: Links that see it; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.FDM(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-6
        True
    """

    shared_settings = True
    needs = frozenset({Need.CLOSURE})

    def __init__(self, defaults: dict[str, Any] | None = None, modules: Chainable | None = None) -> None:
        super().__init__(defaults, modules)

    @abstractmethod
    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """The gradient, and the loss at the parameters where it was evaluated.

        Args:
            value: The loss at the parameters as they are then; they may be moved, and are put back.
            params: The parameters.
            loss: The loss at the parameters, where it is known.
            setting: The settings in force.
        """

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, list[Tensor] | None]:
        def value() -> Tensor:
            return closure(False)

        if not backward:
            return value(), None
        setting = self.settings[params[0]]
        grads, loss = self.approximate(value, params, None, setting)
        return (value() if loss is None else loss), grads


Formula = tuple[tuple[int, ...], tuple[float, ...]]
"""Points in units of h, and weights; the derivative is the weighted sum over h."""

FORMULAS: dict[str, Formula] = {
    "forward": ((0, 1), (-1.0, 1.0)),
    "forward2": ((0, 1), (-1.0, 1.0)),
    "backward": ((-1, 0), (-1.0, 1.0)),
    "backward2": ((-1, 0), (-1.0, 1.0)),
    "central": ((-1, 1), (-0.5, 0.5)),
    "central2": ((-1, 1), (-0.5, 0.5)),
    "forward3": ((0, 1, 2), (-1.5, 2.0, -0.5)),
    "backward3": ((-2, -1, 0), (0.5, -2.0, 1.5)),
    "central4": ((-2, -1, 1, 2), (1 / 12, -2 / 3, 2 / 3, -1 / 12)),
    "forward4": ((0, 1, 2, 3), (-11 / 6, 3.0, -1.5, 1 / 3)),
    "forward5": ((0, 1, 2, 3, 4), (-25 / 12, 4.0, -3.0, 4 / 3, -1 / 4)),
}


class FDM(GradApproximator):
    r"""The gradient by finite differences along every coordinate, $\partial_i f \approx (f(x + h e_i) - f(x - h e_i)) / 2h$.

    Args:
        h: The length of the differences.
        formula: "forward", "backward", "central" (2 points), "forward3", "backward3", "forward4", "forward5", "central4".
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.FDM(), m.BFGS(), m.StrongWolfe())
        >>> for _ in range(25):
        ...     _ = opt.step(mo.closure(lambda: (w**4).sum() + (w**2).sum()))
        >>> bool(w.abs().max() < 1e-4)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 8.1.
    """

    def __init__(self, *, h: Any = 1e-3, formula: str = "central", modules: Chainable | None = None) -> None:
        check.one_of(*FORMULAS)("FDM", "formula", formula)
        super().__init__({"h": h, "formula": formula}, modules)

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        grads = [torch.zeros(param.shape, dtype=param.dtype, device=param.device) for param in params]
        h, formula = float(setting["h"]), FORMULAS[setting["formula"]]
        if 0 in formula[0] and loss is None:
            loss = value()
        for param, grad in zip(params, grads, strict=True):
            views = [(torch.view_as_real(param), torch.view_as_real(grad))] if param.is_complex() else [(param, grad)]
            for own, out in views:
                flat_out = out.view(-1)
                for i in range(own.numel()):
                    index = torch.unravel_index(torch.tensor(i), own.shape) if own.dim() else ()
                    start = own[index].clone()

                    def evaluate_at(k: int, own: Tensor = own, index: Any = index, start: Tensor = start) -> Tensor:
                        own[index] = start + k * h
                        result = value()
                        own[index] = start
                        return result

                    flat_out[i] = derivative(evaluate_at, formula, h, loss)
        return grads, loss


def derivative(at: Callable[[int], Tensor], formula: Formula, h: float, centre: Any) -> Tensor:
    """The derivative of a function of a number.

    Args:
        at: The value at a multiple of h.
        formula: The points and their weights.
        h: The length of the differences.
        centre: The value at zero, if that is one of the points.
    """
    total: Any = 0.0
    for point, weight in zip(*formula, strict=True):
        total = total + weight * (at(point) if point else centre)
    slope: Tensor = total / h
    return slope


class CD(DeclaredLink):
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

    ranges = {check.positive: ("h",)}
    attributes = ("index", "threepoint", "seed")

    h: Setting = 1e-3
    grad: bool = False
    adaptive: bool = True
    index: Literal["cyclic", "cyclic2", "random"] = "cyclic2"
    threepoint: bool = True
    seed: int | None = None

    def _choose_index(self, count: int) -> int:
        if self.index == "random":
            return int(torch.randint(0, count, (), generator=self.get_generator("cpu", self.seed)))
        turn = self.increment_counter("turn", 0)
        if self.index == "cyclic" or count == 1:
            return turn % count
        place = turn % (2 * count - 2)
        return place if place < count else 2 * count - 2 - place

    def _place(self, params: list[Tensor]) -> tuple[int, tuple[Tensor, ...]]:
        """Return the position of the parameter of the next coordinate, and the index in it."""
        at = self._choose_index(sum(param.numel() for param in params))
        for i, param in enumerate(params):
            if at < param.numel():
                return i, torch.unravel_index(torch.tensor(at), param.shape) if param.dim() else ()
            at -= param.numel()
        raise ValueError("CD has no parameters to move")

    def _evaluate_near(self, objective: Objective, param: Tensor, at: tuple[Tensor, ...], h: float) -> list[float]:
        """Return the losses with one coordinate moved by h, and by -h if both sides are evaluated.

        Args:
            objective: The objective.
            param: The parameter of the coordinate.
            at: The index in it.
            h: The step.
        """
        values = []
        with objective.moved(), torch.no_grad():
            x = param[at].clone()
            for sign in (1, -1) if self.threepoint else (1,):
                param[at] = x + sign * h
                values.append(float(objective.get_loss(backward=False, at_x0=False)))
        return values

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with a step along one coordinate."""
        for param in objective.params:
            if param.is_complex():
                raise TypeError(f"CD takes real parameters, got {param.dtype}; optimize torch.view_as_real(w)")
        place, at = self._place(objective.params)
        param = objective.params[place]
        setting, state = self.settings[param], self.state[param]
        if "h" not in state:
            state["h"] = torch.full_like(param.detach(), float(setting["h"]))
        h = float(state["h"][at]) if setting["adaptive"] else float(setting["h"])
        here = float(objective.get_loss(backward=False))
        values = self._evaluate_near(objective, param, at, h)
        slope = (values[0] - values[1]) / (2 * h) if self.threepoint else (values[0] - here) / h
        better = min(values) < here or not self.threepoint
        if setting["adaptive"]:
            grown = min(2 * h, 1e10) if min(values) < here else max(h / 2, 1e-12)
            state["h"] = state["h"].clone()
            state["h"][at] = grown
        objective.updates = [torch.zeros_like(other) for other in objective.params]
        if better and slope == slope:
            objective.updates[place][at] = slope if setting["grad"] else float((slope > 0) - (slope < 0))
        return objective
