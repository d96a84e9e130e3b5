"""Reading a saved state for the links and parameters of an optimizer; nothing changes here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import make_whole, map_tensors
from ._label_order import find_reorders, follow
from ._matched_names import match_names
from ._resized_state import find_resized, resize_row
from ._saved_options import read_options
from ._saved_precision import cast_value, widens_state
from ._state_names import ALL, find_maker, make_namer, name_stand_ins, split_key
from ._vector_state import VECTOR, Vector
from .forms.shard_state import is_stored_here, unpack_value
from .state import PER_PARAMETER, Rows, StandIns
from .state_encoding import decode_value

if TYPE_CHECKING:
    from ..axes import ModelAxes
    from .module import Module
    from .optimizer import Optimizer


class StateReader:
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
        params, name_of = optimizer.list_params(), make_namer(optimizer)
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
        self.params.update((name, self.slots.params[slot]) for slot, name in name_stand_ins(optimizer).items())
        same = {name: param for name, param in self.params.items() if name not in self.resized}
        self.reorders = find_reorders(optimizer, saved, same)
        self.vectors = dict(self._find_vectors())
        self._unused: set[str] = set()

    def _find_vectors(self) -> Iterator[tuple[str, Vector]]:
        stacked = self.optimizer.binding.members is not None
        for path, link in self.links.items():
            parts = self.saved["links"].get(path, {"global": {}})["global"].get(VECTOR)
            # Placeholders in a vector have no names ("?"); the link that made them has them in the same order here.
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
        """Return the state of a link for a parameter with other units; an empty row if it restarts."""
        link, lead = self.links[path], int(self.optimizer.binding.members is not None)
        inner = any(key.startswith(PER_PARAMETER) for _, child in link.links() for key in child._stand_ins)
        resized = None if inner else resize_row(link, row, [self.resized[name]], self.params[name], lead)
        if resized is None:
            self._restarted.add(f"saved state of {path} for {name} can't follow a parameter with other units")
        return resized or {}

    def _read_value(self, name: str, path: str, key: str, value: Any) -> tuple[int | None, Any]:
        """Return the slot of a saved value, and the value as a link stores it; (None, None) if it is left out.

        Args:
            name: The saved name of the parameter.
            path: The path of the link.
            key: The key of the state.
            value: The saved value.
        """
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
        """Return whether a saved name is that of a parameter with another shape here, or of a tensor that may depend on one."""
        maker = find_maker(name, self.links)
        if maker is None:
            return name in self.misfits
        key = name[len(maker) + 2 :].rpartition(":")[0]
        return not key.startswith(PER_PARAMETER) or key.removeprefix(PER_PARAMETER) in {*self.misfits, *self.resized}

    def _follow_labels(self, name: str, path: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a link for a parameter, in the order that the parameter's labels have here."""
        maker = find_maker(name, self.links) if self.reorders else None
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


def _check(optimizer: Optimizer, saved: Mapping[str, Any], strict: bool) -> None:
    """Raise ValueError for a state of another number of members, and if `strict` for one of another chain."""
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
    triples = [(name, by_name[name], shape) for name, shape in saved["shapes"].items() if name in by_name]
    return {
        name: (tuple(param.shape), tuple(shape))
        for name, param, shape in triples
        if shape is not None and param.shape != tuple(shape)
    }


def _make_stand_ins(links: Mapping[str, Module], saved: Mapping[str, Any]) -> None:
    """Create the placeholder parameters that saved state refers to and that links have not made yet."""
    for name in saved["state"]:
        path = find_maker(name, links)
        if path is not None:
            key, _, position = name[len(path) + 2 :].rpartition(":")
            stand_ins = links[path]._stand_ins.setdefault(key, StandIns())
            while len(stand_ins.tensors) <= int(position):
                stand_ins.tensors.append(torch.empty(0))
