"""The last digits of an optimum: L-BFGS with gradients by finite differences, as an ask-and-tell search.

References:
    Nocedal and Wright, Numerical Optimization, 2nd edition, algorithms 7.4 and 7.5; Byrd, Lu, Nocedal, Zhu, A limited memory
    algorithm for bound constrained optimization, SIAM J. Scientific Computing 16 (1995), whose projected gradient is used here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._base import Search
from ._problem import Reason

_TRIED = 4.0 ** -torch.arange(3, dtype=torch.float64)


class Polish(Search):
    """A quasi-Newton descent from a point whose fitness is known, for smooth functions without derivatives.

    Generations alternate: one point next to x along each coordinate, whose differences are the gradient, then three points
    along the direction of L-BFGS, of which the best becomes x. All points of a generation can be evaluated at the same time.
    Points stay inside the bounds: a coordinate at a bound does not move if descent would leave the bounds.

    Args:
        x0: The start.
        value: The fitness of x0.
        memory: The number of pairs of steps and gradient differences that L-BFGS uses.
        **options: Those of `Search`, without `population`.

    Example:
        >>> import torch
        >>> from moduli.evolve import Polish
        >>> def rosenbrock(x):
        ...     return 100 * (x[:, 1] - x[:, 0] ** 2) ** 2 + (1 - x[:, 0]) ** 2
        >>> x0 = torch.tensor([0.5, 0.5], dtype=torch.float64)
        >>> search = Polish(x0, value=float(rosenbrock(x0[None])))
        >>> while not search.should_stop():
        ...     search.tell(rosenbrock(search.ask()))
        >>> search.best_fitness < 1e-9, search.evaluations < 300
        (True, True)
    """

    def __init__(self, x0: Tensor, *, value: float, memory: int = 10, **options: Any) -> None:
        self._value, self.memory = float(value), memory
        super().__init__(x0, population=x0.numel(), **options)

    def _start(self, x0: Tensor) -> None:
        empty = torch.zeros(self.memory, self.dim, dtype=torch.float64, device=self.device)
        self.state |= {
            "x": x0.double(), "value": self._value, "best_fitness": self._value, "gradient": torch.zeros_like(empty[0]),
            "direction": torch.zeros_like(empty[0]), "steps": empty, "changes": empty.clone(), "pairs": 0, "sloping": 1,
            "moved": torch.zeros_like(empty[0]), "reach": 1.0, "failed": 0,
        }  # fmt: skip

    def _difference_steps(self) -> Tensor:
        """Return the step of each coordinate for the difference quotient; negative where the upper bound is too near."""
        x, c = self._tensor("x"), self.coordinates
        size = torch.finfo(self.dtype).eps ** 0.5
        step = size * x.abs().clamp(min=1.0)
        return torch.where(c.upper.double() - x >= step, step, -step)

    def _propose(self, start: int, stop: int) -> Tensor:
        x, c = self._tensor("x"), self.coordinates
        if self._int("sloping"):
            rows = x.expand(stop - start, -1).clone()
            which = torch.arange(start, stop, device=self.device)
            rows[which - start, which] += self._difference_steps()[which]
        else:
            lengths = self._float("reach") * _TRIED[start:stop, None].to(self.device)
            rows = x + lengths * self._tensor("direction")
        return rows.to(self.dtype).clamp(c.lower, c.upper)

    def _learn(self, fitness: Tensor) -> None:
        (self._learn_slope if self._int("sloping") else self._learn_step)(fitness)
        self.state["population"] = self.dim if self._int("sloping") else len(_TRIED)

    def _learn_slope(self, fitness: Tensor) -> None:
        state, x = self.state, self._tensor("x")
        # Use the difference of the evaluated points, which single precision has rounded.
        moved = self.rows(0, self.dim).double().diagonal() - x
        # A coordinate between equal bounds has the difference 0/0; its slope is set to zero, so that it does not move.
        gradient = ((fitness - self._float("value")) / moved).nan_to_num(0.0, 0.0, 0.0)
        step, change = self._tensor("moved"), gradient - self._tensor("gradient")
        if float(step @ change) > 1e-12 * float(step.norm() * change.norm()):
            slot = self._int("pairs") % self.memory
            self._tensor("steps")[slot], self._tensor("changes")[slot] = step, change
            state["pairs"] = self._int("pairs") + 1
        state["gradient"] = gradient
        self._aim()
        state["sloping"] = 0

    def _aim(self) -> None:
        """Set the direction of L-BFGS (algorithm 7.4), in the coordinates that are free to move."""
        state, x, c = self.state, self._tensor("x"), self.coordinates
        gradient = self._tensor("gradient")
        blocked = ((x <= c.lower) & (gradient > 0)) | ((x >= c.upper) & (gradient < 0))
        q = gradient.masked_fill(blocked, 0.0)
        count, pairs = min(self._int("pairs"), self.memory), []
        for age in range(count):
            slot = (self._int("pairs") - 1 - age) % self.memory
            s, y = self._tensor("steps")[slot], self._tensor("changes")[slot]
            rho = 1 / float(s @ y)
            alpha = rho * float(s @ q)
            q = q - alpha * y
            pairs.append((s, y, rho, alpha))
        if pairs:
            s, y, rho, _ = pairs[0]
            q = q / (rho * float(y @ y))
        for s, y, rho, alpha in reversed(pairs):
            q = q + (alpha - rho * float(y @ q)) * s
        q = q.masked_fill(blocked, 0.0)
        # Without curvature pairs the gradient has no natural length, so the first step is at most one long.
        first = 1.0 if pairs else min(1.0, 1 / max(float(q.norm()), 1e-300))
        state["direction"], state["reach"] = -q, first

    def _learn_step(self, fitness: Tensor) -> None:
        state, place = self.state, int(fitness.argmin())
        value = float(fitness[place])
        if value < self._float("value"):
            new = self.rows(place, place + 1)[0].double()
            state["moved"] = new - self._tensor("x")
            gained = self._float("value") - value
            state["x"], state["value"], state["sloping"] = new, value, 1
            state["failed"] = self._int("failed") + 1 if gained <= 1e-15 * max(1.0, abs(value)) else 0
            return
        state["failed"] = self._int("failed") + 1
        state["reach"] = self._float("reach") / 64
        if self._int("failed") == 2 and self._int("pairs"):  # the pairs are outdated: descend along the gradient
            state["pairs"] = 0
            self._aim()

    def _find_convergence(self) -> Reason | None:
        return Reason.SMALL_STEP if self._int("failed") >= 4 or not math.isfinite(self._float("value")) else None

    @property
    def mean(self) -> Tensor:
        """The point that the descent has reached."""
        return self._tensor("x").to(self.dtype)
