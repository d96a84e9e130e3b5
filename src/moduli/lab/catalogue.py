"""What the names in a chain mean: links, presets, torch's own optimizers, and a population to move.

A name is looked up in lists and nowhere else: the public links of `moduli.m`, the presets of `moduli.presets`, and, after
``torch.``, the optimizers of `torch.optim`. `Population(n)` at the head of a chain makes the rest of it move a population of
n members instead of one model. Arguments are checked against the signature before anything is made. A `Contender` is a chain, or
any factory of optimizers, and an `Entrant` what it becomes when it meets a model.
"""

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from .. import optim
from .._texts import shorten
from ..population import Population
from ._grammar import ChainSyntaxError, Link, ParsedChain, Value, parse

__all__ = ["CatalogueEntry", "build", "check", "entries", "find"]

KINDS = {"link": "a link", "preset": "a preset", "torch": "an optimizer of torch", "population": "a population"}


@dataclass(frozen=True)
class CatalogueEntry:
    """One name of the catalogue.

    Attributes:
        name: The name in a chain.
        kind: ``"link"``, ``"preset"``, ``"torch"`` or ``"population"``.
        family: The part of the catalogue that it is in.
        make: What is called with the arguments.
        doc: Its documentation.

    >>> find("torch.SGD").summary
    'Implements stochastic gradient descent (optionally with momentum).'
    """

    name: str
    kind: str
    family: str
    make: Callable[..., Any]
    doc: str

    @property
    def summary(self) -> str:
        """The first sentence of the documentation."""
        text = " ".join(self.doc.strip().split("\n\n")[0].split())
        end = text.find(". ")
        return text if end < 0 else text[: end + 1]

    @property
    def signature(self) -> inspect.Signature:
        """The arguments that may be written in a chain: for torch's optimizers, all but the parameters."""
        signature = inspect.signature(self.make)
        parameters = [p for p in signature.parameters.values() if p.name not in ("self", "params")]
        return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _population(size: int = 16, *, spread: float = 1.0, seed: int = 0) -> dict[str, Any]:
    """Move a population instead of one model; stands at the head of a chain.

    The first member is where the model starts, the others are at a normal distance of `spread` from it.

    Args:
        size: How many members.
        spread: The standard deviation of the start, in every parameter.
        seed: Added to the seed of the run.
    """
    if size < 1:
        raise ValueError(f"a population has at least one member, not {shorten(size)}")
    if not (math.isfinite(spread) and spread >= 0):
        raise ValueError(f"spread is a finite number of at least zero, not {shorten(spread)}")
    return {"size": size, "spread": float(spread), "seed": int(seed)}


@cache
def entries() -> dict[str, CatalogueEntry]:
    """The whole catalogue, by name.

    >>> "torch.Adam" in entries(), "os.system" in entries()
    (True, False)
    """
    from .. import m, presets  # imported when the first chain is read

    found = {
        "Population": CatalogueEntry("Population", "population", "population", _population, _population.__doc__ or "")
    }
    for module, kind in ((m, "link"), (presets, "preset")):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) if kind == "link" else inspect.isfunction(value):
                parts = value.__module__.removeprefix(module.__name__).strip(".").split(".")
                family = parts[0] if kind == "link" else kind
                found[name] = CatalogueEntry(name, kind, family, value, inspect.getdoc(value) or "")
    for name, value in vars(torch.optim).items():
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer:
            found[f"torch.{name}"] = CatalogueEntry(
                f"torch.{name}", "torch", "torch", value, inspect.getdoc(value) or ""
            )
    return found


def find(name: str) -> CatalogueEntry:
    """The entry of this name.

    Raises:
        ChainSyntaxError: When there is none; the message suggests the nearest names.

    >>> find("torch.SDG")
    Traceback (most recent call last):
    ...
    moduli.lab._grammar.ChainSyntaxError: nothing is called 'torch.SDG'; did you mean 'torch.SGD'...
    """
    return _find(Link(name), "")


def check(chain: ParsedChain) -> None:
    """Make sure that a chain can be built: all names exist and their arguments fit.

    Args:
        chain: What `parse` gave.

    Raises:
        ChainSyntaxError: When it cannot; the message points at the column.

    >>> from moduli.lab import parse
    >>> check(parse("torch.SGD(lr=0.1, momentun=0.9)"))
    Traceback (most recent call last):
    ...
    moduli.lab._grammar.ChainSyntaxError: torch.SGD has no argument 'momentun'; did you mean 'momentum'? (column 19)
      torch.SGD(lr=0.1, momentun=0.9)
                        ^^^^^^^^
    """
    _assemble(chain)


