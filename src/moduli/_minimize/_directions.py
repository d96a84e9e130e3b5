"""Directions for many starts at once, one in each row: what the links of a method do to one point, vectorised."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..m.quasi_newton import learn_rows, multiply_rows
from ..optim import Module, step_tensors

__all__ = ["DIRECTIONS", "Direction"]


class Direction(Protocol):
    """Learns from points x, gradients g and losses f in rows, and gives the updates that are subtracted from x."""

    def __init__(self, links: list[Module]) -> None: ...

    def __call__(self, x: Tensor, g: Tensor, f: Tensor) -> Tensor:
        """The updates. Rows that stay where they are learn nothing."""

    def forget(self, rows: Tensor, x: Tensor, g: Tensor) -> None:
        """Begin again in these rows, from this point."""


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def _at_most_one(g: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(g, dim=1)
    return g * torch.where((length > 1) & length.isfinite(), 1 / length, 1.0)[:, None]


class Gradient:
    """The gradient itself."""

    def __init__(self, links: list[Module]) -> None:
        pass

    def __call__(self, x: Tensor, g: Tensor, f: Tensor) -> Tensor:
        return g.clone()

    def forget(self, rows: Tensor, x: Tensor, g: Tensor) -> None:
        pass


class Pointwise:
    """Links that treat every number by itself, so that rows do not matter to them."""

    def __init__(self, links: list[Module]) -> None:
        self.links = links
        self.param: Tensor | None = None

    def __call__(self, x: Tensor, g: Tensor, f: Tensor) -> Tensor:
        if self.param is None:
            self.param = torch.empty_like(x)
        self.param.copy_(x)
        return step_tensors(self.links, [g.clone()], [self.param])[0]

    def forget(self, rows: Tensor, x: Tensor, g: Tensor) -> None:
        pass


class Conjugate:
    """`m.PolakRibiere`."""

    def __init__(self, links: list[Module]) -> None:
        self.setting = links[0].defaults
        self.last: Tensor | None = None

    def __call__(self, x: Tensor, g: Tensor, f: Tensor) -> Tensor:
        if self.last is None:
            self.last, self.direction = g.clone(), g.clone()
            self.age = torch.ones(len(g), dtype=torch.long, device=g.device)
            self.x = x.clone()
            return g.clone()
        moved = (x != self.x).any(1)
        below = _dots(self.last, self.last)
        beta = torch.where(below != 0, _dots(g, g - self.last) / below, 0.0)
        beta = torch.where(beta.isfinite() & (self.age < g.shape[1] + 1) & moved, beta.clamp(min=0.0), 0.0)
        self.age = torch.where(beta != 0, self.age + 1, 1)
        out = g + beta[:, None] * self.direction
        out = torch.where((_dots(out, g) > 0)[:, None], out, g)
        self.last, self.direction, self.x = g.clone(), out, x.clone()
        return out.clone()

    def forget(self, rows: Tensor, x: Tensor, g: Tensor) -> None:
        self.x[rows] = x[rows]  # a row that has not moved since starts from its gradient


class LimitedMemory:
    """`m.LBFGS`."""

    def __init__(self, links: list[Module]) -> None:
        self.setting = links[0].defaults
        self.state: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}

    def __call__(self, x: Tensor, g: Tensor, f: Tensor) -> Tensor:
        learn_rows([x], [g], [self.state], self.shared, self.setting)
        return multiply_rows([g], [self.state], self.shared["pairs"], self.setting)[0]

    def forget(self, rows: Tensor, x: Tensor, g: Tensor) -> None:
        self.shared["pairs"][rows] = 0
        self.state["x"][rows], self.state["u"][rows] = x[rows], g[rows]


class DenseDirections:
    """`m.BFGS`: a matrix for each row."""

    def __init__(self, links: list[Module]) -> None:
        self.setting = links[0].defaults
        self.x: Tensor | None = None

    def __call__(self, x: Tensor, g: Tensor, f: Tensor) -> Tensor:
        n = x.shape[1]
        if self.x is None:
            self.x, self.g, self.f = x.clone(), g.clone(), f.clone()
            self.eye = torch.eye(n, dtype=x.dtype, device=x.device)
            self.H = self.eye.repeat(len(x), 1, 1)
            self.learnt = torch.zeros(len(x), dtype=torch.bool, device=x.device)
            return _at_most_one(g)
        s, y = x - self.x, g - self.g
        slopes = _dots(s, self.g), _dots(s, g)
        size = 1e-9 * (slopes[0].abs() + slopes[1].abs())
        parabola = (f - self.f - 0.5 * (slopes[0] + slopes[1])).abs() <= size
        parabola &= size > 4e-16 * torch.maximum(f.abs(), self.f.abs())
        self.x, self.g, self.f = x.clone(), g.clone(), f.clone()
        sy, yy = _dots(s, y), _dots(y, y)
        far, steep = s.abs().amax(1), y.abs().amax(1)
        use = (far > self.setting["ptol"]) & far.isfinite() & (steep > self.setting["gtol"]) & steep.isfinite()
        scale = torch.where(use & ~self.learnt & ~parabola & (sy > 0) & yy.isfinite(), sy / yy, 1.0)
        use = use & (sy > self.setting["tol"])
        # Like the link: the first pair scales the matrix, and then every pair changes it by a matrix of rank two.
        H = self.H * scale[:, None, None]
        Hy = (H @ y[:, :, None])[:, :, 0]
        over = torch.where(use, 1 / torch.where(use, sy, 1.0), 0.0)[:, None]
        w = s * (0.5 * (1 + _dots(y, Hy)[:, None] * over) * over) - Hy * over
        w = torch.where(use[:, None], w, 0.0)
        s = torch.where(use[:, None], s, 0.0)
        self.H = H + s[:, :, None] * w[:, None, :] + w[:, :, None] * s[:, None, :]
        self.learnt = self.learnt | use
        broken = ~torch.diagonal(self.H, dim1=1, dim2=2).isfinite().all(1)
        self._begin(broken)
        return torch.where(self.learnt[:, None], (self.H @ g[:, :, None])[:, :, 0], _at_most_one(g))

    def _begin(self, rows: Tensor) -> None:
        self.H = torch.where(rows[:, None, None], self.eye, self.H)
        self.learnt = self.learnt & ~rows

    def forget(self, rows: Tensor, x: Tensor, g: Tensor) -> None:
        if self.x is not None:
            self._begin(rows)
            self.x[rows], self.g[rows] = x[rows], g[rows]


DIRECTIONS: dict[str, type[Direction]] = {
    "bfgs": DenseDirections,
    "lbfgs": LimitedMemory,
    "cg": Conjugate,
    "gd": Gradient,
    "adam": Pointwise,
}
"""The methods that run many starts at once; each equals its links on every row."""
