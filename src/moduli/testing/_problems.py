"""Small problems with known optima, and ways to run a chain on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Closure, Module, Need, Optimizer, closure
from ._case import Case

__all__ = ["SHAPES", "Problem", "backend", "needs", "optimizer", "run", "same", "snapshot"]

SHAPES: tuple[tuple[int, ...], ...] = ((3, 2), (4,))


class Problem:
    """Parameters and residuals; the loss is half their squared norm, with minimum 0.

    Args:
        shapes: Shapes of the parameters.
        dtype: Of the parameters.
        kind: "bowl" (residuals are linear), "rosenbrock" (two unknowns), or "bent" (smooth, not quadratic, coupled).
        residuals: Whether closures return the residuals instead of the loss.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        *,
        dtype: torch.dtype = torch.float64,
        kind: str = "bent",
        residuals: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.kind = kind
        self.dtype = dtype
        self.returns_residuals = residuals
        if kind == "rosenbrock":
            self.params = [nn.Parameter(torch.tensor([-1.2, 1.0], dtype=dtype))]
            return
        count = sum(torch.Size(shape).numel() for shape in shapes)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        start = torch.randn(count, generator=generator, dtype=wide)
        self.optimum = torch.randn(count, generator=generator, dtype=wide).to(dtype)
        self.scale = torch.linspace(0.7, 1.4, max(count, 1), dtype=torch.float64)[:count].to(
            dtype.to_real() if dtype.is_complex else dtype
        )
        pieces = torch.split(start, [torch.Size(shape).numel() for shape in shapes])
        self.params = [
            nn.Parameter(piece.reshape(shape).to(dtype)) for piece, shape in zip(pieces, shapes, strict=True)
        ]

    def residuals(self) -> Tensor:
        """The residuals."""
        if self.kind == "rosenbrock":
            x, y = self.params[0]
            return torch.stack([2**0.5 * (1 - x), 200**0.5 * (y - x * x)])
        flat = torch.cat([param.reshape(-1) for param in self.params])
        error = self.scale * (flat - self.optimum)
        if self.kind == "bowl" or not flat.numel():
            return error
        return error + 0.1 * torch.sin(error + torch.roll(error, 1))

    def loss(self) -> Tensor:
        """Half their squared norm."""
        found = self.residuals()
        return 0.5 * (found.abs() ** 2).sum() if found.is_complex() else 0.5 * (found * found).sum()

    def value(self) -> float:
        """The loss as a number."""
        with torch.no_grad():
            return float(self.loss())

    def answer(self) -> Tensor:
        """What the closure returns."""
        return self.residuals() if self.returns_residuals else self.loss()

    def closure(self, *, fixed: bool = False) -> Closure:
        """The closure in the form that every chain takes."""
        return closure(self.answer, fixed=fixed)

    def backward(self) -> None:
        """Fill `.grad`, for steps without a closure."""
        for param in self.params:
            param.grad = None
        with torch.enable_grad():
            torch.autograd.backward(self.loss())


def problem(case: Case, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> Problem:
    """The problem for structural laws: of the kind that the link's closure asks for."""
    return Problem(shapes, residuals=case.target == "least squares", **options)


def needs(links: Sequence[Module]) -> frozenset[Need]:
    """What a chain needs."""
    return frozenset().union(*(link.all_needs() for link in links))


def optimizer(case: Case, params: Any, **options: Any) -> Optimizer:
    """A new optimizer of the case's chain, random numbers from their beginning."""
    torch.manual_seed(0)
    return Optimizer(params, *case.links(), **options)


def step(case: Case, opt: torch.optim.Optimizer, at: Problem) -> None:
    """One step, with a closure where the case needs one."""
    if case.closure or case.target == "least squares":
        opt.step(at.closure())
    else:
        at.backward()
        opt.step()


def run(case: Case, at: Problem, steps: int, **options: Any) -> Optimizer:
    """Run a new optimizer for some steps."""
    opt = optimizer(case, at.params, **options)
    for _ in range(steps):
        step(case, opt, at)
    return opt


def snapshot(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies."""
    return [param.detach().clone() for param in params]


def same(first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float = 0.0) -> str | None:
    """None where the lists agree (relative to their size; 0: bit by bit), else where they differ."""
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        a, b = a.detach(), b.detach()
        if a.shape != b.shape or a.dtype is not b.dtype:
            return f"parameter {i} is {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        if torch.equal(a, b) or (tolerance == 0.0 and _equal_nan(a, b)):
            continue
        gap = float((a - b).abs().max() / (1e-300 + max(1.0, float(b.abs().max()))))
        if not gap <= tolerance:
            return f"parameter {i} differs by {gap:.3g}, at most {tolerance:g} is allowed"
    return None


def _equal_nan(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def moved(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether anything changed."""
    return any(not torch.equal(a.detach(), b.detach()) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Inside the block kernels are compiled ("c") or not ("eager")."""
    before = os.environ.get("MODULI_KERNELS")
    os.environ["MODULI_KERNELS"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["MODULI_KERNELS"]
        else:
            os.environ["MODULI_KERNELS"] = before


def eager(law: Callable[[Case], None]) -> Callable[[Case], None]:
    """Laws that are not about compiled kernels do not wait for the compiler."""

    def checked(case: Case) -> None:
        with backend("eager"):
            law(case)

    checked.__doc__ = law.__doc__
    checked.__name__ = law.__name__
    return checked
