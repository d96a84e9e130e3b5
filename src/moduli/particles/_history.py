"""The past of a species: its edits as sentences, and models of an older version brought to a newer one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from . import _derive
from ._record import Species, record_of
from ._species import current, require, version_of
from ._template import POLICY
from .errors import StructureError

__all__ = ["SpeciesView", "buffer_policy", "history", "migrate", "species"]

T = TypeVar("T", bound=nn.Module)

_POLICIES = ("copy", "share", "operate", "reset")


class SpeciesView:
    """The species of a particle, as `species` gives it.

    Example:
        >>> from moduli.particles import adopt, species
        >>> a, b = adopt(nn.Linear(2, 1)), adopt(nn.Linear(2, 1))
        >>> species(a) == species(a.clone()), species(a) == species(b)
        (True, False)
    """

    def __init__(self, inner: Species) -> None:
        self._inner = inner

    def history(self) -> list[str]:
        """The edits so far, oldest first, as sentences.

        Example:
            >>> from moduli.particles import adopt, species
            >>> net = adopt(nn.Sequential(nn.Linear(2, 2)))
            >>> twin = net.clone()
            >>> _ = net.append(nn.Linear(2, 1))
            >>> species(twin).history()
            ["version 1: module '1' was assigned a Linear"]
        """
        return [f"version {event.number}: {event.sentence}" for event in self._inner.events]

    @property
    def version(self) -> int:
        """How many edits there were."""
        return len(self._inner.events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpeciesView) and self._inner is other._inner

    def __hash__(self) -> int:
        return hash(id(self._inner))

    def __repr__(self) -> str:
        return f"<species at version {self.version}>"


def species(module: nn.Module) -> SpeciesView:
    """The species of a particle: all particles derived from it, and those it was derived from.

    Example:
        >>> from moduli.particles import adopt, species
        >>> species(adopt(nn.Linear(2, 1)))
        <species at version 0>
    """
    root = require(module)._particle_root
    if not record_of(root).wrapped:
        current(root)
    return SpeciesView(version_of(root).data.species)


def history(module: nn.Module) -> list[str]:
    """The edits of a particle's species so far, oldest first, as sentences.

    Example:
        >>> from moduli.particles import NytoModule, history
        >>> net = NytoModule()
        >>> twin = net.clone()
        >>> net.w = nn.Parameter(torch.zeros(2))
        >>> history(twin)
        ["version 1: parameter 'w' was assigned of shape (2,)"]
    """
    return species(module).history()


def migrate(source: nn.Module | Mapping[str, Tensor], to: T) -> T:
    """Bring the values of an older version into the newest structure.

    Names that edits of the species added since have the values they have in `to`; names that edits removed are left out.
    A difference that no edit explains is an error.

    Args:
        source: A module, or the state dict of one.
        to: A particle of the species; the result is a new one like it.

    Raises:
        StructureError: If names or shapes differ for another reason than edits.

    Example:
        >>> from moduli.particles import adopt, migrate
        >>> net = adopt(nn.Sequential(nn.Linear(2, 2)))
        >>> twin, old = net.clone(), {k: v.clone() for k, v in net.state_dict().items()}
        >>> _ = net.append(nn.Linear(2, 1))
        >>> new = migrate(old, net)
        >>> torch.equal(new[0].weight, old["0.weight"]), torch.equal(new[1].weight, net[1].weight)
        (True, True)
    """
    target = require(to)
    current(target)
    events = version_of(target._particle_root).data.species.events
    added = {name for event in events for name in event.added}
    removed = {name for event in events for name in event.removed}
    given = dict(source.state_dict() if isinstance(source, nn.Module) else source)
    made = _derive.duplicate(target)
    held = made.state_dict()
    for name, value in held.items():
        older = given.get(name)
        if isinstance(value, Tensor) and isinstance(older, Tensor) and value.shape == older.shape:
            held[name] = older
        elif older is None and name not in added:
            raise StructureError(
                f"{name!r} is missing from the source, and no edit of the species added it: {_told(events)}"
            )
        elif older is not None and name not in added | removed:
            raise StructureError(
                f"{name!r} has shape {tuple(older.shape)} in the source and {tuple(value.shape)} here, and no edit of the species "
                f"changed it: {_told(events)}"
            )
    for name in given:
        if name not in held and name not in removed:
            raise StructureError(
                f"{name!r} is in the source but not here, and no edit of the species removed it: {_told(events)}"
            )
    made.load_state_dict(held)
    return made  # type: ignore[no-any-return]


def _told(events: list[Any]) -> str:
    return "; ".join(f"version {event.number}: {event.sentence}" for event in events) or "it has had no edits"


def buffer_policy(module: T, policy: str, *patterns: str) -> T:
    """Say what becomes of buffers in the results of operations.

    Args:
        module: A particle, or a module inside one.
        policy: `"copy"` (each particle has its own, as by default), `"share"` (one tensor for all), `"operate"` (the
            operation acts on the buffer too, unless it holds integers) or `"reset"` (zeros; ones for `running_var`).
        *patterns: Names of buffers below the module, or patterns such as `"bn.*"`; all by default.

    Returns:
        The module.

    Raises:
        ValueError: If the policy is unknown or no buffer matches a pattern.

    Example:
        >>> from moduli.particles import adopt, buffer_policy
        >>> net = adopt(nn.BatchNorm1d(2))
        >>> buffer_policy(net, "share", "running_*").clone().running_mean is net.running_mean
        True
    """
    if policy not in _POLICIES:
        raise ValueError(f"{policy!r} is not a policy for buffers; choose from {', '.join(_POLICIES)}")
    from fnmatch import fnmatchcase

    names = [name for name, _ in module.named_buffers()]
    chosen = patterns or ("*",)
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{type(module).__name__} has no buffer called {pattern!r}; it has {', '.join(names) or 'none'}"
            )
    before: tuple[tuple[str, str], ...] = module.__dict__.get(POLICY, ())
    module.__dict__[POLICY] = (*before, *((pattern, policy) for pattern in chosen))
    return module
