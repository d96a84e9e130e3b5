"""What line searches have in common."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ...optim import Across, Module, Need, Objective
from .._flat import dot
from ._line import Line
from ._more_thuente import Trials, run_trials
from ._of_members import search_members


class LineSearchBase(Module):
    r"""A search for a step length along the update: override `search` or `trials`.

    It looks at $\phi(a) = f(x - a u)$ and multiplies the update by the length it finds. Where the update points uphill
    (a quasi-Newton matrix that is not positive definite, rounding), the search goes along the gradient instead, at the
    length of the update. A search that is written as `trials` and says `members = "matrix"` also searches for each member of
    a population, all of whose trials are evaluated together.

    Args:
        defaults: The settings.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> class Halving(m.LineSearchBase):
        ...     def search(self, line, loss, slope, settings):
        ...         a = 1.0
        ...         while line.value(a) >= loss and a > 1e-6:
        ...             a /= 2
        ...         return a
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], Halving()).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})
    across = Across.SUMS
    uses_slopes: ClassVar[bool] = False
    """Whether `trials` looks at the slopes that it is sent."""

    def __init__(self, defaults: dict[str, Any] | None = None) -> None:
        super().__init__(defaults)

    def search(self, line: Line, loss: float, slope: float, settings: Any) -> float | None:
        """The step length, or None where there is none that is better than staying.

        Args:
            line: Evaluates: `line.value(a)`, and `line.slope(a)` for the value and the derivative.
            loss: The value at 0.
            slope: The derivative at 0, negative.
            settings: The settings in force.
        """
        evaluate = line.slope if self.uses_slopes else lambda a: (line.value(a), 0.0)
        return run_trials(self.trials(loss, slope, settings, self.global_state), evaluate)

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        """The search as a generator: yields lengths, is sent the value and slope there, returns the length or None.

        Args:
            loss: The value at 0.
            slope: The derivative at 0, negative.
            settings: The settings in force.
            memory: What is remembered from one search to the next: numbers that are not zero, or tuples of numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither search nor trials")

    def apply(self, objective: Objective) -> Objective:
        """Multiplies the update by the step length that was found; that of each member for a population."""
        if objective.members is not None:
            setting = self.settings[objective.params[0]]
            return search_members(objective, self.trials, setting, self.global_state, self.uses_slopes)
        found, grads = objective.get_loss_grads()
        if found is None:
            found = objective.get_loss(backward=True)
        settings = self.settings[objective.params[0]]
        last = objective.tail is self
        line = Line(objective, objective.peek_updates(), last)
        slope = -line.along(grads)
        if slope > 0 and settings.get("plus_minus"):
            line.u, slope = -line.u, -slope
        if not slope < 0 or not math.isfinite(slope):
            size = dot(grads, grads)
            if size == 0.0 or not math.isfinite(size):
                return line.finish(None)
            update = objective.peek_updates()
            length = dot(update, update)
            ratio = math.sqrt(length / size) if math.isfinite(length) and length > 0 else 1 / math.sqrt(size)
            line = Line(objective, [grad * ratio for grad in grads], last)
            slope = -size * ratio
        return line.finish(self.search(line, found.item(), slope, settings))
