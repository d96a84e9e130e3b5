"""The history of a species: its edits as sentences, migrating older models, and versions in copies and pickles."""

from __future__ import annotations

import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from moduli.layout import Reading, public_name, read

from . import _arithmetic
from ._facts import facts_of
from ._moves import FollowedNames, find_events_since, follow_names
from ._record import Event, ParticleRecord, Species, record_of, turn_into_parameters
from ._skeleton import PENDING, RECORD, AtomicStates, assemble, capture_model
from ._species import bring_up, require, settle_journal, version_of
from ._version import Version
from .base import NytoModuleBase
from .errors import StructureError
from .mtype import ParamConfig

T = TypeVar("T", bound=nn.Module)


class SpeciesView:
    """The species of a particle. Made by `species`.

    Example:
        >>> from moduli.particles import adopt, species
        >>> a, b = adopt(nn.Linear(2, 1)), adopt(nn.Linear(2, 1))
        >>> species(a) == species(a.clone()), species(a) == species(b)
        (True, False)
    """

    def __init__(self, inner: Species) -> None:
        self._inner = inner

    def history(self) -> list[str]:
        """Return the edits so far, oldest first, as sentences.

        Example:
            >>> from moduli.particles import adopt, species
            >>> net = adopt(nn.Sequential(nn.Linear(2, 2)))
            >>> twin = net.clone()
            >>> _ = net.append(nn.Linear(2, 1))
            >>> species(twin).history()
            ["version 1: module '1' was assigned a Linear"]
        """
        return [f"version {event.number}: {event.sentence}" for event in self._list_events()]

    @property
    def version(self) -> int:
        """The number of edits so far."""
        return len(self._list_events())

    def _list_events(self) -> list[Event]:
        for member in list(self._inner.members):
            settle_journal(member)
        return self._inner.events

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpeciesView) and self._inner is other._inner

    def __hash__(self) -> int:
        return hash(id(self._inner))

    def __repr__(self) -> str:
        return f"<species at version {self.version}>"


def species(module: nn.Module) -> SpeciesView:
    """Return the species of a particle: all particles derived from it, and those it was derived from.

    Example:
        >>> from moduli.particles import adopt, species
        >>> species(adopt(nn.Linear(2, 1)))
        <species at version 0>
    """
    root = require(module)._particle_root
    if not record_of(root).wrapped:
        bring_up(root)
    return SpeciesView(version_of(root).species)


def history(module: nn.Module) -> list[str]:
    """Return the edits of a particle's species so far, oldest first, as sentences.

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
    """Load the values of an older version into the newest structure.

    Names that edits of the species added since then have their values in `to`; names that edits removed are dropped, and layers
    that edits moved have their new names. A difference that no edit explains raises.

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
    bring_up(target._particle_root)
    events = version_of(target._particle_root).species.events
    older: Any = source.state_dict() if isinstance(source, nn.Module) else source
    model = _arithmetic.rebuild(target, copies=True)
    newest = model.state_dict()
    values = _select_values(older, newest, events, _find_names(older, model, events))
    try:
        model.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise StructureError(f"the source does not fit {type(target).__name__}: {error}") from error
    return model  # type: ignore[no-any-return]


def _find_names(older: Any, model: nn.Module, events: Sequence[Event]) -> FollowedNames:
    """Return the present names of the entries of an older state dict.

    Raises:
        StructureError: If edits moved layers, and the state dict has the names of no version.
    """
    if not any(event.moved for event in events):
        return follow_names(older, events)
    since = find_events_since(older, model, events)
    if since is None:
        raise StructureError(
            "the names of the source are those of no version of the species, and edits have moved layers to other names: "
            + "; ".join(f"version {event.number}: {event.sentence}" for event in events)
        )
    return follow_names(older, since)


