"""The names in a chain: links, presets, torch's own optimizers, and a population to optimize.

A name is looked up in lists: the public links of `moduli.m`, the presets of `moduli.presets`, what other packages add as entry
points `moduli.links`, and, after ``torch.``, the optimizers of `torch.optim`. Only `FILE.py:Name` runs something, the file.
`Population(n)` at the head of a chain makes the rest of it optimize a population of n members instead of one model. Arguments are
checked against the signature before anything is made.
"""

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import optim
from .._plugins import PluginError, list_plugins, load_plugin, name_package, warn_of
from .._texts import shorten
from ..population import Population
from ._grammar import ChainSyntaxError, Link, ParsedChain, Value
from ._reference import ProblemFileError, load_object

__all__ = ["CatalogueEntry", "build", "check", "entries", "find", "make_links"]

KINDS = {
    "link": "a link",
    "preset": "a preset",
    "torch": "an optimizer of torch",
    "population": "a population",
    "factory": "a function of the model",
}


@dataclass(frozen=True)
class CatalogueEntry:
    """One name of the catalogue.

    Attributes:
        name: The name in a chain.
        kind: ``"link"``, ``"preset"``, ``"torch"``, ``"population"``, or ``"factory"`` for a function from a model to an optimizer.
        family: The part of the catalogue that it is in; for a name of another package, that package.
        make: The class or function that is called with the arguments.
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
        """The arguments that may be written in a chain: all but the parameters of an optimizer, or the model of a factory."""
        signature = inspect.signature(self.make)
        parameters = [p for p in signature.parameters.values() if p.name not in ("self", "params")]
        parameters = parameters[1:] if self.kind == "factory" else parameters
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
    """Return the whole catalogue, by name.

    >>> "torch.Adam" in entries(), "os.system" in entries()
    (True, False)
    """
    from .. import m, presets  # imported when the first chain is read

    catalogue = {
        "Population": CatalogueEntry("Population", "population", "population", _population, _population.__doc__ or "")
    }
    families = _find_families(m)
    for module, kind in ((m, "link"), (presets, "preset")):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) if kind == "link" else inspect.isfunction(value):
                family = families[name] if kind == "link" else kind
                catalogue[name] = CatalogueEntry(name, kind, family, value, inspect.getdoc(value) or "")
    for name, value in vars(torch.optim).items():
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer:
            catalogue[f"torch.{name}"] = CatalogueEntry(
                f"torch.{name}", "torch", "torch", value, inspect.getdoc(value) or ""
            )
    _add_plugins(catalogue)
    return catalogue


def _find_families(m: ModuleType) -> dict[str, str]:
    """Return the family of each link, by its name: the subpackage of `m` that has it."""
    return {
        name: family
        for family, part in vars(m).items()
        if inspect.ismodule(part) and part.__name__ == f"{m.__name__}.{family}" and family[0] != "_"
        for name in part.__all__
    }


def _add_plugins(catalogue: dict[str, CatalogueEntry]) -> None:
    """Add the links of other packages to the catalogue, and warn of those that cannot be added."""
    for name, point in list_plugins("links").items():
        if name in catalogue:
            warn_of(f"{name_package(point)} adds {name!r} to moduli.links, a name that moduli has: moduli's is used")
            continue
        try:
            catalogue[name] = _describe(name, load_plugin(point), name_package(point))
        except (PluginError, TypeError) as error:
            warn_of(str(error))


def _describe(name: str, value: Any, family: str) -> CatalogueEntry:
    """Return the entry of an object that is defined outside of moduli.

    Args:
        name: Its name in a chain.
        value: A class of links or of torch's optimizers; a function that returns links, whose arguments all have defaults; or
            a function from a model, its first argument, which has no default, to an optimizer.
        family: The package, or the file, that it is defined in.

    Raises:
        TypeError: When it is none of these.
    """
    kind = ""
    if inspect.isclass(value):
        kind = (
            "link" if issubclass(value, optim.Module) else "torch" if issubclass(value, torch.optim.Optimizer) else ""
        )
    elif callable(value) and not isinstance(value, nn.Module):
        first = next(iter(inspect.signature(value).parameters.values()), None)
        other_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needs_model = first is not None and first.default is first.empty and first.kind not in other_kinds
        kind = "factory" if needs_model else "preset"
    if not kind:
        fact = f"{name} of {family} is {shorten(value)}"
        raise TypeError(
            f"{fact}: in a chain there are classes of links and of optimizers, and functions that return them"
        )
    return CatalogueEntry(name, kind, family, value, inspect.getdoc(value) or "")


def find(name: str) -> CatalogueEntry:
    """Return the entry of a name.

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
        chain: A chain from `parse`.

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
        chain: A chain from `parse`.
        model: The model to optimize, or the template of a population.

    Returns:
        The optimizer, and the population that it optimizes or None.

    Raises:
        ChainSyntaxError: When the chain cannot be built.

    >>> from moduli.lab import parse
    >>> optimizer, population = build(parse("torch.SGD(lr=0.1)"), nn.Linear(2, 1))
    >>> type(optimizer).__name__, population
    ('SGD', None)
    """
    population, links = _assemble(chain)
    if isinstance(links[0], partial):
        return links[0](model), None
    target: Any = model if population is None else scatter(model, **population)
    try:
        return optim.Optimizer(target, *links), None if population is None else target
    except (TypeError, ValueError) as error:
        raise ChainSyntaxError(str(error), chain.source, 1, len(chain.source)) from error


def make_links(chain: ParsedChain) -> list[Any]:
    """Make and return new links of a chain.

    Args:
        chain: A chain from `parse`.

    Raises:
        ChainSyntaxError: When it can't be built, optimizes a population, or is an optimizer without links.

    >>> from moduli.lab import parse
    >>> [type(link).__name__ for link in make_links(parse("Adam | LR(0.1)"))]
    ['Adam', 'LR']
    """
    population, links = _assemble(chain)
    if population is not None or isinstance(links[0], partial):
        raise _make_error(f"{chain.links[0].name} is no link", chain.links[0], chain.source)
    return links


def _assemble(chain: ParsedChain) -> tuple[dict[str, Any] | None, list[Any]]:
    """Return the arguments of a population or None, and the links; for a whole optimizer, its function from a model."""
    population: dict[str, Any] | None = None
    links: list[Any] = []
    for position, link in enumerate(chain.links):
        part = _make(link, chain.source)
        if isinstance(part, partial) and len(chain.links) > 1:
            raise _make_error(
                f"{link.name} is a whole optimizer: it stands alone, without other links", link, chain.source
            )
        if isinstance(part, dict) and position:
            raise _make_error("Population stands at the head of a chain", link, chain.source)
        if isinstance(part, dict):
            population = part
        else:
            links.append(part)
    if not links:
        raise ChainSyntaxError("Population needs links after it", chain.source, len(chain.source))
    return population, links


def _make_error(fact: str, link: Link, source: str) -> ChainSyntaxError:
    """Return the error that marks a link in the text of its chain."""
    return ChainSyntaxError(fact, source, link.column, len(link.name))


def _find(link: Link, source: str) -> CatalogueEntry:
    """Return the entry of a link; raise ChainSyntaxError, which marks it in `source`, if there is none."""
    if ":" in link.name:
        return _find_in_file(link, source)
    catalogue = entries()
    if link.name in catalogue:
        return catalogue[link.name]
    try:
        if link.name in (plugins := list_plugins("links")):
            _describe(link.name, load_plugin(plugins[link.name]), name_package(plugins[link.name]))
    except (PluginError, TypeError) as error:
        raise _make_error(str(error), link, source) from error
    # Case first: `adam` for `Adam` is the commonest mistake, and no distance between strings finds `SGD` from `sgd`.
    same_letters = [name for name in catalogue if name.lower() == link.name.lower()]
    similar = same_letters or difflib.get_close_matches(link.name, catalogue, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else "; `moduli links` lists what there is"
    raise _make_error(f"nothing is called {link.name!r}{hint}", link, source)


def _find_in_file(link: Link, source: str) -> CatalogueEntry:
    """Return the entry of `FILE.py:Name`. The file is run."""
    file, _, name = link.name.rpartition(":")
    try:
        return _describe(name, load_object(Path(file).expanduser(), name), file)
    except (ProblemFileError, TypeError) as error:
        raise _make_error(str(error), link, source) from error
    except Exception as error:  # a user's file may raise anything
        raise _make_error(f"{file} raised {type(error).__name__}: {error}", link, source) from error


def _optimize_parameters(make: Callable[..., Any], options: dict[str, Any], model: nn.Module) -> Any:
    """Return torch's optimizer of the parameters of a model that require gradients."""
    return make([p for p in model.parameters() if p.requires_grad], **options)


