"""The law book's table: one row per link (or chain) puts it under every law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One link, in the smallest chain that makes it an optimizer.

    Attributes:
        name: What the tests print.
        make: New links at each call, the chain in order.
        steps: How many steps it may take on its target problem.
        target: The problem it must solve: "bowl" (a convex quadratic), "rosenbrock", "least squares" (the closure returns
            residuals), or "" for a link that is no optimizer by itself (then only the structural laws apply).
        tolerance: How near to the optimum's value it must come.
        reference: An independent implementation: a function of the parameters that returns a torch optimizer, or a function
            `(params, grads, memory, step) -> None` that moves the parameters by the formula written out (memory is a
            dict of its own per parameter list), to be equalled to 1e-10 in float64.
        closure: Whether a step needs a closure (line searches, second order); otherwise it also runs on `.grad` alone.
        random: Whether a step draws random numbers (then equalities use a fixed seed).
        pieces: Whether one tensor and its pieces give the same step (elementwise and concatenating links).
        population: Whether it runs on a population as N separate optimizers would.
        complex: Whether it takes complex parameters.
        half: Whether it takes half-precision parameters.
        skip: Laws that do not apply, by name, each with the reason.
    """

    name: str
    make: Callable[[], Sequence[Any]]
    steps: int = 500
    target: str = "bowl"
    tolerance: float = 1e-3
    reference: Callable[..., Any] | None = None
    closure: bool = False
    random: bool = False
    pieces: bool = True
    population: bool = True
    complex: bool = True
    half: bool = True
    skip: dict[str, str] | None = None

    def __str__(self) -> str:
        return self.name


def formula(step: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]) -> Callable[..., None]:
    """A reference for `Row` from the update of one tensor: `step(param, grad, memory, t) -> update`, t from 1."""

    def move(params: Sequence[Tensor], grads: Sequence[Tensor], memory: dict[Any, Any], t: int) -> None:
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.data.sub_(step(param.data, grad, memory.setdefault(i, {}), t))

    return move
