"""State as plain data: encoded, under other names, and over all parameters in another order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layout import map_tensors
from ._groups import clean_name
from ._settings import Binding


class MemberValues(dict[int, Any]):
    """What members keep that has not one shape for all of them, by their numbers; one that is missing keeps nothing."""


_SIMPLE = (bool, int, float, complex, str, type(None))


def encode(value: Any, where: str) -> Any:
    """Plain data for a value; what it can't be made of is refused, with the place."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Generator):
        return {"__kind__": "generator", "device": str(value.device), "state": value.get_state()}
    if isinstance(value, MemberValues):
        return {"__kind__": "members", "items": {i: encode(item, where) for i, item in value.items()}}
    if isinstance(value, deque):
        return {"__kind__": "deque", "maxlen": value.maxlen, "items": [encode(item, where) for item in value]}
    if isinstance(value, set | frozenset):
        return {"__kind__": "set", "items": [encode(item, where) for item in sorted(value)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"__kind__": type(value).__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [encode(item, where) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(f"{where}: a dictionary has the key {key!r}; saved state has keys that are strings")
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which can't be saved; see _extra_pack and _extra_unpack")


def decode(value: Any, device: torch.device | None) -> Any:
    """The value again; tensors are copies, on this device."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied if device is None or copied.device == device else copied.to(device)
    if isinstance(value, dict):
        kind = value.get("__kind__")
        if kind == "generator":
            generator = torch.Generator(value["device"])
            generator.set_state(value["state"].cpu())
            return generator
        if kind == "members":
            return MemberValues((i, decode(item, device)) for i, item in value["items"].items())
        if kind == "deque":
            return deque([decode(item, device) for item in value["items"]], maxlen=value["maxlen"])
        if kind == "set":
            return {decode(item, device) for item in value["items"]}
        if kind == "dtype":
            return getattr(torch, value["name"])
        if kind == "device":
            return torch.device(value["name"])
        return {key: decode(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item, device) for item in value)
    return value


VECTOR = "vector of"
"""Where a link over all parameters concatenated remembers which they are."""


def describe_params(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> list[str]:
    """Parameters as plain text, to be compared."""
    return [f"{names.get(param, '?')}:{param.numel()}" for param in params]


class Vector:
    """Where the elements of a saved vector are now.

    Args:
        saved: A saved optimizer.
        parts: The parameters that the vector was made of, as `describe_params`; None where the link had not stepped.
        by_name: The parameters here by the names that they were saved with.
        active: Those that are trained.
        stacked: Whether they are stacked over members; each member then has a vector.

    Attributes:
        order: The parameters of the vector, as they are ordered here.
        fresh: Whether the vector can't be followed: a parameter is gone, or one was added to all of them.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        parts: Sequence[str] | None,
        by_name: Mapping[str, Tensor],
        active: Sequence[Tensor],
        stacked: bool,
    ) -> None:
        self.stacked = int(stacked)
        split = [part.rpartition(":") for part in parts or ()]
        names, self.sizes = [name for name, _, _ in split], [int(size) for _, _, size in split]
        self.params = [by_name.get(name) for name in names]
        self.order = [param for param in active if any(param is known for known in self.params)]
        numels = [-1 if param is None else param.shape[self.stacked :].numel() for param in self.params]
        # A link in one branch of a chain has a vector of its own parameters, which others do not change.
        grown = sorted(names) == sorted(saved["order"]) and len(active) != len(names)
        self.fresh = numels != self.sizes or len(self.order) != len(names) or (grown and parts is not None)

    def keep_shared(self, state: dict[str, Any], binding: Binding) -> dict[str, Any]:
        """The link's global state for the new order; what belongs to no parameter survives a fresh start."""
        if self.fresh:
            return {key: value for key, value in state.items() if isinstance(value, torch.Generator)}
        order = [f"{binding.names.get(p, '?')}:{p.shape[self.stacked :].numel()}" for p in self.order]
        return {**self.permute(state), **({VECTOR: order} if order else {})}

    def permute(self, value: Any) -> Any:
        """A value with every axis as long as the vector in the new order."""
        if all(a is b for a, b in zip(self.order, self.params, strict=True)):
            return value
        pieces = dict(zip(self.params, torch.split(torch.arange(sum(self.sizes)), self.sizes), strict=True))
        index = torch.cat([pieces[param] for param in self.order])

        def permute_axes(tensor: Tensor, stacked: int) -> Tensor:
            for dim, size in enumerate(tensor.shape):
                if dim >= stacked and size == index.numel() and size > 0:
                    tensor = tensor.index_select(dim, index.to(tensor.device))
            return tensor

        if isinstance(value, MemberValues):
            return MemberValues((i, map_tensors(item, partial(permute_axes, stacked=0))) for i, item in value.items())
        if isinstance(value, dict):
            return {key: self.permute(item) for key, item in value.items()}
        return map_tensors(value, partial(permute_axes, stacked=self.stacked))


_WRAPPER = "module."


def match_names(shapes: Mapping[str, Any], here: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The names that saved parameters have here.

    What `torch.compile`, FSDP and checkpointing put into names is left out; `module.` before all names (that of
    DistributedDataParallel) is added or left out; where only one side has names, the order decides.

    Args:
        shapes: The saved shapes by name.
        here: The shapes of the parameters here by name, in order.
    """
    if shapes and _are_positions(shapes) != _are_positions(here):  # no names are those of no parameters
        if [shape and tuple(shape) for shape in shapes.values()] != list(here.values()):
            what = f"saved {list(shapes.values())}, here {list(here.values())}"
            raise ValueError(f"only one side has names of parameters, and their shapes differ in order: {what}")
        return dict(zip(shapes, here, strict=True))
    new = {name: clean_name(name) for name in shapes}
    if not any(name in here for name in new.values()):
        if all(name.startswith(_WRAPPER) for name in new.values()):
            return {old: name.removeprefix(_WRAPPER) for old, name in new.items()}
        if here and all(name.startswith(_WRAPPER) for name in here):
            return {old: _WRAPPER + name for old, name in new.items()}
    return new


def _are_positions(names: Iterable[str]) -> bool:
    return all(name == str(i) for i, name in enumerate(names))
