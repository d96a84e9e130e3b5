"""Modules in checkpoints: what a file holds of one, and how it gets into another."""

import copy
import fnmatch
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..labels import Tensor as LabelledTensor
from ..layout import cut_like, memory_of
from ..nn import VirtualTensor, load_all_or_nothing, virtual
from ..particles import CONFIG_KEY as CONFIG
from ..particles import POLICY, buffer_policy, events_of
from ._errors import CheckpointError
from ._match import Match, NameMap, Rename, edits_between, make_rename, match, public_name
from ._read import EXTRA, LABELS, Saved
from ._tree import Tensors, class_name, encode

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
    if isinstance(module, nn.Module):
        state: Mapping[str, Any] = module.state_dict()
    elif isinstance(module, Mapping):
        state = module
    else:
        raise TypeError(f"module is a {type(module).__name__}; it must be a torch.nn.Module or a state dict")
    tensors.reserve(name for name in state if isinstance(name, str))
    found: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Any] = {}
    memory: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{name!r} is not a name: the keys of a state dict are strings")
        if name.rpartition(".")[2] == EXTRA:
            extra[name] = encode(value, (name,), tensors)
            continue
        _check(name, value)
        if value.numel() and not value.is_meta and value.layout is torch.strided:
            # Tensors are tied if they are the same memory seen the same way.
            first = memory.setdefault(memory_of(value), name)
            if first != name:
                ties[name] = first
                continue
        found[name] = value
    metadata = {path: dict(entry) for path, entry in getattr(state, "_metadata", {}).items()}
    history = [[e.number, e.sentence, sorted(e.added), sorted(e.removed)] for e in events]
    told = {"ties": ties, "extra_state": extra, "history": history}
    content: dict[str, Any] = {"metadata": encode(metadata, ("metadata",), tensors)}
    content |= {key: value for key, value in told.items() if value}
    if isinstance(module, nn.Module):
        content |= _describe_module(module)
    return found, content


def _check(name: str, value: Any) -> None:
    if isinstance(value, LabelledTensor):
        raise CheckpointError(f"{name!r} is a labelled tensor by itself; save the module that owns it, or its data")
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{name!r} is a {type(value).__name__}, not a tensor; put it into extra=")
    if is_lazy(value):
        raise CheckpointError(f"{name!r} is lazy and has no shape yet; call the module once before saving it")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{name!r} cannot be written as UTF-8; rename it") from None


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


def plan(saved: Saved, module: nn.Module, mapping: NameMap | None, strict: bool, path: str) -> Match:
    """Find out how the module part of a file gets into a module.

    Raises:
        CheckpointError: If names or shapes do not fit.
    """
    lazy = [name for name, held in module.named_parameters() if is_lazy(held)]
    if lazy:
        raise CheckpointError(f"{lazy[0]!r} is lazy and has no shape yet; call the module once before loading it")
    held: Mapping[str, Any] = module.state_dict()
    rename = make_rename(mapping, saved.every)
    reader = saved.reader
    converted: list[str] = []

    def fits(source: str, name: str) -> str | None:
        if (source in saved.extra) != (name.rpartition(".")[2] == EXTRA):
            return f"{name!r} is a tensor on one side only"
        if source in saved.extra:
            return None
        place, value = saved.source(source), held[name]
        dtype, shape = reader.dtype(place), reader.shape(place)
        # Named axes may be in another order, which the module puts right.
        labelled = public_name(source) in saved.labels
        same = sorted(shape) == sorted(value.shape) if labelled else shape == tuple(value.shape)
        if not same or not _convertible(dtype, value.dtype):
            here = f"{value.dtype} of shape {tuple(value.shape)}"
            return f"{source!r} is {dtype} of shape {shape} in the checkpoint and {here} in the module"
        if dtype != value.dtype:
            converted.append(name)
        return None

    edits = edits_between(saved.history, module)
    found = match(saved.every, held, rename, edits, fits)
    if found.problems and strict:
        virtual = sorted(set(saved.virtual) & set(held))
        told = f" ({', '.join(map(repr, virtual))} is virtual in the checkpoint)" if virtual else ""
        raise CheckpointError(
            f"{path!r} does not fit the {type(module).__name__}: {'; '.join(found.problems)}{told}. "
            + (f"{edits.told[0].upper()}{edits.told[1:]}. " if edits.told else "")
            + "Say what has another name with mapping=, or load what fits with strict=False"
        )
    found.converted, found.apply = converted, lambda: _apply(saved, module, held, found, rename)
    return found


