"""Modules in checkpoints: what a file holds of one, and how it gets into another."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import layout
from .._encoding import encode
from .._texts import cut, shorten
from ..axes import ModelAxes, match_units
from ..layout import (
    AxesError,
    NameMap,
    Rename,
    Reorder,
    UnitMap,
    cut_like,
    list_names,
    match_name,
    memory_of,
    public_name,
)
from ..nn import VirtualTensor, align_saved, decode_axes, find_saved_axes, load_all_or_nothing, read_saved_axes, virtual
from ..particles import CONFIG_KEY as CONFIG
from ..particles import POLICY, Event, buffer_policy, events_of
from ._basics import CheckpointError
from ._read import EXTRA, LABELS, SavedFile
from ._tree import Tensors, class_name

_MOST_SHOWN: Final = 6


def make_rename(mapping: NameMap | None, names: list[str]) -> Rename:
    """Return the function that a mapping of names represents.

    Raises:
        CheckpointError: If part of it is about nothing in the checkpoint, or two names become one.
    """
    try:
        return layout.make_rename(mapping, names)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


# -- into a file -------------------------------------------------------------------------------------------------------


def collect(module: nn.Module | Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file holds of a module.

    Args:
        module: A module, or its state dict.
        tensors: Where the tensors of extra state go.

    Returns:
        The tensors by name, those with several names once, and the rest as JSON.

    Raises:
        CheckpointError: If something in it cannot be saved.
    """
    events = events_of(module)
    state = module.state_dict() if isinstance(module, nn.Module) else module
    if not isinstance(state, Mapping):
        raise TypeError(f"module is a {type(module).__name__}; it must be a torch.nn.Module or a state dict")
    tensors.taken.update(name for name in state if isinstance(name, str))
    found: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Any] = {}
    memory: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{shorten(name)} is not a name: the keys of a state dict are strings")
        if name.rpartition(".")[2] == EXTRA:
            extra[name] = encode(value, (name,), tensors)
            continue
        if not isinstance(value, Tensor) or is_lazy(value):
            raise CheckpointError(
                f"{shorten(name)} is a {class_name(value)}, not a torch.Tensor of some shape; put it into extra="
            )
        if value.numel() and not value.is_meta and value.layout is torch.strided:
            # Tensors are tied if they are the same memory seen the same way.
            first = memory.setdefault(memory_of(value), name)
            if first != name:
                ties[name] = first
                continue
        found[name] = value
    metadata = {path: dict(entry) for path, entry in getattr(state, "_metadata", {}).items()}
    history = [[e.number, e.sentence, sorted(e.added), sorted(e.removed)] for e in events]
    # Beside the history, so that a version of moduli that knows no times reads the file as well.
    times = [[e.when, list(e.where)] for e in events]
    told = {"ties": ties, "extra_state": extra, "history": history, "edited": times}
    content: dict[str, Any] = {"metadata": encode(metadata, ("metadata",), tensors)}
    content |= {key: value for key, value in told.items() if value}
    if isinstance(module, nn.Module):
        content |= _describe_module(module)
    return found, content


def _describe_module(module: nn.Module) -> dict[str, Any]:
    """What is told about a module beside its tensors."""
    virtuals: list[str] = []
    policies: dict[str, Any] = {}
    for path, each in module.named_modules():
        declared = {
            name for base in type(each).__mro__ for name, held in vars(base).items() if isinstance(held, virtual)
        }
        live = [held.name for held in vars(each).values() if isinstance(held, VirtualTensor)]
        virtuals += [f"{path}.{name}" if path else name for name in (*sorted(declared), *live)]
        if POLICY in vars(each):
            policies[path] = [list(pair) for pair in vars(each)[POLICY]]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    told = {"class": class_name(module), "virtual": virtuals, "policies": policies, "frozen": frozen}
    return {key: value for key, value in told.items() if value}


# -- out of a file -----------------------------------------------------------------------------------------------------


@dataclass
class Match:
    """What goes where.

    Attributes:
        taken: The name in the checkpoint by name here.
        fresh: Names here that keep what they have.
        dropped: Names of the checkpoint that are not used.
        converted: Names whose dtypes differ.
        reorders: How labelled tensors get the order of labels that they have here, by name here.
        resized: How tensors of a model with other units get those that they have here, by name here.
        apply: Does it, all or nothing.
    """

    taken: dict[str, str] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    reorders: dict[str, Reorder] = field(default_factory=dict)
    resized: dict[str, UnitMap] = field(default_factory=dict)
    apply: Callable[[], None] = lambda: None


