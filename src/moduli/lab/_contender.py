"""Contenders of races and fits.

A `Contender` is a chain, or any factory of optimizers; an `Entrant` is a contender with the model that it optimizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._texts import shorten
from ._grammar import ParsedChain, parse
from .catalogue import build, check


class Entrant:
    """A contender with its model: the optimizer, and what it optimizes.

    Attributes:
        model: The model, at its starting point.
        optimizer: Something with ``step(closure)``.
        population: The population that it optimizes, or None when it optimizes the model itself.
        losses: The members' losses at the last evaluation.
    """

    def __init__(self, model: nn.Module, optimizer: Any, population: Any = None) -> None:
        self.model, self.optimizer, self.population = model, optimizer, population
        self.losses: torch.Tensor | None = None
        # Listed once, because `finite` reads them after every step: walking the modules takes as long as a small step.
        self._parameters = list(model.parameters())

    def finite(self) -> bool:
        """Whether all parameters of the model, or of at least one member of the population, are finite."""
        if self.population is not None:
            return bool(self.population.matrix.isfinite().all(-1).any())
        return all(bool(parameter.isfinite().all()) for parameter in self._parameters)

    @property
    def finished(self) -> str:
        """The reasons for which links of the optimizer end the run; an empty text if none does."""
        if not getattr(self.optimizer, "should_terminate", False):
            return ""
        return ", ".join(map(str, getattr(self.optimizer, "reasons", ()))) or "a link asked to stop"

    def best(self) -> Callable[..., Any]:
        """Return the model, or the best member at the last evaluation."""
        if self.population is None or self.losses is None:
            return self.model
        member: Callable[..., Any] = self.population[int(self.losses.argmin())]
        return member

    def points(self) -> torch.Tensor:
        """Return the parameters of all members as rows of a matrix; a model is one row."""
        if self.population is not None:
            matrix: torch.Tensor = self.population.matrix.detach()
            return matrix
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters])[None]


@dataclass(frozen=True)
class Contender:
    """Something that can minimise.

    Attributes:
        label: What reports call it.
        source: The key of the contender: the chain as text, with which the run can be repeated, or the place where the factory
            is defined, after the label if one was passed.
        factory: From a model to an `Entrant`, or to an object with ``step(closure)``; None for a chain as text.
    """

    label: str
    source: str
    factory: Callable[[nn.Module], Any] | None

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain as text, so that `source` describes it completely."""
        return self.factory is None

    def enter(self, model: nn.Module) -> Entrant:
        """Make the optimizer of a model, and return both as an `Entrant`.

        >>> from moduli.lab import contender, problems
        >>> contender("torch.SGD(lr=0.1)").enter(problems.get("rosenbrock").model(0)).points()
        tensor([[-1.2000,  1.0000]], dtype=torch.float64)
        """
        result, population = build(parse(self.source), model) if self.factory is None else (self.factory(model), None)
        if not isinstance(result, Entrant):
            result = Entrant(model, result, population)
        if not callable(getattr(result.optimizer, "step", None)):
            raise TypeError(
                f"{self.label}: a contender makes an optimizer with step(closure), not {shorten(result.optimizer)}"
            )
        return result


def contender(spec: str | ParsedChain | Callable[[nn.Module], Any] | Contender, label: str | None = None) -> Contender:
    """Make a contender.

    Args:
        spec: A chain as text (``"ClipNorm(1) | Adam | LR(1e-2)"``, ``"lbfgs"``, ``"torch.Adam(lr=0.01)"``,
            ``"mine.py:SoftSign | LR(0.01)"``, which runs the file), or a function from a model to an optimizer with
            ``step(closure)``, where ``closure(backward=True)`` gives the loss.
        label: What reports call it; without it, the chain, or the function's name. Two closures of one function are two
            contenders if they have labels.

    Raises:
        ChainSyntaxError: When the text is no chain, or names what does not exist.

    >>> contender("torch.SGD( lr=0.1 )").label
    'torch.SGD(lr=0.1)'
    """
    if isinstance(spec, Contender):
        if label is None:
            return spec
        return Contender(label, spec.source, None) if spec.factory is None else contender(spec.factory, label)
    if isinstance(spec, str | ParsedChain):
        chain = parse(spec) if isinstance(spec, str) else spec
        check(chain)
        return Contender(label or str(chain), str(chain), None)
    if not callable(spec):
        raise TypeError(f"a contender is a chain or a function of a model, not {shorten(spec)}")
    name = getattr(spec, "__name__", type(spec).__name__)
    module = getattr(spec, "__module__", "")
    location = f"{module}:{getattr(spec, '__qualname__', name)}"
    # Closures of one function have the same location: labels distinguish them.
    return Contender(label or name, f"{label}: {location}" if label else location, spec)
