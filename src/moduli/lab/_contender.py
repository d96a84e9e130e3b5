"""What takes part in a race or a fit.

A `Contender` is a chain, or any factory of optimizers, and an `Entrant` what it becomes when it meets a model.
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
    """A contender that has met a model: an optimizer, and what it moves.

    Attributes:
        model: The model, at its starting point.
        optimizer: Something with ``step(closure)``.
        population: The population it moves, or None when it moves the model itself.
        losses: The members' losses at the last evaluation.
    """

    def __init__(self, model: nn.Module, optimizer: Any, population: Any = None) -> None:
        self.model, self.optimizer, self.population = model, optimizer, population
        self.losses: torch.Tensor | None = None
        # Looked at after every step: walking the modules would cost as much as the step of a small problem.
        self._parameters = list(model.parameters())

    def finite(self) -> bool:
        """Whether all parameters are finite. A population is lost only when every member is."""
        if self.population is not None:
            return bool(self.population.matrix.isfinite().all(-1).any())
        return all(bool(parameter.isfinite().all()) for parameter in self._parameters)

    @property
    def finished(self) -> str:
        """Why the optimizer wants to end, when one of its links ends chains; otherwise nothing."""
        if not getattr(self.optimizer, "should_terminate", False):
            return ""
        return ", ".join(map(str, getattr(self.optimizer, "reasons", ()))) or "a link asked to stop"

    def best(self) -> Callable[..., Any]:
        """The model, or the best member at the last evaluation."""
        if self.population is None or self.losses is None:
            return self.model
        member: Callable[..., Any] = self.population[int(self.losses.argmin())]
        return member

    def points(self) -> torch.Tensor:
        """All members as rows."""
        if self.population is not None:
            matrix: torch.Tensor = self.population.matrix.detach()
            return matrix
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters])[None]


@dataclass(frozen=True)
class Contender:
    """Something that can minimise.

    Attributes:
        label: What reports call it.
        source: What tells contenders apart: the chain as text, with which the run can be repeated, or where the factory is
            defined, after the label if it was given one.
        factory: From a model to an `Entrant`, or to an object with ``step(closure)``; None for a chain as text.
    """

    label: str
    source: str
    factory: Callable[[nn.Module], Any] | None

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain as text, which `source` has all of."""
        return self.factory is None

    def enter(self, model: nn.Module) -> Entrant:
        """Meet a model.

        >>> from moduli.lab import contender, problems
        >>> contender("torch.SGD(lr=0.1)").enter(problems.get("rosenbrock").model(0)).points()
        tensor([[-1.2000,  1.0000]], dtype=torch.float64)
        """
        made, population = build(parse(self.source), model) if self.factory is None else (self.factory(model), None)
        if not isinstance(made, Entrant):
            made = Entrant(model, made, population)
        if not callable(getattr(made.optimizer, "step", None)):
            raise TypeError(
                f"{self.label}: a contender makes an optimizer with step(closure), not {shorten(made.optimizer)}"
            )
        return made


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
    place = f"{module}:{getattr(spec, '__qualname__', name)}"
    # Closures of one function have one place: labels tell them apart.
    return Contender(label or name, f"{label}: {place}" if label else place, spec)
