"""Modules in checkpoints: collecting a module's content for a file, and matching a file with a module."""

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
from ..particles import (
    POLICY,
    Event,
    FollowedNames,
    buffer_policy,
    events_of,
    find_events_since,
    follow_names,
    has_version,
)
from ._basics import CheckpointError
from ._read import EXTRA, LABELS, SavedFile
from ._tree import Tensors, class_name

_MOST_SHOWN: Final = 6


def make_rename(mapping: NameMap | None, names: list[str]) -> Rename:
    """Return a mapping of names as a function.

    Raises:
        CheckpointError: If a key of the mapping matches nothing in the checkpoint, or two names become one.
    """
    try:
        return layout.make_rename(mapping, names)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


# -- into a file -------------------------------------------------------------------------------------------------------


def collect(module: nn.Module | Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the content of a module for a file.

    Args:
        module: A module, or its state dict.
        tensors: Collects the tensors of extra state.

    Returns:
        The tensors by name, those with several names once, and the rest as JSON.

    Raises:
        CheckpointError: If something in it cannot be saved.
    """
    state = module.state_dict() if isinstance(module, nn.Module) else module
    if not isinstance(state, Mapping):
        raise TypeError(f"module is a {type(module).__name__}; it must be a torch.nn.Module or a state dict")
    tensors.taken.update(name for name in state if isinstance(name, str))
    stored: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Any] = {}
    memory: dict[Any, str] = {}
    for name, value in state.items():
        _check_entry(name, value)
        if name.rpartition(".")[2] == EXTRA:
            extra[name] = encode(value, (name,), tensors)
            continue
        if value.numel() and not value.is_meta and value.layout is torch.strided:
            # Tensors are tied if they are the same view of the same memory.
            first = memory.setdefault(memory_of(value), name)
            if first != name:
                ties[name] = first
                continue
        stored[name] = value
    metadata = {path: dict(entry) for path, entry in getattr(state, "_metadata", {}).items()}
    facts = {"ties": ties, "extra_state": extra, **_describe_edits(module)}
    content: dict[str, Any] = {"metadata": encode(metadata, ("metadata",), tensors)}
    content |= {key: value for key, value in facts.items() if value or (key == "history" and has_version(module))}
    if isinstance(module, nn.Module):
        content |= _describe_module(module)
    return stored, content


def _describe_edits(module: Any) -> dict[str, list[Any]]:
    """Return the edits of a module, and in a separate list, which older versions of moduli do not read, when and where."""
    events = events_of(module)
    history = [[e.number, e.sentence, sorted(e.added), sorted(e.removed)] for e in events]
    return {"history": history, "edited": [[e.when, list(e.where)] for e in events]}


def _check_entry(name: Any, value: Any) -> None:
    """Raise CheckpointError unless an entry of a state dict is a tensor, or extra state, with a name."""
    if not isinstance(name, str):
        raise CheckpointError(f"{shorten(name)} is not a name: the keys of a state dict are strings")
    if name.rpartition(".")[2] != EXTRA and (not isinstance(value, Tensor) or is_lazy(value)):
        raise CheckpointError(
            f"{shorten(name)} is a {class_name(value)}, not a torch.Tensor of some shape; put it into extra="
        )


def _describe_module(module: nn.Module) -> dict[str, Any]:
    """Return the facts about a module that are saved beside its tensors."""
    virtuals: list[str] = []
    policies: dict[str, Any] = {}
    for path, each in module.named_modules():
        declared = {
            name for base in type(each).__mro__ for name, value in vars(base).items() if isinstance(value, virtual)
        }
        live = [value.name for value in vars(each).values() if isinstance(value, VirtualTensor)]
        virtuals += [f"{path}.{name}" if path else name for name in (*sorted(declared), *live)]
        if POLICY in vars(each):
            policies[path] = [list(pair) for pair in vars(each)[POLICY]]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    facts = {"class": class_name(module), "virtual": virtuals, "policies": policies, "frozen": frozen}
    return {key: value for key, value in facts.items() if value}


# -- out of a file -----------------------------------------------------------------------------------------------------


@dataclass
class Match:
    """The matching of a checkpoint with a module.

    Attributes:
        taken: For each name in the module that is loaded, the name in the checkpoint.
        fresh: Names in the module that are not changed.
        dropped: Names in the checkpoint that are not used.
        converted: Names whose dtypes differ.
        reorders: The reorderings that give labelled tensors the module's order of labels, by name in the module.
        resized: The maps from tensors of a model with other units to the module's units, by name in the module.
        apply: Loads the module, all or nothing.
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
    """Return the matching of a file with a module.

    Args:
        saved: The file.
        module: The module.
        mapping: The names in the module for names in the file.
        strict: Whether mismatches raise.
        axes: The axes of the module, if it may have other units than the one in the file.

    Raises:
        CheckpointError: If names or shapes do not fit.
    """
    current: Mapping[str, Any] = module.state_dict()
    followed, edits = _explain(saved, module)
    added, removed = followed.added, followed.removed
    rename = _follow_moves(make_rename(mapping, saved.every), followed)
    match = Match(dropped=[name for name in saved.every if rename(name) is None])
    # Owned tensors match under their public names, in either direction.
    sources = {public_name(new): name for name in saved.every if (new := rename(name)) is not None}
    if axes is not None:
        match.resized = _find_resized(saved, current, sources, axes)
    missing, problems = _match_names(saved, current, sources, match, (added, removed))
    expected = set(map(public_name, removed))
    unexpected = [source for new, source in sources.items() if new not in expected]
    match.dropped += sources.values()
    for names, side in ((unexpected, "checkpoint"), (missing, "module")):
        if names:
            problems.insert(0, f"only the {side} has {list_names(names)}")
    if problems and strict:
        more = f"; and {len(problems) - _MOST_SHOWN} problems more" if len(problems) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{saved.path!r} does not fit the {type(module).__name__}: {'; '.join(problems[:_MOST_SHOWN])}{more}. {edits}"
            "Say what has another name with mapping=, or load what fits with strict=False"
        )
    match.apply = lambda: _apply(saved, module, current, match, rename)
    same = {name: source for name, source in match.taken.items() if name not in match.resized}
    match.reorders = _find_reorders(saved, current, same)
    return match


