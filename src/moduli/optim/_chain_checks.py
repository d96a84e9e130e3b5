"""What an optimizer asks of its chain when it is built: each link used once, and everything it needs there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _differentiable, _members
from ._needs import ChainError, Need
from .chain import Chain

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer


def claim_links(optimizer: Optimizer) -> list[tuple[str, Module]]:
    """All links with their paths; each may be used once, in one optimizer."""
    out: list[tuple[str, Module]] = []
    seen: dict[int, str] = {}
    for i, top in enumerate(optimizer.modules):
        for path, link in top.links():
            here = f"{i}.{type(top).__name__}" + (f"/{path}" if path else "")
            name = type(link).__name__
            if id(link) in seen:
                raise ChainError(
                    f"the same {name} is used twice, at {seen[id(link)]} and {here}: its state would be shared. "
                    f"Make two: {name}(...), {name}(...)"
                )
            owner = None if link._owner is None else link._owner()
            if owner is not None and owner is not optimizer:
                raise ChainError(
                    f"{name} at {here} already belongs to another optimizer, and its state would be shared; "
                    f"make a new {name}(...), or copy.deepcopy the link before its first use"
                )
            seen[id(link)] = here
            out.append((here, link))
    return out


def check_chain(optimizer: Optimizer) -> None:
    """Refuse links that can't work here: by themselves, without a population, or with this one."""
    links, population = optimizer._links, optimizer.population
    for _, link in links:
        link.check()
    if Need.MEMBERS in optimizer._needs and population is None:
        name = next(type(link).__name__ for _, link in links if Need.MEMBERS in link.needs)
        raise ChainError(
            f"{name} moves the members of a population relative to each other; give the optimizer a population: "
            f"Optimizer(mo.Population.of(net, 64), ...)"
        )
    if population is not None:
        for top in optimizer.modules:
            _members.check(top)
        for path, link in links:
            _members.check_link(path, link, len(population), population.sharding)


def check_capturable(links: Sequence[Module]) -> None:
    """Refuse what a captured graph would repeat with the numbers of the step at which it was captured."""
    for link in links:
        changes = getattr(link, "counts", False) or any(callable(value) for value in link.defaults.values())
        if changes or not getattr(link, "elementwise", isinstance(link, Chain)):
            raise ChainError(
                f"{type(link).__name__} counts or decides in Python, so that a captured graph would repeat one step of it; "
                "leave capturable=False, or capture the evaluation of the model alone"
            )


def check_differentiable(optimizer: Optimizer) -> None:
    """Refuse what autograd can't see through."""
    if optimizer.maximize:
        raise ValueError("a differentiable step descends; negate the loss in the closure instead of maximize=True")
    _differentiable.check(optimizer.modules)
    if optimizer.population is not None:
        raise ChainError("a population's members share one storage, which can't be differentiated through")


def check_hints(fuse: Any, foreach: Any, fused: Any) -> None:
    """Refuse hints that are neither a yes nor a no."""
    if fuse not in ("auto", False):
        raise ValueError(f"fuse is {fuse!r}; it is 'auto' or False")
    for key, hint in (("foreach", foreach), ("fused", fused)):
        if hint not in (None, True, False):
            raise ValueError(f"{key} is {hint!r}; it is a hint: True, False or None")
