"""`MatrixSearch`: searches whose members are a matrix in their state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ._base import Search
from ._problem import Reason


class MatrixSearch(Search):
    """A search whose members are a matrix in its state, and that proposes another matrix each generation.

    A subclass implements `_move`, which returns the next matrix, and `_select`, which updates the state from its fitness.
    """

    def __init__(
        self, x0: Tensor, *, population: int = 64, spread: float = 1.0, initial: Tensor | None = None, **options: Any
    ) -> None:
        self._spread, self._initial = spread, initial
        self._bounds: tuple[Any, Any] | None = None
        self._buffers: dict[str, Tensor] = {}
        super().__init__(x0, population=population, **options)

    @abstractmethod
    def _move(self) -> dict[str, Tensor]:
        """Return the next members under "x" (as they are evaluated), and further tensors that `_select` needs."""

    @abstractmethod
    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        """Update the state from a proposal and its fitness."""

    def _draw_first(self, x0: Tensor) -> Tensor:
        """Return the first members: `initial`, uniform between finite bounds, or normal around x0 with deviation `spread`."""
        n, c = self.population, self.coordinates
        if self._initial is not None:
            x = self._initial.detach()
            if x.shape != (n, self.dim):
                raise ValueError(f"initial has shape {tuple(x.shape)}; {n} members of {self.dim} numbers were expected")
            return c.rounded(x.to(x0).clamp(c.lower, c.upper))
        g = self._make_generator()
        self.state["counter"] = 1
        normal, uniform = self._gauss(g, n, self.dim), self._uniform(g, n, self.dim)
        both = c.lower.isfinite() & c.upper.isfinite()
        # Widen integer ranges by ½ on either side before rounding, so that each whole number is equally likely.
        whole = torch.zeros(self.dim, dtype=torch.bool, device=self.device)
        whole[c.whole] = True
        low = torch.where(both, c.lower, torch.zeros_like(x0)) - 0.5 * whole
        width = torch.where(both, c.upper - c.lower, torch.zeros_like(x0)) + 1.0 * whole
        x = torch.where(both, low + uniform * width, x0 + self._spread * normal)
        return c.rounded(x.clamp(c.lower, c.upper)).clamp(c.lower, c.upper)

    def _proposal(self) -> dict[str, Tensor]:
        if self._pending is None:
            self._pending = self._move()
        return self._pending  # type: ignore[no-any-return]

    def _propose(self, start: int, stop: int) -> Tensor:
        # A copy, because the caller may write to it, and `_learn` uses the original.
        return self._proposal()["x"][start:stop].clone()

    def _learn(self, fitness: Tensor) -> None:
        self._select(self._proposal(), fitness)

    def _scratch(self, name: str, *lead: int) -> Tensor:
        """Return a buffer of the shape of the members, or of a stack of them, that every generation reuses."""
        shape = (*lead, self.population, self.dim)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self._buffers[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return buffer

    def _walls(self) -> tuple[Any, Any]:
        """Return the bounds as `fuse` takes them: two numbers, or matrices in lists where coordinates differ."""
        if self._bounds is None:
            shape, ends = (self.population, self.dim), (self.coordinates.lower, self.coordinates.upper)
            alike = all(bool((end == end.max()).all()) for end in ends)
            low, high = (float(end.max()) if alike else [end.expand(shape).contiguous()] for end in ends)
            self._bounds = low, high
        return self._bounds

    @property
    def mean(self) -> Tensor:
        """The average of the members in the state."""
        return self._tensor("x").mean(0)

    def _find_convergence(self) -> Reason | None:
        if self.population == 1 or self.generation == 0:
            return None
        low, high = self._tensor("x").amin(0), self._tensor("x").amax(0)
        spread = float((high - low).max() / torch.maximum(low.abs(), high.abs()).max().clamp(min=1.0))
        return Reason.SMALL_STEP if spread <= self.tol else None
