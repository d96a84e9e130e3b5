"""What a law is told about a link, and what it says where the law is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..optim import Module

TARGETS = ("bowl", "rosenbrock", "least squares", "")


class LawError(AssertionError):
    """A link breaks a law; the sentence names the law, the link, and what differed.

    Example:
        >>> from moduli.testing import LawError
        >>> issubclass(LawError, AssertionError)
        True
    """


class NotApplicable(Exception):
    """Raised by a law that says nothing about this link; the text is the reason."""


@dataclass(frozen=True)
class Case:
    """One link, in the smallest chain that makes it an optimizer, and what may be expected of it.

    Args:
        name: What reports and tests print.
        make: Makes new links at each call, the chain in order.
        steps: How many steps it may take on its target problem.
        target: The problem it must solve: "bowl" (a convex quadratic), "rosenbrock", "least squares" (the closure
            returns residuals), or "" for a link that is no optimizer by itself (then only the structural laws apply).
        tolerance: How near to the optimum's value it must come.
        reference: An independent implementation: a function of the parameters that returns a torch optimizer, or a
            function `(params, grads, memory, step) -> None` that moves the parameters by the formula written out
            (memory is a dictionary of its own), to be equalled to 1e-10 in float64.
        closure: Whether a step needs a closure (line searches, second order); otherwise it also runs on `.grad` alone.
        random: Whether a step draws random numbers (then equalities use a fixed seed).
        pieces: Whether one tensor and its pieces give the same step (elementwise and concatenating links).
        population: Whether it runs on a population as N separate optimizers would.
        members: For links that move the members of a population relative to each other: how many members the population
            has that every law gives them; 0 gives them one model. The best member must solve the target problem.
        complex: Whether it takes complex parameters.
        half: Whether it takes half-precision parameters.
        skip: Laws that do not apply, by name, each with the reason.

    Example:
        >>> from moduli import m
        >>> from moduli.testing import Case
        >>> print(Case("plain descent", lambda: [m.LR(0.1)]))
        plain descent
    """

    name: str
    make: Callable[[], Module | Sequence[Module]]
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
    members: int = 0
    skip: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"{self.name}: target is {self.target!r}; it is one of {', '.join(map(repr, TARGETS))}")

    def __str__(self) -> str:
        return self.name

    def links(self) -> list[Module]:
        """New links."""
        made = self.make()
        return [made] if isinstance(made, Module) else list(made)

    def fail(self, law: str, what: str) -> LawError:
        """The error for a broken law."""
        return LawError(f"{self.name} breaks the law {law!r}: {what}")


@dataclass(frozen=True)
class Report:
    """What `check_link` found: the laws that hold, and those that do not apply, with the reason.

    Example:
        >>> from moduli.testing import Report
        >>> print(Report("Adam", ("duplicates",), {"reference": "it has no reference"}))
        Adam: 1 law holds, 1 does not apply
          reference: it has no reference
    """

    name: str
    held: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        held, left = len(self.held), len(self.skipped)
        head = f"{self.name}: {held} law{'s hold' if held != 1 else ' holds'}, {left} do{'es' * (left == 1)} not apply"
        return "\n".join([head, *(f"  {law}: {why}" for law, why in self.skipped.items())])
