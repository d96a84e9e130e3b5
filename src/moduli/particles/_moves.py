"""Names that edits moved: after `insert`, the layers behind the new one have the names of the next ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from moduli.layout import Structure

from ._record import Event

if TYPE_CHECKING:
    from ._version import Version

_EXTRA = "_extra_state"


def list_moves(before: Version, after: Version) -> tuple[tuple[str, str], ...]:
    """Return the former and the new name of each parameter and buffer of modules that are in two versions at other places.

    Args:
        before: The version before an edit.
        after: The version after it.
    """
    here, there = (_list_modules(each) for each in (after, before))
    moves: dict[str, str] = {}
    for key in here.keys() & there.keys():
        (names, paths), (former_names, former_paths) = here[key], there[key]
        old = [path for path in former_paths if path not in paths]
        new = [path for path in paths if path not in former_paths]
        for one, two in zip(old, new, strict=False):
            moves |= {_join(one, name): _join(two, name) for name in names if name in former_names}
    return tuple(sorted(moves.items()))


def _list_modules(version: Version) -> dict[int, tuple[list[str], list[str]]]:
    """Return the names of the parameters and buffers of each module of a version, and its dotted names, by identifier."""
    modules: dict[int, tuple[list[str], list[str]]] = {}
    for path, place in _walk(version.structure, "", 0):
        key, entry = version.modules[place], version.structure.modules[place]
        if key not in modules:
            modules[key] = [name for name, _ in (*entry.parameters, *entry.buffers)], []
        modules[key][1].append(path)
    return modules


def _walk(structure: Structure, path: str, place: int) -> Iterator[tuple[str, int]]:
    yield path, place
    for name, child in structure.modules[place].children:
        if child >= 0:
            yield from _walk(structure, _join(path, name), child)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class FollowedNames(NamedTuple):
    """Names of an older version in the newest one.

    Attributes:
        names: The name that each has now; None if another tensor has taken its place.
        added: The names that were added, or whose shape changed.
        removed: The names that were removed, or whose shape changed.
    """

    names: dict[str, str | None]
    added: frozenset[str]
    removed: frozenset[str]


def follow_names(names: Iterable[str], events: Iterable[Event]) -> FollowedNames:
    """Return the names of tensors after edits.

    Args:
        names: The names before.
        events: The edits, oldest first.

    Example:
        >>> from moduli.particles import Event, follow_names
        >>> inserted = Event(1, "", frozenset({"2.w"}), frozenset(), moved=(("1.w", "2.w"),))
        >>> followed = follow_names(["0.w", "1.w"], [inserted])
        >>> followed.names, sorted(followed.added)
        ({'0.w': '0.w', '1.w': '2.w'}, ['1.w'])
    """
    now: dict[str, str | None] = {name: name for name in names}
    added: set[str] = set()
    removed: set[str] = set()
    for event in events:
        moved = dict(event.moved)
        targets = set(moved.values())

        def follow(name: str | None, moved: Mapping[str, str] = moved, taken: Collection[str] = targets) -> str | None:
            return None if name is None else moved.get(name, None if name in taken else name)

        now = {name: follow(current) for name, current in now.items()}
        added = {new for name in added if (new := follow(name)) is not None}
        added |= (event.added - targets) | (moved.keys() - targets)
        removed |= event.removed
    # A name that is there again, for instance after a rollback, is the same tensor again.
    taken = set(now.values())
    now |= {name: name for name, current in now.items() if current is None and name in added and name not in taken}
    return FollowedNames(now, frozenset(added), frozenset(removed))


def find_events_since(names: Iterable[str], net: nn.Module, events: Sequence[Event]) -> Sequence[Event] | None:
    """Return the edits after the newest version of a model whose state dict has exactly some names; None if no version has.

    Args:
        names: The names.
        net: The model at its newest version.
        events: All its edits, oldest first.

    Example:
        >>> from moduli.particles import Event, find_events_since
        >>> inserted = Event(1, "", frozenset({"1.bias", "1.weight"}), frozenset())
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> [len(find_events_since(names, net, [inserted])) for names in (["0.weight", "0.bias"], net.state_dict())]
        [1, 0]
    """
    wanted = {name for name in names if not name.endswith(_EXTRA)}
    current = {
        name for name, _ in (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
    }
    # Buffers that are not persistent; and names that later edits removed, which may have been such buffers.
    hidden, gone = current.difference(net.state_dict()), set[str]()
    for count in range(len(events), -1, -1):
        if wanted <= current and current - wanted <= hidden | gone:
            return events[count:]
        if count:
            event = events[count - 1]
            former = {new: old for old, new in event.moved}
            # A layer that was moved to the name of another one has taken its place, unless there was none.
            lost = event.removed | {name for name in former if name not in event.added}
            kept = {name for name in current if name in former or name not in event.added}
            kept, hidden, gone = ({former.get(name, name) for name in each} for each in (kept, hidden, gone))
            current, gone = kept | lost, gone | lost.difference(former.values())
    return None