def _convertible(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether values of a dtype may become those of another: numbers keep their kind, or become a wider one."""
    if saved == here:
        return True
    if saved.is_complex or here.is_complex:
        return here.is_complex and (saved.is_complex or saved.is_floating_point)
    return saved.is_floating_point == here.is_floating_point and torch.bool not in (saved, here)


def _apply(saved: Saved, module: nn.Module, held: Mapping[str, Any], found: Match, rename: Rename) -> None:
    state: OrderedDict[str, Any] = OrderedDict()
    tensors: dict[str, Tensor] = {}
    for name, value in held.items():
        source = found.taken.get(name)
        if source is None:
            state[name] = value
        elif source in saved.extra:
            state[name] = saved.decode(saved.extra[source])
        else:
            place = saved.source(source)
            if place not in tensors:
                tensors[place] = saved.reader.tensor(place)
            state[name] = cut_like(tensors[place], value)
    own = getattr(held, "_metadata", {})
    state._metadata = _rename_metadata(saved, own, found, rename)  # type: ignore[attr-defined]
    policies = _policies_to_set(module, saved)
    try:
        load_all_or_nothing(module, state, lambda: module.load_state_dict(state))
    except Exception as error:  # torch's, or that of a hook: the module is as it was in any case
        raise CheckpointError(f"the {type(module).__name__} refuses the checkpoint: {error}") from error
    for each, policy, pattern in policies:
        buffer_policy(each, policy, pattern)


def _policies_to_set(module: nn.Module, saved: Saved) -> list[tuple[nn.Module, str, str]]:
    """Saved policies for buffers that are there, of modules without policies of their own."""
    found = []
    for path, pairs in saved.policies.items():
        each = next((each for at, each in module.named_modules() if at == path), None)
        if each is None or POLICY in each.__dict__:
            continue
        names = [name for name, _ in each.named_buffers()]
        found += [(each, policy, pattern) for pattern, policy in pairs if fnmatch.filter(names, pattern)]
    return found


def _rename_metadata(saved: Saved, own: Mapping[str, Any], found: Match, rename: Rename) -> Any:
    """The metadata of a checkpoint under the names that its tensors have here."""
    if not found.fresh and all(name == source for name, source in found.taken.items()):
        return OrderedDict(saved.metadata)
    result: OrderedDict[str, Any] = OrderedDict((path, copy.deepcopy(dict(entry))) for path, entry in own.items())
    for entry in result.values():
        entry.pop(CONFIG, None)
    for name, source in found.taken.items():
        (path, _, key), old_path = public_name(name).rpartition("."), source.rpartition(".")[0]
        entry, old = result.setdefault(path, {}), saved.metadata.get(old_path, {})
        entry.update({k: v for k, v in old.items() if k not in (LABELS, CONFIG)})
        labels = entry.pop(LABELS, {})
        labels.pop(key, None)
        if public_name(source) in saved.labels:
            labels[key] = saved.labels[public_name(source)]
        if labels:
            entry[LABELS] = labels
    for path, entry in saved.metadata.items():
        if CONFIG in entry and path in result:
            prefix = f"{path}." if path else ""
            names = ((rename(prefix + name), values) for name, values in entry[CONFIG].items())
            result[path][CONFIG] = {
                new.removeprefix(prefix): values for new, values in names if new is not None and new.startswith(prefix)
            }
    return result
