"""Reading the layout off a live module, and knowing cheaply that the one remembered still holds.

What is remembered about a module is made of names, `id`s and sizes: no module, dict or parameter is referred to. So the
memory keeps nothing alive, though the hooks of children and parameters often lead back to the module that owns them,
and `torch.utils.swap_tensors`, which refuses tensors that have weak references, still works. An `id` may be reused
once its object dies; comparing them is exact nevertheless, because a layout depends on identities only through which of
the live tensors are the same one.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._layout import BufferEntry, Entry, Layout, LayoutError

__all__ = ["Source", "addresses", "layout_and_tensors", "layout_of"]

Source: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""What has a layout: a module, a dict of tensors, a list of tensors, or pairs such as `named_parameters()` gives."""

_OWNED = attrgetter("_parameters", "_buffers", "_modules")
_SIZES = attrgetter("dtype", "shape", "device")

# Between the names of a scan, so that names of different kinds or modules cannot run together.
_PARAMETERS, _BUFFERS, _CHILDREN, _END = 1, 2, 3, 0


def _scan(root: nn.Module, limit: int) -> tuple[list[object], list[Tensor]] | None:
    """Every name in the tree, breadth first, and every parameter and buffer; None if over `limit` modules.

    This is the hot loop of the room: it runs at each use of a cached layout. Slots that hold None count as names. The
    keys are asked for by name because TorchScript has objects in the place of dicts that cannot be iterated over.
    """
    names: list[object] = []
    tensors: list[Any] = []
    queue: list[Any] = [root]
    for module in queue:
        if module is None:
            names.append(None)
            continue
        try:
            own = module.__dict__
            parameters, buffers, children = own["_parameters"], own["_buffers"], own["_modules"]
        except KeyError:
            parameters, buffers, children = _owned(module)
        if parameters:
            names += parameters.keys()
            names.append(_PARAMETERS)
            tensors += parameters.values()
        if buffers:
            names += buffers.keys()
            names.append(_BUFFERS)
            if module._non_persistent_buffers_set:
                names.append(frozenset(module._non_persistent_buffers_set))
            tensors += buffers.values()
        if children:
            names += children.keys()
            names.append(_CHILDREN)
            queue += children.values()
            # A module inside itself would make the queue grow for ever.
            if len(queue) > limit:
                return None
        names.append(_END)
    return names, tensors


def _owned(module: nn.Module) -> list[dict[str, Any]]:
    """The parameters, buffers and children of a module that may make its dicts only when asked for them.

    TorchScript modules have objects of their own in the place of dicts.
    """
    return [held if isinstance(held, dict) else dict(held.items()) for held in _OWNED(module)]


class _Memory:
    """What is remembered about one module: enough to tell whether its layout still holds."""

    __slots__ = ("gaps", "ids", "layout", "modules", "names", "pick", "ref", "sizes", "ties")

    ref: "weakref.ref[nn.Module]"
    layout: Layout
    names: list[object]
    ids: list[int]
    sizes: list[object]
    modules: int
    ties: list[int]
    gaps: list[int]
    pick: Callable[[list[Tensor]], list[Tensor]]


# Keyed by id, not by module: a module class may define __eq__ and so have no hash. The reference's callback removes
# the memory when the module dies, before its id can be used again.
_MEMORIES: dict[int, _Memory] = {}


def layout_of(source: Source) -> Layout:
    """The layout of a module's parameters and buffers, or of given tensors.

    For a module it is computed once and then compared, on each call, with the live module: names, identities, dtypes,
    shapes and devices in the whole tree. So it is always the module's layout as it is now, whatever was assigned,
    deleted, appended, tied, converted or moved since, and through whichever interface.

    Args:
        source: A module, a dict of tensors, an iterable of tensors (named "0", "1", ...) or of (name, tensor) pairs.

    Raises:
        LayoutError: If a parameter is lazy, a name occurs twice, or a module contains itself.
        TypeError: If the source is none of these.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3))
        >>> layout_of(net).names
        ('0.weight', '0.bias')
        >>> _ = net.append(nn.Linear(3, 1, bias=False))
        >>> layout_of(net).names
        ('0.weight', '0.bias', '1.weight')
        >>> layout_of(net.named_parameters()) is layout_of(net)
        True
    """
    return layout_and_tensors(source)[0]


