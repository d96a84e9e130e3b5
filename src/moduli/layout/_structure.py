"""Reading a live module tree into a `Structure`, quickly if it has not changed since the last reading.

A `Structure` is made of names, classes, sizes and positions only: it refers to no module and no tensor. Modules of equal
structure have one `Structure` object, so `is` compares whole trees. Only the last structure of a module is cached, and every
reading compares the live tree with it in full, so a stale cache entry costs time, not correctness.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._entries import lay_out
from ._layout import Layout, LayoutError

_OWNED = attrgetter("_parameters", "_buffers", "_modules")
_SIZES = attrgetter("dtype", "shape", "device")
_NONE = id(None)
# Separators in the names of a scan, so that names of different kinds cannot run together.
_PARAMETERS, _BUFFERS, _CHILDREN = 1, 2, 3
# Attribute of classes whose modules own labelled tensors; in other classes `_labelled` may be anything.
OWNS_LABELS = "__nograd_tensors__"
# A module that contains itself gives names without end; no real model has this many modules.
_MOST_MODULES = 200_000


class ModuleEntry(NamedTuple):
    """One module of a structure. Numbers are positions in the lists of a `Reading`; -1 is an empty place.

    Attributes:
        kind: Its class.
        path: Its dotted name, the first one where it has several.
        parameters: The name and position of each parameter.
        buffers: The name and position of each buffer.
        transient: The names of buffers that `state_dict()` does not hold.
        children: The name and position of each child.

    Example:
        >>> from moduli.layout import read
        >>> read(nn.Sequential(nn.Linear(2, 1))).structure.modules[1].parameters
        (('weight', 0), ('bias', 1))
    """

    kind: type[nn.Module]
    path: str
    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    transient: frozenset[str]
    children: tuple[tuple[str, int], ...]


@dataclass(eq=False)
class Structure:
    """The structure of a module tree: its layout, and every module in it. Trees of equal structure share one object.

    Attributes:
        layout: The layout of parameters and buffers.
        modules: One `ModuleEntry` per distinct module, the root first, breadth first.
        notes: Results that other rooms computed from the structure and cache here, by room.

    Example:
        >>> from moduli.layout import read
        >>> a, b = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> read(a).structure is read(b).structure
        True
        >>> [entry.path for entry in read(nn.Sequential(a, b)).structure.modules]
        ['', '0', '1']
    """

    layout: Layout
    modules: tuple[ModuleEntry, ...]
    _key: _Key = field(repr=False)
    _limit: int = field(repr=False)
    _pick: list[Callable[[list[Any]], list[Any]]] = field(repr=False)
    notes: dict[str, Any] = field(default_factory=dict, repr=False)

    def _pick_from(self, scan: _Scan) -> Reading:
        parameters, buffers, modules = self._pick
        return Reading(self, parameters(scan.parameters), buffers(scan.buffers), modules(scan.modules))


class Reading(NamedTuple):
    """A live module tree, read at one moment.

    Attributes:
        structure: Its structure.
        parameters: The live parameters, one per entry of the layout.
        buffers: The live buffers, one per buffer of the layout.
        modules: The live modules, one per module of the structure.

    Example:
        >>> from moduli.layout import read
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> seen = read(net)
        >>> seen.modules[1] is net[0], seen.parameters[1] is net[0].bias
        (True, True)
    """

    structure: Structure
    parameters: list[Tensor]
    buffers: list[Tensor]
    modules: list[nn.Module]


class _Key(NamedTuple):
    """The key of a structure: everything that two trees must have in common."""

    names: Any
    sizes: Any
    buffer_sizes: Any
    ties: Any
    buffer_ties: Any
    module_ties: Any


class _Scan(NamedTuple):
    """The result of a breadth-first walk over live modules; an object with several names occurs once per name."""

    parameters: list[Any]
    buffers: list[Any]
    modules: list[Any]


# Keyed by id, not by module: a module class may define __eq__ and so have no hash.
_LAST: dict[int, tuple[weakref.ref[nn.Module], Structure]] = {}
_KNOWN: weakref.WeakValueDictionary[_Key, Structure] = weakref.WeakValueDictionary()


def read(root: nn.Module) -> Reading:
    """Read a live module tree: names, classes, identities, dtypes, shapes and devices, as they are now.

    Two readings have the same `structure` object exactly if nothing in the tree differs, labels included: every question "is
    this module unchanged?" is answered by this comparison. Values, `requires_grad` and plain attributes are not compared.

    Args:
        root: The module.

    Raises:
        LayoutError: If a parameter is lazy, a module contains itself or was not initialised.

    Example:
        >>> from moduli.layout import read
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> before = read(net).structure
        >>> read(net).structure is before
        True
        >>> net[1] = nn.Tanh()
        >>> read(net).structure is before
        False
    """
    last = _LAST.get(id(root))
    before = last[1] if last is not None and last[0]() is root else None
    try:
        scanned = _scan(root, _MOST_MODULES if before is None else before._limit)
    except (AttributeError, RuntimeError):
        _refuse_unreadable(root)
        scanned = _scan(root, 1 << 60)
    if before is not None and scanned[1] == before._key:
        return before._pick_from(scanned[0])
    structure = _find(root, *scanned)
    return read(root) if structure is None else structure._pick_from(scanned[0])


def _scan(root: nn.Module, limit: int) -> tuple[_Scan, _Key]:
    """Walk over the tree and return its tensors and modules, and the key to compare.

    Raises:
        AttributeError: If it has more than `limit` places, or a module in it was not initialised.

    This is the hot loop of the room: it runs at each reading. Slots that hold None count as names. Registries are read
    through `keys()` and `values()`, because the objects that TorchScript has instead of dicts cannot be iterated over.
    """
    names: list[object] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    queue: list[Any] = [root]
    for module in queue:
        if module is None:
            names.append(None)
            continue
        try:
            own = module.__dict__
            params, bufs, children = own["_parameters"], own["_buffers"], own["_modules"]
        except KeyError:
            params, bufs, children = _read_owned(module)
        if params:
            names += params.keys()
            names.append(_PARAMETERS)
            parameters += params.values()
        if bufs:
            names += bufs.keys()
            names.append(_BUFFERS)
            if module._non_persistent_buffers_set:
                names.append(frozenset(module._non_persistent_buffers_set))
            buffers += bufs.values()
        if children:
            names += children.keys()
            names.append(_CHILDREN)
            queue += children.values()
            if len(queue) > limit:
                raise AttributeError
        if "_labelled" in own and own["_labelled"] and hasattr(module.__class__, OWNS_LABELS):
            names.append(tuple(own["_labelled"].values()))
        names.append(module.__class__)
    sizes, ties = _sizes(parameters), _find_first_places(parameters)
    buffer_sizes, buffer_ties = (_sizes(buffers), _find_first_places(buffers)) if buffers else ([], [])
    key = _Key(names, sizes, buffer_sizes, ties, buffer_ties, _find_first_places(queue))
    return _Scan(parameters, buffers, queue), key


def _read_owned(module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters, buffers and children of a module, as dicts even where its registries are computed (TorchScript)."""
    return [registry if isinstance(registry, dict) else dict(registry.items()) for registry in _OWNED(module)]


