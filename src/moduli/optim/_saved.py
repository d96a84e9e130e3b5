"""Saving and loading an optimizer: `(link path, parameter name, key) -> tensor or plain value`.

In a saved state the value of a link for a parameter is `state[name]["path/key"]`, and a link's value for all parameters is
`links[path]["global"][key]`. Values are encoded one by one (`state_encoding`).
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_flat_shard
from ..layout import Guard
from . import _groups
from ._label_order import list_axes
from ._portable import REST, read_portable
from ._state_names import ALL, make_namer, name_stand_ins
from ._state_reader import StateReader
from ._torch_states import read_torch
from .forms.shard_state import join_owned, pack_value
from .state_encoding import encode_row, encode_value, upgrade_value

if TYPE_CHECKING:
    from ..axes import ModelAxes
    from .module import Module
    from .optimizer import Optimizer

FORMAT = 2
# The saved attributes of the optimizer itself.
_ATTRIBUTES = ("current_step", "num_evaluations", "should_terminate", "reasons", "rehearsed", "evaluating")


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """Return the saved form of an optimizer, without the state of its links."""
    name, params = make_namer(optimizer), optimizer.list_params()
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in _groups.options(group).items() if not callable(value)}
        groups.append({**encode_row(options, "param group"), "params": list(map(name, group["params"]))})
    return {
        "format": FORMAT,
        "state": {},
        "param_groups": groups,
        "links": {
            path: {"global": {}, "extra": encode_value(link._extra_pack(), f"{path}: extra")}
            for path, link in optimizer._links
        },
        "shapes": list_shapes(optimizer),
        "axes": list_axes(optimizer),
        "dtypes": {name(param): str(param.dtype) for param in params},
        "order": [name(param) for param in params if param.requires_grad],
        **{key: copy.copy(getattr(optimizer, key)) for key in _ATTRIBUTES},
        "members": optimizer.binding.members,
        "made_with": {
            "torch": str(torch.__version__),
            "kernels": os.environ.get("MODULI_KERNELS", "auto"),
            "threads": torch.get_num_threads(),
        },
    }


def list_shapes(optimizer: Optimizer) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the parameters by name; None for those flattened by FSDP1, whose size depends on the process."""
    name = make_namer(optimizer)
    return {name(p): None if is_flat_shard(p) else tuple(p.shape) for p in optimizer.list_params()}


def pack(optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole state of an optimizer as plain data."""
    shards, packed = optimizer.shards, describe(optimizer)
    for path, link in optimizer._links:
        for name, param, row in _name_rows(optimizer, path, link):
            into = packed["state"].setdefault(name, {})
            for key, value in row.items():
                whole = value if shards is None else pack_value(shards, link, param, value)
                into[f"{path}/{key}"] = encode_value(whole, f"{path}: state {key!r}")
        packed["links"][path]["global"] = encode_row(link.global_state, f"{path}: global state")
    return packed if shards is None else join_owned(shards, packed, {link: path for path, link in optimizer._links})


def _name_rows(optimizer: Optimizer, path: str, link: Module) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    """Yield each tensor that a link has state for, with the name under which it is saved."""
    slots, stand_ins = optimizer.binding.slots, name_stand_ins(optimizer)
    for slot, row in link.rows.items() if optimizer.rows is None else optimizer.rows.list_rows(link):
        name = slots.names[slot]
        if name is not None and link.vector_state and optimizer.shards is None:
            name = f"{ALL}{path}"
        name = name or stand_ins.get(slot)
        if row and name is not None:
            yield name, slots.params[slot], row


def read(optimizer: Optimizer, given: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Return a state dict of this version, of 0.2, of torch's tools or of torch's optimizers in the form that `pack` returns.

    Args:
        optimizer: The optimizer that loads it.
        given: The state dict.
        strict: Whether each entry of the state of a torch optimizer must have a counterpart here.
    """
    saved = dict(given)
    if any(REST in group for group in saved.get("param_groups", ())):
        saved = read_portable(saved)
    elif "format" not in saved and {"state", "param_groups"} <= set(saved):
        saved = read_torch(optimizer, describe(optimizer), saved, strict)
    missing = [key for key in ("format", "state", "links", "shapes", "order", "current_step") if key not in saved]
    if missing:
        raise ValueError(f"this is not the state of a moduli Optimizer: it has no {missing[0]!r}")
    if saved["format"] > FORMAT:
        raise ValueError(f"the state was saved in format {saved['format']}; this version reads up to {FORMAT}")
    return saved if saved["format"] == FORMAT else _upgrade(saved)


def _upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of format 1 in the current encoding."""

    def upgrade(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: upgrade_value(value) for key, value in row.items()}

    return {
        **saved,
        "format": FORMAT,
        "state": {name: upgrade(row) for name, row in saved["state"].items()},
        "links": {path: {**upgrade(own), "global": upgrade(own["global"])} for path, own in saved["links"].items()},
        "param_groups": [upgrade(group) for group in saved["param_groups"]],
    }


def unpack(
    optimizer: Optimizer, saved: Mapping[str, Any], strict: bool, guard: Guard, axes: ModelAxes | None = None
) -> None:
    """Load a state that `read` returned; all of it is read and checked before anything changes.

    Args:
        optimizer: The optimizer.
        saved: The state.
        strict: Whether a part of the state that can't be loaded here is an error.
        guard: Undoes the changes if loading fails.
        axes: The axes of the model, to resize state; None if it is not resized.
    """
    reader = StateReader(optimizer, saved, strict, axes)
    rows = reader.read_rows()
    shared = reader.read_shared()
    dropped = reader.list_dropped()
    if dropped and strict:
        raise ValueError(f"{'; '.join(dropped)}. Load with strict=False to leave it out")
    for link in reader.links.values():
        _protect(link, guard)
    for path, (state, extra) in shared.items():
        link = reader.links[path]
        link.reset()
        link.global_state.clear()
        link.global_state.update(state)
        link._extra_unpack(extra)
    for path, link in reader.links.items():  # a link that is reset resets those inside it
        link.rows.update((slot, link.make_row(row)) for slot, row in rows[path].items())
        link.row_writes.add()
    guard.mappings(*optimizer.param_groups)
    for group in optimizer.param_groups:  # a group gets the options of its first parameter that has saved ones
        group.update(next((reader.options[param] for param in group["params"] if param in reader.options), {}))
    _groups.apply_groups(optimizer)
    for key in _ATTRIBUTES:
        setattr(optimizer, key, copy.copy(saved.get(key, False)))
    optimizer._carried = None
    for text in dropped:
        warnings.warn(f"{text}, and is left out", stacklevel=4)


def _protect(link: Module, guard: Guard) -> None:
    """Register the parts of a link that loading replaces with a guard; its tensors are not written to."""
    guard.add(link.row_writes.add)
    guard.mappings(link.rows, link.global_state, link.__dict__)
    guard.add(partial(link._extra_unpack, copy.deepcopy(link._extra_pack())))
