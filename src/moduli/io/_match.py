"""Which name of a checkpoint goes where: the same name, a mapping, or the edits of a species."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from torch import nn

from ..nn import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX
from ..particles import Event, events_of
from ._errors import CheckpointError

NameMap: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
"""From names in a checkpoint to names here: of tensors, or of modules with everything below them. None leaves it out."""

Rename: TypeAlias = Callable[[str], str | None]

_MOST_SHOWN: Final = 6


def list_names(names: Iterable[str]) -> str:
    """Names for an error, the first few of them."""
    every = list(names)
    more = len(every) - _MOST_SHOWN
    return ", ".join(map(repr, every[:_MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")


def public_name(name: str) -> str:
    """The name under which an owned tensor is assigned and read; other names are their own."""
    path, dot, last = name.rpartition(".")
    return path + dot + last.removeprefix(TENSOR_PARAM_PREFIX).removeprefix(TENSOR_BUFFER_PREFIX)


def make_rename(mapping: NameMap | None, names: Iterable[str]) -> Rename:
    """The function that a mapping stands for.

    Raises:
        CheckpointError: If part of it is about nothing in the checkpoint, or two names become one.
        TypeError: If it is no mapping.
    """
    if mapping is None:
        return lambda name: name
    if not isinstance(mapping, Mapping) and not callable(mapping):
        raise TypeError(f"mapping is a {type(mapping).__name__}; it must be a dict from names to names, or a function")
    names = list(names)
    table = dict(mapping) if isinstance(mapping, Mapping) else {}
    used: set[str] = set()

    def rename(name: str) -> str | None:
        if not isinstance(mapping, Mapping):
            return mapping(name)
        path = name
        while path not in table:
            if "." not in path:
                return name
            path = path.rpartition(".")[0]
        used.add(path)
        new = table[path]
        return None if new is None else (new + name[len(path) :]).removeprefix("." if new == "" else "")

    seen: dict[str, str] = {}
    for name in names:
        new = rename(name)
        if new is not None and seen.setdefault(new, name) != name:
            raise CheckpointError(f"mapping gives {seen[new]!r} and {name!r} the same name {new!r}")
    unused = table.keys() - used
    if unused:
        raise CheckpointError(
            f"mapping has {list_names(sorted(unused))}, which the checkpoint does not; it has {list_names(names)}"
        )
    return rename


# -- edits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edits:
    """The edits between the version of a checkpoint and that of a module, and what they explain.

    Attributes:
        added: Names that may be missing from the checkpoint.
        removed: Names that may be missing here.
        told: The edits in words, or why there are none.
    """

    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    told: str = ""


def edits_between(saved: list[Event], module: nn.Module) -> Edits:
    """What the edits made since a checkpoint was written explain."""
    here = events_of(module)
    if here[: len(saved)] == saved:
        since = here[len(saved) :]
        told = "; ".join(f"version {event.number}: {event.sentence}" for event in since)
        return Edits(
            frozenset(name for event in since for name in event.added),
            frozenset(name for event in since for name in event.removed),
            f"edits since it was written: {told}" if told else "",
        )
    if saved[: len(here)] == here:
        told = "; ".join(f"version {event.number}: {event.sentence}" for event in saved[len(here) :])
        return Edits(told=f"the checkpoint is newer; make its edits here first: {told}")
    return Edits(told="the checkpoint and the module have had different edits")


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass
class Match:
    """What goes where.

    Attributes:
        taken: The name in the checkpoint by name here.
        fresh: Names here that keep what they have.
        dropped: Names of the checkpoint that are not used.
        problems: What no edit explains, as sentences.
        converted: Names whose dtypes differ.
        apply: Does it, all or nothing.
    """

    taken: dict[str, str] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    apply: Callable[[], None] = lambda: None


def match(
    saved: Iterable[str], here: Iterable[str], rename: Rename, edits: Edits, fits: Callable[[str, str], str | None]
) -> Match:
    """Match the names of a checkpoint with those of a module.

    Args:
        saved: The names in the checkpoint.
        here: The names in the module.
        rename: What the checkpoint's names are called here.
        edits: What may be missing.
        fits: Says why the tensor of a name in the checkpoint does not fit a name here, or None.
    """
    result = Match()
    sources: dict[str, str] = {}
    left_out: list[str] = []
    for name in saved:
        new = rename(name)
        if new is None:
            left_out.append(name)
        else:
            # Owned tensors are found also under their public names, and the other way.
            sources[public_name(new)] = name
    missing: list[str] = []
    for name in here:
        source = sources.pop(public_name(name), None)
        if source is None:
            result.fresh.append(name)
            if name not in edits.added:
                missing.append(name)
            continue
        why = fits(source, name)
        if why is None:
            result.taken[name] = source
            continue
        result.fresh.append(name)
        result.dropped.append(source)
        if name not in edits.added | edits.removed:
            result.problems.append(why)
    removed = set(map(public_name, edits.removed))
    unexpected = [source for new, source in sources.items() if new not in removed]
    result.dropped += [*sources.values(), *left_out]
    if unexpected:
        result.problems.insert(0, f"only the checkpoint has {list_names(unexpected)}")
    if missing:
        result.problems.insert(0, f"only the module has {list_names(missing)}")
    return result