def _check_arguments(link: Link, entry: CatalogueEntry, source: str) -> None:
    """Raise ChainSyntaxError if a link has an argument that its entry does not accept.

    Args:
        link: The link, parsed.
        entry: Its entry.
        source: The text of the chain, for errors.
    """
    parameters = entry.signature.parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for position, (key, value) in enumerate(link.kwargs, len(link.args)):
        if key not in parameters and not accepts_any:
            similar = difflib.get_close_matches(key, parameters, n=1)
            hint = (
                f"; did you mean {similar[0]!r}?" if similar else f"; it has {', '.join(parameters) or 'no arguments'}"
            )
            if entry.kind == "link" and key in ("lr", "learning_rate"):
                hint = f"; a step size is a link of its own: {link.name} | LR({value})"
            raise ChainSyntaxError(
                f"{link.name} has no argument {key!r}{hint}", source, link.columns[position], len(key)
            )


def _make(link: Link, source: str) -> Any:
    """Build one link of a chain.

    Args:
        link: The link, parsed.
        source: The text of the chain, for errors.

    Returns:
        A link, or the list of links of a preset; the arguments of a population as a dictionary; for a whole optimizer, a partial
        function from a model to it.
    """
    entry = _find(link, source)
    _check_arguments(link, entry, source)
    args = [_build_value(value, source) for value in link.args]
    kwargs = {key: _build_value(value, source) for key, value in link.kwargs}
    if entry.kind in ("torch", "factory"):
        if args:
            raise ChainSyntaxError(f"arguments of {link.name} are given by name", source, link.columns[0])
        is_factory = entry.kind == "factory"
        return partial(entry.make, **kwargs) if is_factory else partial(_optimize_parameters, entry.make, kwargs)
    try:
        result = entry.make(*args, **kwargs)
        parts = result if isinstance(result, list | tuple) else [result]
        if entry.kind != "population" and not all(isinstance(each, optim.Module) for each in parts):
            raise TypeError(f"it returned {shorten(result)}, not links")
        return result
    except (TypeError, ValueError) as error:
        fact = str(error) if str(error).startswith(link.name) else f"{link.name}: {error}"
        raise _make_error(fact, link, source) from error


def _build_value(value: Value, source: str) -> Any:
    """Return an argument, in which chains are built; `source` is for errors."""
    if isinstance(value, ParsedChain):
        links = [_make(link, source) for link in value.links]
        for link, each in zip(value.links, links, strict=True):
            if isinstance(each, partial | dict):
                raise _make_error(
                    f"{link.name} is {KINDS[_find(link, source).kind]} and cannot be an argument", link, source
                )
        return links[0] if len(links) == 1 else optim.Chain(*links)
    if isinstance(value, list):
        return [_build_value(part, source) for part in value]
    return tuple(_build_value(part, source) for part in value) if isinstance(value, tuple) else value


def scatter(model: nn.Module, *, size: int, spread: float, seed: int) -> Population:
    """Return a population whose first member is the model; the others are drawn around it from a normal distribution.

    Args:
        model: The model; the population has copies of it.
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