def _sizes(tensors: list[Any]) -> list[Any]:
    try:
        return list(map(_SIZES, tensors))
    except AttributeError:
        return [None if tensor is None else _SIZES(tensor) for tensor in tensors]


def _find_first_places(things: list[Any]) -> list[int]:
    """Return, for each position, the first position of the same object, or -1 for None; empty if all are distinct."""
    ids = set(map(id, things))
    if len(ids) == len(things) and _NONE not in ids:
        return []
    firsts: dict[int, int] = {_NONE: -1}
    places = [firsts.setdefault(id(thing), place) for place, thing in enumerate(things)]
    # None in several places is no tie.
    return places if len(ids - {_NONE}) < len(things) - places.count(-1) else []


def _find(root: nn.Module, scan: _Scan, key: _Key) -> Structure | None:
    """Return the structure of a scan, interned by its key, and cache it as the last structure of the module."""
    frozen = _Key(*map(tuple, key))
    structure = _KNOWN.get(frozen)
    if structure is None:
        structure = _make(scan, key)
        if structure is None:
            return None
        _KNOWN[frozen] = structure
    place = id(root)

    def forget(ref: weakref.ref[nn.Module]) -> None:
        # Check the reference: another thread may have read a new module whose id is the same.
        if place in _LAST and _LAST[place][0] is ref:
            del _LAST[place]

    _LAST[place] = weakref.ref(root, forget), structure
    return structure


def _make(scan: _Scan, key: _Key) -> Structure | None:
    """Make the structure of a scan; None if another thread edited the tree during the scan."""
    rows, slots, buffer_slots, paths, labelled = _unfold(key.names)
    if [len(slots), len(buffer_slots), len(paths)] != list(map(len, scan)):
        return None
    # `named_parameters()` goes depth first: sort by the position of each module among its siblings, from the root on.
    order = _sort_slots(scan.parameters, slots)
    buffer_order = _sort_slots(scan.buffers, buffer_slots)
    layout, chosen, chosen_buffers = lay_out(
        [(slots[p][1], scan.parameters[p]) for p in order],
        [(buffer_slots[p][1], scan.buffers[p], buffer_slots[p][2]) for p in buffer_order],
        labelled,
    )
    parameters, buffers = [order[i] for i in chosen], [buffer_order[i] for i in chosen_buffers]
    firsts = key.module_ties or range(len(scan.modules))
    modules = [p for p, module in enumerate(scan.modules) if firsts[p] == p and module is not None]
    distinct = ((scan.parameters, parameters), (scan.buffers, buffers), (scan.modules, modules))
    index = [{id(things[p]): i for i, p in enumerate(places)} | {_NONE: -1} for things, places in distinct]
    entries = _list_modules(scan, rows, [path for _, path in paths], index)
    pick = [_picker(places, len(things)) for things, places in distinct]
    return Structure(layout, tuple(entries[place] for place in modules), key, len(scan.modules), pick)