def _match_names(
    saved: SavedFile,
    current: Mapping[str, Any],
    sources: dict[str, str],
    match: Match,
    explained: tuple[frozenset[str], frozenset[str]],
) -> tuple[list[str], list[str]]:
    """Match the names of a module with those of a file, and record the result in `match`.

    Args:
        saved: The file.
        current: The state dict of the module.
        sources: The names in the file by public name in the module; matched ones are removed.
        match: The matching.
        explained: The names that edits have added, and removed, since the file was written.

    Returns:
        The names that the file lacks, and other mismatches in words, both without those that edits explain.
    """
    added, removed = explained
    missing: list[str] = []
    problems: list[str] = []
    for name, value in current.items():
        source = sources.pop(public_name(name), None)
        if source is None:
            match.fresh.append(name)
            missing += [name] if name not in added else []
            continue
        mismatch = None if name in match.resized else _compare(saved, source, name, value)
        if mismatch is None:
            match.taken[name] = source
            if source not in saved.extra and saved.dtype(source) != value.dtype:
                match.converted.append(name)
        else:
            match.fresh.append(name)
            match.dropped.append(source)
            problems += [mismatch] if name not in added | removed else []
    return missing, problems


def _find_resized(
    saved: SavedFile, current: Mapping[str, Any], sources: Mapping[str, str], axes: ModelAxes
) -> dict[str, UnitMap]:
    """Return the maps from tensors of a file to the units of a module, by name in the module."""
    pairs = {name: sources[public_name(name)] for name in current if public_name(name) in sources}
    pairs = {name: source for name, source in pairs.items() if source not in saved.extra}
    here, labels = read_saved_axes(current), {}
    for name, source in pairs.items() if here and saved.labels else ():
        ours, theirs = find_saved_axes(name, here), find_saved_axes(source, saved.labels)
        if ours is not None and theirs is not None:
            labels[name] = decode_axes(ours), decode_axes(theirs)
    try:
        return match_units(axes, {name: saved.shape(source) for name, source in pairs.items()}, labels)
    except ValueError as error:
        raise CheckpointError(f"{saved.path!r} is of another model: {error}") from error


def _find_reorders(saved: SavedFile, current: Mapping[str, Any], taken: Mapping[str, str]) -> dict[str, Reorder]:
    """Return the reorderings that give labelled tensors of a checkpoint the order of a module; optimizer states follow them.

    Labels that differ are left to the module, which raises when it is loaded.
    """
    here = read_saved_axes(current)
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


def _explain(file: SavedFile, module: nn.Module) -> tuple[FollowedNames, str]:
    """Return the present names of the tensors of a checkpoint after the edits since it was written, and the edits in words."""
    saved, here = file.history, events_of(module)
    if here[: len(saved)] == saved:
        since, relation = here[len(saved) :], "Edits since it was written"
    elif saved[: len(here)] == here:
        since, relation = saved[len(here) :], "The checkpoint is newer; make its edits here first"
    else:
        return follow_names(file.every, ()), "The checkpoint and the module have had different edits. "
    words = f"{relation}: {_list_events(since)}. " if since else ""
    explained = since if len(here) > len(saved) else []
    if "history" not in file.part and any(event.moved for event in explained):
        # A file without edits may be of the first version, or written without them: its names tell.
        fitting = find_events_since(file.every, module, here)
        explained = [event._replace(moved=()) for event in here] if fitting is None else list(fitting)
    return follow_names(file.every, explained), words


