"""`EditHistory`: the edits of a species, printed as a table, and the attribute `history` of particles."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self, overload

import torch  # noqa: F401 - for the examples
from torch import nn

from .._texts import cut, write_columns
from ._record import Event, build, record_of
from ._species import settle_journal, version_of

_NAME = "history"
_MOST_NAMES = 3


class EditHistory(tuple[Event, ...]):
    """The edits of a species, oldest first: the number, time, place and text of each. It prints as a table.

    Attributes:
        version: The number of the newest version, which is 0 before the first edit.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.history.version
        0
        >>> net.w = nn.Parameter(torch.zeros(2))
        >>> edit = net.history[-1]
        >>> edit.number, edit.what, edit.where
        (1, "parameter 'w' was assigned of shape (2,)", ('w',))
    """

    __slots__ = ()

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self[-1].number if self else 0

    def __str__(self) -> str:
        if not self:
            return "version 0: no edits"
        rows = [["version", "when", "where", "what"]]
        rows += [
            [str(event.number), _show_time(event.when), _show_names(event.where), cut(event.what, 200)]
            for event in self
        ]
        return write_columns(rows, {0})

    def __repr__(self) -> str:
        return str(self)


def _show_time(when: float | None) -> str:
    try:
        return "" if when is None else datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # a file may contain any number
        return ""


def _show_names(names: tuple[str, ...]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(cut(name, 60) for name in names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


class HistoryAttribute:
    """The attribute `history` of particles. A parameter, buffer or child that a program calls `history` takes precedence.

    Attributes:
        gives_way: Marks the attribute as one that modules may override by assignment.
    """

    gives_way = True

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: nn.Module, owner: type | None = None) -> EditHistory: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        build(instance)
        state = instance.__dict__
        taken = any(_NAME in state.get(key, ()) for key in ("_parameters", "_modules", "_buffers", "_labelled"))
        # During an edit, torch checks with `hasattr` whether a name is free.
        if taken or "_parameters" not in state or record_of(instance).busy:
            raise AttributeError(_NAME)
        return list_edits(instance)


def list_edits(module: Any) -> EditHistory:
    """Return the edits of the species of a particle, including those of its members that have no version yet."""
    root = module._particle_root
    species = version_of(root).species
    for member in list(species.members):
        settle_journal(member)
    return EditHistory(species.events)
