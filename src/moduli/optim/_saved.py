"""Saving and loading an optimizer: `(link path, parameter name, key) -> tensor or plain value`.

In a saved state the value of a link for a parameter is `state[name]["path/key"]`, and a link's value for all parameters is
`links[path]["global"][key]`. Values are encoded one by one (`state_encoding`).
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_flat_shard
from ..layout import Guard, make_whole, map_tensors
from . import _groups
from ._checks import HALVES
from ._label_order import find_reorders, follow, list_axes
from ._matched_names import match_names
from ._portable import REST, read_portable
from ._resized_state import find_resized, resize_row
from ._saved_options import read_options
from ._torch_states import read_torch
from ._vector_state import VECTOR, Vector
from .forms.shard_state import is_stored_here, join_owned, pack_value, unpack_value
from .state import PER_PARAMETER, Rows, StandIns
from .state_encoding import decode_value, encode_row, encode_value, upgrade_value
from .transform import TensorTransform

if TYPE_CHECKING:
    from ..axes import ModelAxes
    from .module import Module
    from .optimizer import Optimizer

FORMAT = 2
ALL = "@all:"  # before the path of a link whose state is over all parameters, in place of the name of one
# Saved attributes of the optimizer itself.
_ATTRIBUTES = ("current_step", "num_evaluations", "should_terminate", "reasons", "rehearsed", "evaluating")


def _name_stand_ins(optimizer: Optimizer) -> dict[int, str]:
    """Return the names of the placeholder parameters that links make for their children, by slot."""
    return {
        optimizer.binding.slots.number(tensor): f"@{path}:{key}:{i}"
        for path, link in optimizer._links
        for key, stand_ins in link._stand_ins.items()
        for i, tensor in enumerate(stand_ins.tensors)
    }


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """Return the saved form of an optimizer, without the state of its links."""
    name, params = _make_namer(optimizer), optimizer.list_params()
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
    name = _make_namer(optimizer)
    return {name(p): None if is_flat_shard(p) else tuple(p.shape) for p in optimizer.list_params()}


def _make_namer(optimizer: Optimizer) -> Callable[[Tensor], str]:
    """Return the function that maps the optimizer's parameters to names, including those that a program added."""
    slots = optimizer.binding.slots
    if any(slots.find_name(param) is None for param in optimizer.list_params()):
        slots.name_params(optimizer.param_groups)
    return slots.find_name  # type: ignore[return-value]


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
    slots, stand_ins = optimizer.binding.slots, _name_stand_ins(optimizer)
    for slot, row in link.rows.items() if optimizer.rows is None else optimizer.rows.list_rows(link):
        name = slots.names[slot]
        if name is not None and link.vector_state and optimizer.shards is None:
            name = f"{ALL}{path}"
        name = name or stand_ins.get(slot)
        if row and name is not None:
            yield name, slots.params[slot], row