def layout_and_tensors(source: Source, *, sizes: bool = True) -> tuple[Layout, list[Tensor]]:
    """The layout together with the live parameters, one per entry and in the order of the entries.

    Args:
        source: As for `layout_of`.
        sizes: Whether to compare dtypes, shapes and devices too. Without it the tensors are the live ones all the
            same, but a conversion such as `.half()`, which leaves every Parameter in place, goes unnoticed, as may a
            new Parameter that took the id of one that was freed: only for a caller that checks the tensors it reads.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> layout, tensors = layout_and_tensors(net)
        >>> tensors[0] is net.weight
        True
    """
    if not isinstance(source, nn.Module):
        pairs = _named(source)
        layout, chosen = _build(pairs, [])
        return layout, [pairs[i][1] for i in chosen]
    memory = _MEMORIES.get(id(source))
    if memory is not None:
        tensors = _recognised(memory, source, sizes)
        if tensors is not None:
            return memory.layout, tensors
    return _remember(source)


def addresses(source: Source) -> tuple[int, ...]:
    """The address of each parameter's first element, in the order of the entries.

    Two readings differ when storage was swapped, by `.data =`, `.half()`, `load_state_dict(assign=True)` and the like,
    even where the layout is the same. Tensors without memory (on "meta", or empty) have address 0.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> before = addresses(net)
        >>> net.weight.data = net.weight.data.clone()
        >>> [a == b for a, b in zip(before, addresses(net))]
        [False, True]
    """
    return tuple(map(Tensor.data_ptr, layout_and_tensors(source, sizes=False)[1]))


def _recognised(memory: _Memory, module: nn.Module, sizes: bool) -> list[Tensor] | None:
    """The live parameters, if the module is as remembered; otherwise None."""
    try:
        scan = _scan(module, memory.modules)
    except AttributeError:
        return None
    if memory.ref() is not module or scan is None or scan[0] != memory.names:
        return None
    tensors = scan[1]
    ids = list(map(id, tensors))
    if ids != memory.ids:
        # Other tensors in the same places: a buffer that each forward pass rebinds, loaded or swapped parameters. The
        # layout still holds if the same places are tied and empty, and the sizes agree.
        if _first_places(ids) != memory.ties or _gaps(tensors) != memory.gaps or not _same_sizes(memory, tensors):
            return None
        memory.ids = ids
    elif sizes and not _same_sizes(memory, tensors):
        return None
    return memory.pick(tensors)


def _same_sizes(memory: _Memory, tensors: list[Tensor]) -> bool:
    """Whether dtypes, shapes and devices are as remembered."""
    if memory.gaps:
        tensors = [tensor for tensor in tensors if tensor is not None]
    try:
        return list(map(_SIZES, tensors)) == memory.sizes
    except RuntimeError:  # a lazy parameter, which has no shape, took the place of another
        return False


def _first_places(ids: list[int]) -> list[int]:
    """For each place, the first place with the same tensor: two lists of tensors are tied alike if these agree."""
    firsts: dict[int, int] = {}
    return [firsts.setdefault(key, place) for place, key in enumerate(ids)]


def _gaps(tensors: list[Tensor]) -> list[int]:
    """The places that hold None instead of a tensor."""
    return [place for place, tensor in enumerate(tensors) if tensor is None]


def _remember(root: nn.Module) -> tuple[Layout, list[Tensor]]:
    """Lay a module out and remember it."""
    slots, modules = _slots(root)
    scan = _scan(root, modules)
    if scan is None or len(scan[1]) != len(slots):
        raise LayoutError(f"{type(root).__name__} changed while its layout was read; edit it from one thread at a time")
    names, tensors = scan
    # `named_parameters()` goes depth first: sort by the position of each module among its siblings, from the root on.
    order = sorted((place for place, tensor in enumerate(tensors) if tensor is not None), key=lambda p: slots[p][0])
    for place in order:
        if is_lazy(tensors[place]):
            raise LayoutError(
                f"{slots[place][1]!r} is lazy: its shape is not known before the module has seen data; "
                "run one forward pass first"
            )
    parameters = [place for place in order if slots[place][2] is None]
    buffers = [place for place in order if slots[place][2] is not None]
    layout, chosen = _build(
        [(slots[place][1], tensors[place]) for place in parameters],
        [(slots[place][1], tensors[place], slots[place][2] is True) for place in buffers],
    )
    memory = _Memory()
    memory.layout = layout
    memory.names = names
    memory.ids = list(map(id, tensors))
    memory.ties = _first_places(memory.ids)
    memory.gaps = _gaps(tensors)
    memory.sizes = [_SIZES(tensor) for tensor in tensors if tensor is not None]
    memory.modules = modules
    memory.pick = _picker([parameters[i] for i in chosen], len(tensors))
    key = id(root)

    def forget(ref: "weakref.ref[nn.Module]") -> None:
        # Not whatever has the key by now: another thread may have remembered a new module under a reused id.
        if key in _MEMORIES and _MEMORIES[key].ref is ref:
            del _MEMORIES[key]

    memory.ref = weakref.ref(root, forget)
    _MEMORIES[key] = memory
    return layout, memory.pick(tensors)