def plan(
    saved: SavedFile, module: nn.Module, mapping: NameMap | None, strict: bool, axes: ModelAxes | None = None
) -> Match:
    """Find out how the module part of a file gets into a module.

    Args:
        saved: The file.
        module: The module.
        mapping: What names in the file are called in the module.
        strict: Whether to refuse what does not match.
        axes: The axes of the module, where it may have other units than the one in the file.

    Raises:
        CheckpointError: If names or shapes do not fit.
    """
    held: Mapping[str, Any] = module.state_dict()
    rename = make_rename(mapping, saved.every)
    added, removed, told = _explain(saved.history, events_of(module))
    found = Match(dropped=[name for name in saved.every if rename(name) is None])
    # Owned tensors are found also under their public names, and the other way.
    sources = {public_name(new): name for name in saved.every if (new := rename(name)) is not None}
    if axes is not None:
        found.resized = _find_resized(saved, held, sources, axes)
    missing: list[str] = []
    problems: list[str] = []
    for name, value in held.items():
        source = sources.pop(public_name(name), None)
        why = None if source is None or name in found.resized else _compare(saved, source, name, value)
        if source is not None and why is None:
            found.taken[name] = source
            if source not in saved.extra and saved.dtype(source) != value.dtype:
                found.converted.append(name)
            continue
        found.fresh.append(name)
        if source is None and name not in added:
            missing.append(name)
        if source is not None and why is not None:
            found.dropped.append(source)
            problems += [why] if name not in added | removed else []
    gone = set(map(public_name, removed))
    unexpected = [source for new, source in sources.items() if new not in gone]
    found.dropped += sources.values()
    for names, side in ((unexpected, "checkpoint"), (missing, "module")):
        if names:
            problems.insert(0, f"only the {side} has {list_names(names)}")
    if problems and strict:
        more = f"; and {len(problems) - _MOST_SHOWN} problems more" if len(problems) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{saved.path!r} does not fit the {type(module).__name__}: {'; '.join(problems[:_MOST_SHOWN])}{more}. {told}"
            "Say what has another name with mapping=, or load what fits with strict=False"
        )
    found.apply = lambda: _apply(saved, module, held, found, rename)
    same = {name: source for name, source in found.taken.items() if name not in found.resized}
    found.reorders = _find_reorders(saved, held, same)
    return found


def _find_resized(
    saved: SavedFile, held: Mapping[str, Any], sources: Mapping[str, str], axes: ModelAxes
) -> dict[str, UnitMap]:
    """Return how tensors of a file get the units that a module has, by name in the module."""
    pairs = {name: sources[public_name(name)] for name in held if public_name(name) in sources}
    pairs = {name: source for name, source in pairs.items() if source not in saved.extra}
    here, labels = read_saved_axes(held), {}
    for name, source in pairs.items() if here and saved.labels else ():
        ours, theirs = find_saved_axes(name, here), find_saved_axes(source, saved.labels)
        if ours is not None and theirs is not None:
            labels[name] = decode_axes(ours), decode_axes(theirs)
    try:
        return match_units(axes, {name: saved.shape(source) for name, source in pairs.items()}, labels)
    except ValueError as error:
        raise CheckpointError(f"{saved.path!r} is of another model: {error}") from error


def _find_reorders(saved: SavedFile, held: Mapping[str, Any], taken: Mapping[str, str]) -> dict[str, Reorder]:
    """Return how labelled tensors of a checkpoint get the order that they have in a module, for what belongs to them.

    Labels that differ are left to the module, which refuses them when it is loaded.
    """
    here = read_saved_axes(held)
    reorders: dict[str, Reorder] = {}
    for name, source in taken.items() if here and saved.labels else ():
        ours, theirs = find_saved_axes(name, here), find_saved_axes(source, saved.labels)
        if ours is None or theirs is None or source in saved.extra:
            continue
        try:
            reorder = align_saved(name, ours, theirs, saved.shape(source))
        except AxesError:
            continue
        if reorder is not None:
            reorders[name] = reorder
    return reorders