def read(optimizer: Optimizer, given: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Return a state dict of any origin (this version, 0.2, torch's tools, torch's optimizers) in the form of `pack`.

    Args:
        optimizer: The optimizer that loads it.
        given: The state dict.
        strict: Whether every part of torch's state must have a place here.
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
    """Return a state of format 1 in today's encoding."""

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
        strict: Whether parts without a place here are an error.
        guard: Undoes the changes if loading fails.
        axes: The axes of the model, to resize state; None if it is not resized.
    """
    reader = _StateReader(optimizer, saved, strict, axes)
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


class _StateReader:
    """A reader of a saved state for the links and parameters here; it changes neither.

    Attributes:
        links: The links by path.
        params: The parameters, and placeholders of links on other shapes, by the names that they were saved with.
        options: The saved settings of each parameter.
    """

    def __init__(
        self, optimizer: Optimizer, saved: Mapping[str, Any], strict: bool, axes: ModelAxes | None = None
    ) -> None:
        self.optimizer, self.saved = optimizer, saved
        self.links: dict[str, Module] = dict(optimizer._links)
        params, name_of = optimizer.list_params(), _make_namer(optimizer)
        self.slots = optimizer.binding.slots
        self.active = [param for param in params if param.requires_grad]
        here = {name_of(param): param for param in params}
        matching = match_names(saved["shapes"], {name: tuple(param.shape) for name, param in here.items()})
        self.params = {old: here[name] for old, name in matching.items() if name in here}
        _check(optimizer, saved, strict)
        self.resized = {} if axes is None else find_resized(optimizer, saved, self.params, axes)
        self._restarted: set[str] = set()
        self.misfits = _find_misfits(saved, {k: v for k, v in self.params.items() if k not in self.resized})
        if strict:
            for name, (own, shape) in self.misfits.items():
                raise ValueError(
                    f"parameter {name!r} has shape {own}, its saved state is for {shape}; strict=False leaves it out"
                )
        self.options = read_options(optimizer, saved, self.params, strict)
        for name in self.misfits:  # their settings are loaded, their state is not
            del self.params[name]
        _make_stand_ins(self.links, saved)
        if optimizer.rows is not None:
            optimizer.rows.dissolve()
        self.params.update((name, self.slots.params[slot]) for slot, name in _name_stand_ins(optimizer).items())
        same = {name: param for name, param in self.params.items() if name not in self.resized}
        self.reorders = find_reorders(optimizer, saved, same)
        self.vectors = dict(self._find_vectors())
        self._unused: set[str] = set()

    def _find_vectors(self) -> Iterator[tuple[str, Vector]]:
        stacked = self.optimizer.binding.members is not None
        for path, link in self.links.items():
            parts = self.saved["links"].get(path, {"global": {}})["global"].get(VECTOR)
            # Vectors of placeholders have no names; the link that made the placeholders keeps their order.
            named = not any(part.startswith("?:") for part in parts or ())
            if link.vector_state and path in self.saved["links"] and named:
                yield path, Vector(parts, self.saved, self.params, self.active, stacked, self.reorders)

    def read_rows(self) -> dict[str, Rows]:
        """Return the state of each link (by path) for each parameter (by slot)."""
        rows: dict[str, Rows] = {path: {} for path in self.links}
        for name, entries in self.saved["state"].items():
            read: dict[tuple[str, int], dict[str, Any]] = {}
            for entry, saved in entries.items():
                path, key = split_key(entry, self.saved["links"])
                if path not in rows:
                    continue
                slot, value = self._read_value(name, path, key, saved)
                if slot is not None:
                    read.setdefault((path, slot), {})[key] = value
            for (path, slot), row in read.items():
                followed = self._follow_labels(name, path, row)
                if name in self.resized:
                    followed = self._resize(name, path, followed)
                rows[path].setdefault(slot, {}).update(followed)
        return rows

    def _resize(self, name: str, path: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a link for a parameter with other units; empty where it restarts."""
        link, lead = self.links[path], int(self.optimizer.binding.members is not None)
        inner = any(key.startswith(PER_PARAMETER) for _, child in link.links() for key in child._stand_ins)
        resized = None if inner else resize_row(link, row, [self.resized[name]], self.params[name], lead)
        if resized is None:
            self._restarted.add(f"saved state of {path} for {name} can't follow a parameter with other units")
        return resized or {}

    def _read_value(self, name: str, path: str, key: str, value: Any) -> tuple[int | None, Any]:
        """Return a value as a link stores it, and its slot; None for values that are not stored here."""
        vector = self.vectors.get(path) if name.startswith(ALL) else None
        if vector is not None and vector.fresh:
            return None, None
        if (self.misfits or self.resized) and self._is_of_misfit(name):
            return None, None
        param = self.params.get(name) if vector is None else next(iter(vector.order), None)
        if param is None:
            self._unused.add(name)
            return None, None
        link, shards = self.links[path], self.optimizer.shards
        dtype = self.saved.get("dtypes", {}).get(name)
        value = cast_value(value, dtype, param, widens_state(link, key))
        stored = shards is None or is_stored_here(shards, link, param)
        value = map_tensors(value, make_whole) if shards is None else unpack_value(shards, link, param, value)
        value = decode_value(value, param.device if param.numel() else None, f"state {path}/{key} of {name}")
        slot = self.slots.number(param) if stored else None
        return slot, value if vector is None else vector.permute(value)

    def _is_of_misfit(self, name: str) -> bool:
        """Return whether a saved name is that of a parameter of another shape, or of a tensor that may be derived from one."""
        maker = _find_maker(name, self.links)
        if maker is None:
            return name in self.misfits
        key = name[len(maker) + 2 :].rpartition(":")[0]
        return not key.startswith(PER_PARAMETER) or key.removeprefix(PER_PARAMETER) in {*self.misfits, *self.resized}

    def _follow_labels(self, name: str, path: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a link for a parameter, in the order that the parameter's labels have here."""
        maker = _find_maker(name, self.links) if self.reorders else None
        if maker is not None:
            what = f"{path} has state of tensors that {maker} makes of parameters"
            raise ValueError(f"labels have another order here, but {what}. Load it into the saved order of labels")
        if name not in self.reorders:
            return row
        lead = int(self.optimizer.binding.members is not None)
        shape = self.saved["shapes"][name][lead:]
        return follow(self.links[path], f"{path} for {name}", row, self.reorders[name], shape, lead)

    def read_shared(self) -> dict[str, tuple[dict[str, Any], Any]]:
        """Return the state of each link (by path) for all parameters, and its extra state."""
        device = self.active[0].device if self.active else None
        shared: dict[str, tuple[dict[str, Any], Any]] = {}
        for path in self.links.keys() & self.saved["links"].keys():
            saved_link = self.saved["links"][path]
            where = f"state of {path}"
            if self.reorders and saved_link["extra"] and self.links[path].keeps_outside:
                what = f"{path} has state that only {type(self.links[path]).__name__} can read"
                raise ValueError(f"labels have another order here, but {what}. Load it into the saved order of labels")
            state = {key: decode_value(value, device, where) for key, value in saved_link["global"].items()}
            if path in self.vectors:
                state = self.vectors[path].keep_shared(state, self.slots)
            outside = self.links[path].keeps_outside and bool(self.misfits or self.resized)
            shared[path] = state, {} if outside else decode_value(saved_link["extra"], None, where)
        return {path: shared[path] for path in self.links if path in shared}

    def list_dropped(self) -> list[str]:
        """Return a sentence for each part of the state that is left out."""
        dropped = [
            f"saved state of {name} has no parameter here" for name in sorted(self._unused - self.misfits.keys())
        ]
        dropped += [
            f"saved state of {name} is for shape {shape} and the parameter here has shape {own}"
            for name, (own, shape) in self.misfits.items()
        ]
        dropped += sorted(self._restarted)
        afresh = [path for path, vector in self.vectors.items() if vector.fresh]
        return dropped + [
            f"{path} would start afresh: its state is over all parameters, which are others" for path in afresh
        ]


def split_key(entry: str, paths: Iterable[str]) -> tuple[str, str]:
    """Split "path/key" into the path of a link and the key of its state; both may have slashes."""
    path = max((path for path in paths if entry.startswith(f"{path}/")), key=len, default="")
    return path, entry[len(path) + 1 :]


def widens_state(link: Module, key: str) -> bool:
    """Return whether a link stores a state of half-precision parameters in single precision."""
    return isinstance(link, TensorTransform) and link.elementwise and key not in link.narrow_states


def cast_value(value: Any, saved: str | None, param: Tensor, pointwise: bool) -> Any:
    """Return a value with numbers in the precision of the saved parameter converted to that here; others (counts, scales) stay.

    Pointwise links keep state of half-precision parameters in single precision.

    Args:
        value: The value, perhaps nested.
        saved: The dtype of the saved parameter, as text; None if it is that here.
        param: The parameter.
        pointwise: Whether the link widens its state.
    """
    before = getattr(torch, saved.removeprefix("torch.")) if saved else param.dtype
    after = torch.float32 if pointwise and param.dtype in HALVES else param.dtype
    kinds = {before.to_real(): after.to_real(), before: after}
    if pointwise and before in HALVES:
        kinds[torch.float32] = after
    return map_tensors(value, lambda tensor: tensor.to(kinds.get(tensor.dtype, tensor.dtype)))


def _check(optimizer: Optimizer, saved: Mapping[str, Any], strict: bool) -> None:
    members = optimizer.binding.members
    if saved.get("members") != members:
        raise ValueError(f"the state is of {saved.get('members') or 'no'} members, here are {members or 'none'}")
    here, there = [path for path, _ in optimizer._links], list(saved["links"])
    if strict and here != there:
        what = f"the saved one has {', '.join(there)}, this one {', '.join(here)}"
        raise ValueError(f"the chains differ: {what}; strict=False takes over the links that agree")


def _find_misfits(
    saved: Mapping[str, Any], by_name: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes here and in the saved state of the parameters for which they differ."""
    pairs = [(name, by_name[name], shape) for name, shape in saved["shapes"].items() if name in by_name]
    return {
        name: (tuple(param.shape), tuple(shape))
        for name, param, shape in pairs
        if shape is not None and param.shape != tuple(shape)
    }


def _make_stand_ins(links: Mapping[str, Module], saved: Mapping[str, Any]) -> None:
    """Create the placeholder parameters that saved state refers to and that links have not made yet."""
    for name in saved["state"]:
        path = _find_maker(name, links)
        if path is not None:
            key, _, position = name[len(path) + 2 :].rpartition(":")
            stand_ins = links[path]._stand_ins.setdefault(key, StandIns())
            while len(stand_ins.tensors) <= int(position):
                stand_ins.tensors.append(torch.empty(0))


def _find_maker(name: str, paths: Iterable[str]) -> str | None:
    """Return the path of the link that made the tensor with this name ("@path:key:position"); None for a parameter."""
    return max((path for path in paths if name.startswith(f"@{path}:")), key=len, default=None)