def _follow_moves(rename: Rename, followed: FollowedNames) -> Rename:
    """Return the names that a mapping gives, or where it keeps the name, the one that edits have given."""

    def follow(name: str) -> str | None:
        new = rename(name)
        return followed.names.get(name, name) if new == name else new

    return follow


def _list_events(events: list[Event]) -> str:
    """Return the first few edits in words."""
    more = len(events) - _MOST_SHOWN
    text = "; ".join(f"version {event.number}: {cut(event.sentence, 200)}" for event in events[:_MOST_SHOWN])
    return text + (f"; and {more} more" if more > 0 else "")


def _compare(saved: SavedFile, source: str, name: str, value: Any) -> str | None:
    """Return the mismatch of an entry of a checkpoint and one of a module, in words; None if they match."""
    if (source in saved.extra) != (name.rpartition(".")[2] == EXTRA):
        return f"{shorten(name)} is a tensor on one side only"
    if source in saved.extra:
        return None
    dtype, shape, here = saved.dtype(source), saved.shape(source), tuple(value.shape)
    # Named axes may be in another order, which loading the module aligns.
    same = sorted(shape) == sorted(here) if public_name(source) in saved.labels else shape == here
    if same and _convertible(dtype, value.dtype):
        return None
    return f"{shorten(source)} is {dtype} of shape {shape} in the checkpoint and {value.dtype} of shape {here} in the module"


def _convertible(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether values of a dtype may be converted to another: within floats, complex numbers or integers, or to complex."""
    if saved == here:
        return True
    if saved.is_complex or here.is_complex:
        return here.is_complex and (saved.is_complex or saved.is_floating_point)
    return saved.is_floating_point == here.is_floating_point and torch.bool not in (saved, here)


def _apply(saved: SavedFile, module: nn.Module, current: Mapping[str, Any], match: Match, rename: Rename) -> None:
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in current.items():
        source = match.taken.get(name)
        if source is None:
            state[name] = value
        elif source in saved.extra:
            state[name] = saved.decode(saved.extra[source])
        elif name in match.resized:
            state[name] = match.resized[name].resize_state(saved[source].to(value.dtype), value)
        else:
            state[name] = cut_like(saved[source], value)
    own = getattr(current, "_metadata", {})
    state._metadata = _rename_metadata(saved, own, match, rename)  # type: ignore[attr-defined]
    try:
        load_all_or_nothing(module, state, lambda: module.load_state_dict(state))
    except Exception as error:  # of torch, or of a hook: the module is restored in any case
        raise CheckpointError(f"the {type(module).__name__} refuses the checkpoint: {error}") from error
    # Saved policies apply to existing buffers of modules without their own policies.
    for path, each in module.named_modules():
        names = [name for name, _ in each.named_buffers()]
        for pattern, policy in [] if POLICY in vars(each) else saved.part.get("policies", {}).get(path, []):
            if any(match_name(name, pattern) for name in names):
                buffer_policy(each, policy, pattern)


def _rename_metadata(saved: SavedFile, own: Mapping[str, Any], match: Match, rename: Rename) -> Any:
    """Return the metadata of a checkpoint under the names of the module."""
    if not match.fresh and not match.resized and all(name == source for name, source in match.taken.items()):
        return OrderedDict(saved.metadata)
    result: OrderedDict[str, Any] = OrderedDict((path, copy.deepcopy(dict(entry))) for path, entry in own.items())
    for entry in result.values():
        entry.pop(CONFIG, None)
    for name, source in match.taken.items():
        if name in match.resized:
            continue  # resized tensors have the module's labels
        (path, _, key), old_path = public_name(name).rpartition("."), source.rpartition(".")[0]
        entry, old = result.setdefault(path, {}), saved.metadata.get(old_path, {})
        entry.update({k: v for k, v in old.items() if k not in (LABELS, CONFIG)})
        labels = entry.setdefault(LABELS, {})
        labels.pop(key, None)
        if public_name(source) in saved.labels:
            labels[key] = saved.labels[public_name(source)]
    for path, entry in saved.metadata.items():
        if CONFIG in entry and path in result:
            result[path][CONFIG] = _rename_configs(entry[CONFIG], f"{path}." if path else "", rename)
    return result


def _rename_configs(configs: Mapping[str, Any], prefix: str, rename: Rename) -> dict[str, Any]:
    """Return configurations under the new names of their parameters; those that leave their module are dropped."""
    names = ((rename(prefix + name), values) for name, values in configs.items())
    return {new.removeprefix(prefix): values for new, values in names if new is not None and new.startswith(prefix)}
