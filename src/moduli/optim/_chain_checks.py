"""Checks of a chain before its first step: each link is used once, and the needs of each are met."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._device_numbers import DeviceSteps, check_capturable
from ._needs import Across, ChainError, Need
from ._processes import find_across
from .forms import members
from .forms.graph import check_differentiable

if TYPE_CHECKING:
    from . import Module, Optimizer


def claim_links(optimizer: Optimizer) -> list[tuple[str, Module]]:
    """Return all links with their paths; raise ChainError if one is used twice or belongs to another optimizer."""
    out: list[tuple[str, Module]] = []
    seen: dict[int, str] = {}
    for i, top in enumerate(optimizer.modules):
        for path, link in top.links():
            here = f"{i}.{type(top).__name__}" + (f"/{path}" if path else "")
            name = type(link).__name__
            if id(link) in seen:
                raise ChainError(f"the same {name} is used twice, at {seen[id(link)]} and {here}; make two")
            owner = None if link._owner is None else link._owner()
            if owner is not None and owner is not optimizer:
                raise ChainError(f"{name} at {here} already belongs to another optimizer; make a new {name}(...)")
            seen[id(link)] = here
            out.append((here, link))
    return out


def check_chain(optimizer: Optimizer) -> None:
    """Raise ChainError for links that can't work: on their own, without a population, or with this one."""
    links, population = optimizer._links, optimizer.population
    for path, link in links:
        link.check()
        if link.is_last and link is not optimizer.modules[-1]:
            raise ChainError(
                f"{type(link).__name__} at {path} must be the last link of the optimizer: it rounds the parameters that the "
                "update leads to, and links after it would change the update"
            )
    if Need.MEMBERS in optimizer._needs and population is None:
        name = next(type(link).__name__ for _, link in links if Need.MEMBERS in link.needs)
        raise ChainError(f"{name} moves the members of a population; give the optimizer a population")
    if population is not None:
        for top in optimizer.modules:
            members.check(top)
        for path, link in links:
            members.check_link(path, link, len(population), population.sharding)


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def check_shares(links: Sequence[Module]) -> None:
    """Raise ChainError for links that need all parameters where ZeroRedundancyOptimizer gives each process some of them.

    It constructs an optimizer as any program does, so it is recognised by the calling frames.
    """
    frames = itertools.islice(traceback.walk_stack(None), 12) if _ZERO in sys.modules else ()
    inside = any(frame.f_globals.get("__name__") == _ZERO for frame, _ in frames)
    for link in links if inside else ():
        across = find_across(link)
        if across in (Across.SUMS, Across.EVERYTHING):
            raise ChainError(f"{type(link).__name__} needs {across.value}, which ZeroRedundancyOptimizer can't give")


def check_options(optimizer: Optimizer, capturable: bool) -> None:
    """Prepare steps that are captured; raise an error if the chain can't be captured in a graph, or can't be differentiated."""
    if capturable:
        check_capturable([link for _, link in optimizer._links], optimizer.binding.fuse)
        optimizer.binding.device_steps = DeviceSteps()
    if not optimizer.differentiable:
        return
    if optimizer.maximize:
        raise ValueError("a differentiable step descends; negate the loss in the closure instead of maximize=True")
    check_differentiable(optimizer.modules)
    if optimizer.population is not None:
        raise ChainError("a population's members share one storage, which can't be differentiated through")
