"""Who runs: a chain, or any factory of optimizers, and what it becomes when it meets a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import catalogue
from ._grammar import ParsedChain, parse


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
        source: The chain as text, or where its factory is defined: with it, the run can be repeated.
        factory: From a model to an `Entrant`, or to an object with ``step(closure)``.
    """

    label: str
    source: str
    factory: Callable[[nn.Module], Any]

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain as text, which `source` has all of."""
        return isinstance(self.factory, _FromChain)

    def enter(self, model: nn.Module) -> Entrant:
        """Meet a model.

        >>> from moduli.lab import contender, problems
        >>> contender("torch.SGD(lr=0.1)").enter(problems.get("rosenbrock").model(0)).points()
        tensor([[-1.2000,  1.0000]], dtype=torch.float64)
        """
        made = self.factory(model)
        if not isinstance(made, Entrant):
            made = Entrant(model, made)
        if not callable(getattr(made.optimizer, "step", None)):
            raise TypeError(f"{self.label}: a contender makes an optimizer with step(closure), not {made.optimizer!r}")
        return made


@dataclass(frozen=True)
class _FromChain:
    chain: ParsedChain

    def __call__(self, model: nn.Module) -> Entrant:
        return Entrant(model, *catalogue.build(self.chain, model))


def contender(spec: str | ParsedChain | Callable[[nn.Module], Any] | Contender, label: str | None = None) -> Contender:
    """Make a contender.

    Args:
        spec: A chain as text (``"ClipNorm(1) | Adam | LR(1e-2)"``, ``"lbfgs"``, ``"torch.Adam(lr=0.01)"``), or a function from
            a model to an optimizer with ``step(closure)``, where ``closure(backward=True)`` gives the loss.
        label: What reports call it; without it, the chain, or the function's name.

    Raises:
        ChainSyntaxError: When the text is no chain, or names what does not exist.

    >>> contender("torch.SGD( lr=0.1 )").label
    'torch.SGD(lr=0.1)'
    """
    if isinstance(spec, Contender):
        return spec if label is None else Contender(label, spec.source, spec.factory)
    if isinstance(spec, str | ParsedChain):
        chain = parse(spec) if isinstance(spec, str) else spec
        catalogue.check(chain)
        return Contender(label or str(chain), str(chain), _FromChain(chain))
    if not callable(spec):
        raise TypeError(f"a contender is a chain or a function of a model, not {spec!r}")
    name = getattr(spec, "__name__", type(spec).__name__)
    module = getattr(spec, "__module__", "")
    return Contender(label or name, f"{module}:{getattr(spec, '__qualname__', name)}", spec)