def build(chain: ParsedChain, model: nn.Module) -> tuple[Any, Any]:
    """Build the optimizer that a chain describes.

    Args:
        chain: What `parse` gave.
        model: What it is to move, or a population's template.

    Returns:
        The optimizer, and the population that it moves or None.

    Raises:
        ChainSyntaxError: When the chain cannot be built.

    >>> from moduli.lab import parse
    >>> optimizer, population = build(parse("torch.SGD(lr=0.1)"), nn.Linear(2, 1))
    >>> type(optimizer).__name__, population
    ('SGD', None)
    """
    population, links = _assemble(chain)
    if isinstance(links[0], partial):
        return links[0]([p for p in model.parameters() if p.requires_grad]), None
    target: Any = model if population is None else scatter(model, **population)
    try:
        return optim.Optimizer(target, *links), None if population is None else target
    except (TypeError, ValueError) as error:
        raise ChainSyntaxError(str(error), chain.source, 1, len(chain.source)) from error


def _assemble(chain: ParsedChain) -> tuple[dict[str, Any] | None, list[Any]]:
    """The arguments of a population, and the links; or None, and an optimizer of torch without its parameters."""
    population: dict[str, Any] | None = None
    links: list[Any] = []
    for place, link in enumerate(chain.links):
        made = _make(link, chain.source)
        if isinstance(made, partial) and len(chain.links) > 1:
            raise _refuse(f"{link.name} is a whole optimizer: it stands alone, without other links", link, chain.source)
        if isinstance(made, dict) and place:
            raise _refuse("Population stands at the head of a chain", link, chain.source)
        if isinstance(made, dict):
            population = made
        else:
            links.append(made)
    if not links:
        raise ChainSyntaxError("Population needs links after it", chain.source, len(chain.source))
    return population, links


def _refuse(fact: str, link: Link, source: str) -> ChainSyntaxError:
    return ChainSyntaxError(fact, source, link.column, len(link.name))


def _find(link: Link, source: str) -> CatalogueEntry:
    known = entries()
    if link.name in known:
        return known[link.name]
    # Case first: `adam` for `Adam` is the commonest mistake, and no distance between strings finds `SGD` from `sgd`.
    same = [name for name in known if name.lower() == link.name.lower()]
    near = same or difflib.get_close_matches(link.name, known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; `moduli links` lists what there is"
    raise _refuse(f"nothing is called {link.name!r}{hint}", link, source)


def _make(link: Link, source: str) -> Any:
    """What a link of a chain stands for; an optimizer of torch waits for its parameters."""
    entry = _find(link, source)
    known = entry.signature.parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for place, (key, value) in enumerate(link.kwargs, len(link.args)):
        if key not in known and not free:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known) or 'no arguments'}"
            if entry.kind == "link" and key in ("lr", "learning_rate"):
                hint = f"; a step size is a link of its own: {link.name} | LR({value})"
            raise ChainSyntaxError(f"{link.name} has no argument {key!r}{hint}", source, link.columns[place], len(key))
    args = [_value(value, source) for value in link.args]
    kwargs = {key: _value(value, source) for key, value in link.kwargs}
    if entry.kind == "torch":
        if args:
            raise ChainSyntaxError(f"arguments of {link.name} are given by name", source, link.columns[0])
        return partial(entry.make, **kwargs)
    try:
        return entry.make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        fact = str(error) if str(error).startswith(link.name) else f"{link.name}: {error}"
        raise _refuse(fact, link, source) from error


def _value(value: Value, source: str) -> Any:
    if isinstance(value, ParsedChain):
        made = [_make(link, source) for link in value.links]
        for link, each in zip(value.links, made, strict=True):
            if isinstance(each, partial | dict):
                raise _refuse(
                    f"{link.name} is {KINDS[_find(link, source).kind]} and cannot be an argument", link, source
                )
        return made[0] if len(made) == 1 else optim.Chain(*made)
    if isinstance(value, list):
        return [_value(part, source) for part in value]
    return tuple(_value(part, source) for part in value) if isinstance(value, tuple) else value


def scatter(model: nn.Module, *, size: int, spread: float, seed: int) -> Population:
    """A population of which the first member is the model, and the others lie around it.

    Args:
        model: Where it starts; the population has copies.
        size: How many members.
        spread: The standard deviation of the others, in every parameter.
        seed: Added to torch's seed, so that runs from other seeds start with other clouds.
    """
    generator = torch.Generator().manual_seed((torch.initial_seed() + seed + 1) % 2**63)
    population = Population.of(model, size, init=spread, generator=generator)
    with torch.no_grad():
        for (_, stacked), start in zip(population.named_parameters(), model.parameters(), strict=True):
            stacked[0] = start
    return population


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
        made = Entrant(model, *build(parse(self.source), model)) if self.factory is None else self.factory(model)
        if not isinstance(made, Entrant):
            made = Entrant(model, made)
        if not callable(getattr(made.optimizer, "step", None)):
            raise TypeError(
                f"{self.label}: a contender makes an optimizer with step(closure), not {shorten(made.optimizer)}"
            )
        return made


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
        check(chain)
        return Contender(label or str(chain), str(chain), None)
    if not callable(spec):
        raise TypeError(f"a contender is a chain or a function of a model, not {shorten(spec)}")
    name = getattr(spec, "__name__", type(spec).__name__)
    module = getattr(spec, "__module__", "")
    return Contender(label or name, f"{module}:{getattr(spec, '__qualname__', name)}", spec)