def _explain(saved: list[Event], here: list[Event]) -> tuple[frozenset[str], frozenset[str], str]:
    """What the edits made since a checkpoint was written explain: names added, names removed, and the edits in words."""
    if here[: len(saved)] == saved:
        since, told = here[len(saved) :], "Edits since it was written"
    elif saved[: len(here)] == here:
        since, told = saved[len(here) :], "The checkpoint is newer; make its edits here first"
    else:
        return frozenset(), frozenset(), "The checkpoint and the module have had different edits. "
    words = f"{told}: {_list_events(since)}. " if since else ""
    explained = since if len(here) > len(saved) else []
    added, removed = ([event.added for event in explained], [event.removed for event in explained])
    return frozenset().union(*added), frozenset().union(*removed), words


def _list_events(events: list[Event]) -> str:
    """Return edits in words, the first few of them."""
    more = len(events) - _MOST_SHOWN
    told = "; ".join(f"version {event.number}: {cut(event.sentence, 200)}" for event in events[:_MOST_SHOWN])
    return told + (f"; and {more} more" if more > 0 else "")


def _compare(saved: SavedFile, source: str, name: str, value: Any) -> str | None:
    """Why what a checkpoint has does not fit what a module has, or None."""
    if (source in saved.extra) != (name.rpartition(".")[2] == EXTRA):
        return f"{shorten(name)} is a tensor on one side only"
    if source in saved.extra:
        return None
    dtype, shape, here = saved.dtype(source), saved.shape(source), tuple(value.shape)
    # Named axes may be in another order, which the module puts right.
    same = sorted(shape) == sorted(here) if public_name(source) in saved.labels else shape == here
    if same and _convertible(dtype, value.dtype):
        return None
    return f"{shorten(source)} is {dtype} of shape {shape} in the checkpoint and {value.dtype} of shape {here} in the module"


def _convertible(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether values of a dtype may become those of another: numbers keep their kind, or become a wider one."""
    if saved == here:
        return True
    if saved.is_complex or here.is_complex:
        return here.is_complex and (saved.is_complex or saved.is_floating_point)
    return saved.is_floating_point == here.is_floating_point and torch.bool not in (saved, here)


def _apply(saved: SavedFile, module: nn.Module, held: Mapping[str, Any], found: Match, rename: Rename) -> None:
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in held.items():
        source = found.taken.get(name)
        if source is None:
            state[name] = value
        elif source in saved.extra:
            state[name] = saved.decode(saved.extra[source])
        elif name in found.resized:
            state[name] = found.resized[name].resize_state(saved[source].to(value.dtype), value)
        else:
            state[name] = cut_like(saved[source], value)
    own = getattr(held, "_metadata", {})
    state._metadata = _rename_metadata(saved, own, found, rename)  # type: ignore[attr-defined]
    try:
        load_all_or_nothing(module, state, lambda: module.load_state_dict(state))
    except Exception as error:  # torch's, or that of a hook: the module is as it was in any case
        raise CheckpointError(f"the {type(module).__name__} refuses the checkpoint: {error}") from error
    # Saved policies for buffers that are there, of modules without policies of their own.
    for path, each in module.named_modules():
        names = [name for name, _ in each.named_buffers()]
        for pattern, policy in [] if POLICY in vars(each) else saved.part.get("policies", {}).get(path, []):
            if any(match_name(name, pattern) for name in names):
                buffer_policy(each, policy, pattern)


def _rename_metadata(saved: SavedFile, own: Mapping[str, Any], found: Match, rename: Rename) -> Any:
    """The metadata of a checkpoint under the names that its tensors have here."""
    if not found.fresh and not found.resized and all(name == source for name, source in found.taken.items()):
        return OrderedDict(saved.metadata)
    result: OrderedDict[str, Any] = OrderedDict((path, copy.deepcopy(dict(entry))) for path, entry in own.items())
    for entry in result.values():
        entry.pop(CONFIG, None)
    for name, source in found.taken.items():
        if name in found.resized:
            continue  # it has the labels that it has here
        (path, _, key), old_path = public_name(name).rpartition("."), source.rpartition(".")[0]
        entry, old = result.setdefault(path, {}), saved.metadata.get(old_path, {})
        entry.update({k: v for k, v in old.items() if k not in (LABELS, CONFIG)})
        labels = entry.setdefault(LABELS, {})
        labels.pop(key, None)
        if public_name(source) in saved.labels:
            labels[key] = saved.labels[public_name(source)]
    for path, entry in saved.metadata.items():
        if CONFIG in entry and path in result:
            prefix = f"{path}." if path else ""
            names = ((rename(prefix + name), values) for name, values in entry[CONFIG].items())
            result[path][CONFIG] = {
                new.removeprefix(prefix): values for new, values in names if new is not None and new.startswith(prefix)
            }
    return result