def _slots(root: nn.Module) -> tuple[list[tuple[tuple[int, ...], str, bool | None]], int]:
    """What `_scan` finds, place by place, and how many modules (and absent ones) it visits.

    Each slot is (path of sibling positions, dotted name, persistence of a buffer or None for a parameter).
    """
    slots: list[tuple[tuple[int, ...], str, bool | None]] = []
    queue: list[tuple[nn.Module | None, str, tuple[int, ...], tuple[int, ...]]] = [(root, "", (), ())]
    for module, prefix, path, lineage in queue:
        if module is None:
            continue
        try:
            parameters, buffers, children = _owned(module)
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
        for name in parameters:
            slots.append((path, prefix + name, None))
        for name in buffers:
            slots.append((path, prefix + name, name not in module._non_persistent_buffers_set))
        if children:
            lineage = (*lineage, id(module))
            for position, (name, child) in enumerate(children.items()):
                queue.append((child, f"{prefix}{name}.", (*path, position), lineage))
    return slots, len(queue)


def _build(parameters: list[tuple[str, Tensor]], buffers: list[tuple[str, Tensor, bool]]) -> tuple[Layout, list[int]]:
    """Lay out named tensors.

    Returns:
        The layout, and the positions in `parameters` of the tensors that its entries stand for.
    """
    names, chosen = _grouped([name for name, _ in parameters], [tensor for _, tensor in parameters])
    entries: list[Entry] = []
    groups: dict[tuple[torch.dtype, torch.device], int] = {}
    filled: list[int] = []
    start = 0
    for position in chosen:
        name, tensor = parameters[position]
        shape, dtype, device, numel = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.numel()
        group = groups.setdefault((dtype, device), len(groups))
        if group == len(filled):
            filled.append(0)
        ties = tuple(names[id(tensor)][1:])
        entries.append(Entry(name, shape, dtype, device, numel, group, filled[group], start, ties))
        filled[group] += numel
        start += numel
    names, kept = _grouped([name for name, _, _ in buffers], [tensor for _, tensor, _ in buffers])
    buffer_entries = tuple(
        BufferEntry(name, tuple(t.shape), t.dtype, t.device, t.numel(), persistent, tuple(names[id(t)][1:]))
        for name, t, persistent in (buffers[position] for position in kept)
    )
    return Layout(tuple(entries), buffer_entries), chosen


def _grouped(names: list[str], tensors: list[Tensor]) -> tuple[dict[int, list[str]], list[int]]:
    """The names of each distinct tensor, by its id, and the position of its first name."""
    grouped: dict[int, list[str]] = {}
    firsts: list[int] = []
    for position, tensor in enumerate(tensors):
        known = grouped.get(id(tensor))
        if known is None:
            grouped[id(tensor)] = [names[position]]
            firsts.append(position)
        else:
            known.append(names[position])
    return grouped, firsts


def _picker(places: list[int], count: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function that takes the tensors at `places` out of a list of `count`, without a loop in Python."""
    if places == list(range(count)):
        return list
    if len(places) < 2:
        return lambda tensors: [tensors[place] for place in places]
    pick = itemgetter(*places)
    return lambda tensors: list(pick(tensors))


def _named(source: object) -> list[tuple[str, Tensor]]:
    """Given tensors with their names."""
    if isinstance(source, Tensor | str) or not isinstance(source, Iterable):
        raise TypeError(
            "a layout is that of a module, or of a dict, list or named_parameters() of tensors; "
            f"got {type(source).__name__}" + (" (put it in a list)" if isinstance(source, Tensor) else "")
        )
    pairs: list[tuple[str, Tensor]] = []
    taken: set[str] = set()
    items = source.items() if isinstance(source, Mapping) else source
    for position, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (str(position), item)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"item {position} is {_kind(item)}; each must be a tensor, or a pair of a name and a tensor"
            )
        if name in taken:
            raise LayoutError(f"two parameters are called {name!r}; names must be distinct")
        if is_lazy(tensor):
            raise LayoutError(f"{name!r} is lazy: its shape is not known yet; run one forward pass first")
        taken.add(name)
        pairs.append((name, tensor))
    return pairs


def _kind(item: object) -> str:
    """The type of an item, for an error."""
    if isinstance(item, tuple):
        return f"({', '.join(type(part).__name__ for part in item)})"
    return type(item).__name__