def _list_modules(scan: _Scan, rows: list[Any], paths: list[str], index: list[dict[int, int]]) -> list[ModuleEntry]:
    """Return one entry per scanned module, with the positions that `index` gives to parameters, buffers and modules by id."""
    walks = iter(scan.parameters), iter(scan.buffers), iter(scan.modules[1:])
    entries = []
    for module, path, (*owned, transient) in zip(scan.modules, paths, rows, strict=True):
        slots = [tuple((name, index[i][id(next(walks[i]))]) for name in names) for i, names in enumerate(owned)]
        entries.append(ModuleEntry(type(module), path, slots[0], slots[1], transient, slots[2]))
    return entries


def _sort_slots(tensors: list[Any], slots: list[Any]) -> list[int]:
    """Return the positions of the tensors other than None, sorted by the paths of their slots."""
    return sorted((p for p, tensor in enumerate(tensors) if tensor is not None), key=lambda p: slots[p][0])


def _unfold(marks: list[Any]) -> Any:
    """Parse the names of a scan.

    Returns:
        The names in each module's registries; each parameter's path of sibling positions and dotted name; each
        buffer's, and whether `state_dict()` holds it; each module's; the axes of labelled tensors by dotted name.
    """
    rows: list[Any] = []
    slots: list[tuple[Any, str]] = []
    buffer_slots: list[tuple[Any, str, bool]] = []
    paths: list[tuple[tuple[int, ...], str]] = [((), "")]
    run, transient = list[str](), frozenset[str]()
    owned: dict[int, list[str]] = {}
    labelled: dict[str, Any] = {}
    labels: tuple[tuple[str, Any], ...] = ()
    for mark in marks:
        if isinstance(mark, str):
            run.append(mark)
        elif isinstance(mark, frozenset):
            transient = mark
        elif isinstance(mark, tuple):
            labels = mark
        elif isinstance(mark, int):
            owned[mark], run = run, []
        elif len(rows) < len(paths):  # the class, after all else of a module, or None in an empty place
            path, name = paths[len(rows)]
            prefix = f"{name}." if name else ""
            own = [owned.get(kind, []) for kind in (_PARAMETERS, _BUFFERS, _CHILDREN)]
            slots += [(path, prefix + each) for each in own[0]]
            buffer_slots += [(path, prefix + each, each not in transient) for each in own[1]]
            paths += [((*path, position), prefix + each) for position, each in enumerate(own[2])]
            rows.append((*own, transient))
            labelled |= {prefix + key: axes for key, axes in labels}
            owned, transient, labels = {}, frozenset(), ()
    return rows, slots, buffer_slots, paths, labelled


def _refuse_unreadable(root: nn.Module) -> None:
    """Raise LayoutError if a module cannot be read.

    Raises:
        LayoutError: If a module contains itself or has no registries, or a parameter is lazy.
    """
    queue: list[tuple[nn.Module | None, str, tuple[int, ...]]] = [(root, "", ())]
    for module, prefix, lineage in queue:
        if module is None:
            continue
        try:
            parameters, buffers, children = _read_owned(module)
        except AttributeError as error:
            raise LayoutError(
                f"{prefix.rstrip('.') or 'the module'!r} ({type(module).__name__}) holds no parameters yet: "
                "call super().__init__() first in its __init__"
            ) from error
        if id(module) in lineage:
            raise LayoutError(
                f"{prefix.rstrip('.')!r} ({type(module).__name__}) contains itself, so its parameters have no end "
                "of names; keep the reference to the outer module in a list, or as a weak reference"
            )
        for name, tensor in (*parameters.items(), *buffers.items()):
            if is_lazy(tensor):
                raise LayoutError(
                    f"{prefix + name!r} is lazy: its shape is not known before the module has seen data; "
                    "run one forward pass first"
                )
        queue += [(child, f"{prefix}{name}.", (*lineage, id(module))) for name, child in children.items()]


def _picker(places: list[int], count: int) -> Callable[[list[Any]], list[Any]]:
    """Return a function that takes the objects at `places` out of a list of `count`, without a loop in Python."""
    if places == list(range(count)):
        return list
    if len(places) < 2:
        return lambda things: [things[place] for place in places]
    pick = itemgetter(*places)
    return lambda things: list(pick(things))