def _rename_state(state: Any, names: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the entries of a state dict, and the labels of its tensors by module, under other names."""
    entries = {new: state[name] for name, new in names.items() if new is not None}
    public = {public_name(name): public_name(new) for name, new in names.items() if new is not None}
    labels: dict[str, dict[str, Any]] = {}
    for path, each in getattr(state, "_metadata", {}).items():
        for name, axes in each.get("labels", {}).items():
            full = f"{path}.{name}" if path else name
            module, _, own = public.get(full, full).rpartition(".")
            labels.setdefault(module, {})[own] = axes
    return entries, labels


def _select_values(older: Any, newest: Any, events: Sequence[Event], followed: FollowedNames) -> Any:
    """Return the entries of an older state dict that fit the newest one; raise if no edit explains why another does not.

    Args:
        older: The older state dict.
        newest: The newest one.
        events: The edits of the species, for errors.
        followed: The present names of the entries of the older one.
    """
    added, removed = followed.added, followed.removed
    older, labels = _rename_state(older, followed.names)
    labelled = {f"{path}.{name}" if path else name for path, names in labels.items() for name in names}
    values: Any = OrderedDict()
    # Loading aligns the tensors by these labels.
    values._metadata = {path: {**own, "labels": labels.get(path, {})} for path, own in newest._metadata.items()}
    for name in dict.fromkeys((*newest, *older)):
        before, after = older.get(name), newest.get(name)
        if _fits(before, after, public_name(name) in labelled):
            values[name] = before
            continue
        # A new name was added, a missing one removed, and a tensor of another shape either.
        explained = added if before is None else removed if after is None else added | removed
        if name not in explained:
            _refuse_difference(name, before, after, events)
    return values


def _fits(before: Any, after: Any, labelled: bool) -> bool:
    """Whether two entries are tensors of one shape; the axes of labelled tensors may be in another order."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.shape == after.shape or (labelled and sorted(before.shape) == sorted(after.shape))


def _refuse_difference(name: str, before: Any, after: Any, events: Sequence[Event]) -> NoReturn:
    shapes = ["missing" if each is None else f"of shape {tuple(each.shape)}" for each in (before, after)]
    edits = "; ".join(f"version {event.number}: {event.sentence}" for event in events) or "it has had no edits"
    raise StructureError(
        f"{name!r} is {shapes[0]} in the source and {shapes[1]} here, and no edit of the species explains that: {edits}"
    )


def independent(module: T) -> T:
    """Move a particle to a new species: it and its former relatives do not follow each other's edits any more.

    Args:
        module: A particle, which is changed; pass a copy to keep the original in its species.

    Returns:
        The particle.

    Example:
        >>> import copy
        >>> from moduli.particles import adopt, independent
        >>> net = adopt(nn.Sequential(nn.Linear(2, 2)))
        >>> apart = independent(copy.deepcopy(net))
        >>> _ = net.append(nn.Linear(2, 1))
        >>> len(apart.touch()), len(net)
        (1, 2)
    """
    root = require(module)
    _ = root._parameters
    record = record_of(root)
    if record.version is not None:
        before, begun = record.version.species, Species()
        before.members.discard(root)
        begun.configured, begun.rules = before.configured, list(before.rules)
        begun.members.add(root)
        begun.depth = before.depth
        record.version, record.kernel, record.past = record.version.copy(begun), None, ()
    return module


def events_of(module: Any) -> list[Event]:
    """Return the edits of the species of a particle, oldest first; none for a module that is no particle, or inside one.

    Example:
        >>> from moduli.particles import NytoModule, events_of
        >>> net = NytoModule()
        >>> twin = net.clone()
        >>> net.w = nn.Parameter(torch.zeros(2))
        >>> events_of(net)[0].added
        frozenset({'w'})
    """
    return list(version_of(module).species.events) if has_version(module) else []


def has_version(module: Any) -> bool:
    """Whether a module is a particle whose edits are recorded: it was cloned, combined, or asked for its history.

    Example:
        >>> from moduli.particles import adopt, has_version, species
        >>> net = adopt(nn.Linear(2, 1))
        >>> before, _ = has_version(net), species(net)
        >>> before, has_version(net)
        (False, True)
    """
    if not isinstance(module, NytoModuleBase) or module._particle_root is not module:
        return False
    return PENDING in module.__dict__ or record_of(module).version is not None


# -- copies and pickles -------------------------------------------------------------------------------------------------


def copy_plain(
    module: nn.Module, reading: Reading, compute: Callable[[], tuple[list[Tensor], Sequence[Tensor]] | None]
) -> Any:
    """Return a deep copy of a model with other values, without `copy.deepcopy`, if its plain attributes are immutable.

    Args:
        module: The model.
        reading: The reading of it.
        compute: Returns a new tensor for each of its parameters and buffers, or None.

    Returns:
        The copy; None if an attribute would have to be copied, a class defines its own copying, or `compute` returns None.

    Example:
        >>> from moduli.layout import read
        >>> from moduli.particles import copy_plain
        >>> net = nn.Linear(2, 1, bias=False)
        >>> copy_plain(net, read(net), lambda: ([torch.zeros(1, 2)], [])).weight
        Parameter containing:
        tensor([[0., 0.]], requires_grad=True)
    """
    if facts_of(reading.structure).copying:
        return None
    settle_journal(module)
    states = capture_model(reading, strict=False)
    if not isinstance(states, AtomicStates):
        return None
    values = compute()
    if values is None:
        return None
    parameters = turn_into_parameters(values[0], [param.requires_grad for param in reading.parameters])
    modules = assemble(reading.structure, states, parameters, values[1])
    for place, source in enumerate(reading.modules):
        if RECORD in source.__dict__:
            # Like a deep copy, it is a particle of the same species.
            before = record_of(source)
            record = vars(modules[place])[RECORD] = ParticleRecord(before.version, dict(before.order))
            record.root = weakref.ref(modules[0]) if place and isinstance(modules[0], NytoModuleBase) else None
            if record.version is not None:
                record.version.species.members.add(modules[place])
    return modules[0]


# Versions by their identifiers in pickles, so that copies unpickled in this process belong to their species again.

_known: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def pack(record: ParticleRecord) -> Any:
    """Return the pickled form of a record: a function that makes it again, and its arguments."""
    version = record.version
    order = tuple(record.order)
    if version is None:
        return unpack, (None, {}, order)
    if version.uid is None:
        version.uid = uuid.uuid4().hex
        _known[version.uid] = version
    return unpack, (version.uid, version.list_configured() if version.species.configured else {}, order)


def unpack(uid: str | None, config: dict[str, ParamConfig], order: tuple[str, ...]) -> ParticleRecord:
    """Make a pickled record again, with its version if this process has it; otherwise it will start a species.

    Args:
        uid: The identifier of its version; None if it has none.
        config: The configurations of parameters by name.
        order: The names of attributes in the order of assignment.
    """
    version = None if uid is None else _known.get(uid)
    record = ParticleRecord(version, dict.fromkeys(order))
    if uid is not None and version is None:
        record.origin = uid, config
    return record


def begin_here(module: nn.Module, record: ParticleRecord) -> None:
    """Give a particle that was unpickled from another process a version in this process, with the same identifier."""
    if record.origin is None:
        return
    (uid, config), record.origin = record.origin, None
    version = _known.get(uid)
    if version is None:
        version = _known[uid] = Version.of(read(module), config)
        version.uid = uid
    record.version = version
