"""Saved state for the parameters as they are here: under other names, and over all of them in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import map_tensors
from ._groups import clean_name

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
        active: The parameters here.
        names: Their names.
        members: How many members a population's parameters are stacked over; each member then has a vector.

    Attributes:
        first: The parameter that the link's state is kept for.
        fresh: Whether the vector can't be followed: a parameter is gone, or one was added to all of them.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        parts: list[str] | None,
        active: Sequence[Tensor],
        names: Mapping[Tensor, str],
        members: int | None = None,
    ) -> None:
        stacked = 0 if members is None else 1
        here = {f"{names.get(param, '?')}:{param.shape[stacked:].numel()}": param for param in active}
        shapes = {name: torch.Size(saved["shapes"][name])[stacked:] for name in saved["order"]}
        before = [f"{name}:{shape.numel()}" for name, shape in shapes.items()]
        self.stacked = stacked
        self.first: Tensor | None = None
        self.index: Tensor | None = None
        self.order: list[str] | None = None
        # A link in one branch of a chain has a vector of its own parameters, which others do not change.
        whole = parts is not None and sorted(parts) == sorted(before)
        self.fresh = parts is not None and (
            any(part not in here for part in parts) or (whole and len(here) != len(before))
        )
        if parts is None or self.fresh:
            return
        self.order = [part for part in here if part in parts]
        self.first = here[self.order[0]] if self.order else None
        if self.order != parts:
            sizes = [int(part.rpartition(":")[2]) for part in parts]
            pieces = dict(zip(parts, torch.split(torch.arange(sum(sizes)), sizes), strict=True))
            self.index = torch.cat([pieces[part] for part in self.order])

    def keep_shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """The link's global state for the new order; what belongs to no parameter survives a fresh start."""
        if self.fresh:
            return {key: value for key, value in state.items() if isinstance(value, torch.Generator)}
        out = {key: self.permute(value) for key, value in state.items()}
        if self.order is not None:
            out[VECTOR] = self.order
        return out

    def permute(self, value: Any) -> Any:
        """A value with every axis as long as the vector in the new order."""
        index = self.index
        if index is None:
            return value

        def permute_axes(tensor: Tensor) -> Tensor:
            for dim, size in enumerate(tensor.shape):
                if dim >= self.stacked and size == index.numel() and size > 0:
                    tensor = tensor.index_select(dim, index.to(tensor.device))
            return tensor

        return map_tensors(value, permute_axes)


_WRAPPER = "module."


def rename(saved: Mapping[str, Any], here: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
    """The saved state with the names that the parameters have here.

    What `torch.compile`, FSDP and checkpointing put into names is left out; `module.` before all names (that of
    DistributedDataParallel) is added or left out; where only one side has names, the order decides.

    Args:
        saved: A saved state.
        here: The shapes of the parameters here by name, in order.
    """
    names = list(saved["shapes"])
    found = _mapping(names, saved["shapes"], here)
    if all(old == new for old, new in found.items()):
        return saved

    def new(name: str) -> str:
        member, bracket, rest = name.rpartition("[")
        return f"{found[member]}{bracket}{rest}" if name not in found and member in found else found.get(name, name)

    def parts(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        held = shared.get(VECTOR)
        if held is None:
            return shared
        return {**shared, VECTOR: [f"{new(part.rpartition(':')[0])}:{part.rpartition(':')[2]}" for part in held]}

    return {
        **saved,
        "state": _keys(saved["state"], new),
        "shapes": _keys(saved["shapes"], new),
        "dtypes": _keys(saved.get("dtypes", {}), new),
        "user": _keys(saved.get("user", {}), new),
        "order": [new(name) for name in saved["order"]],
        "param_groups": [
            {**group, "params": [new(name) for name in group["params"]]} for group in saved["param_groups"]
        ],
        "links": {path: {**entry, "global": parts(entry["global"])} for path, entry in saved["links"].items()},
    }


def _keys(table: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    return {new(name): value for name, value in table.items()}


def _mapping(
    names: Sequence[str], shapes: Mapping[str, Sequence[int]], here: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    if names and _are_positions(names) != _are_positions(list(here)):  # no names are those of no parameters
        if [shapes[name] and tuple(shapes[name]) for name in names] != list(here.values()):
            raise ValueError(
                "the saved parameters and those here can't be told apart by name (one side has none), and their shapes differ "
                f"in order: saved {[tuple(shapes[name]) for name in names]}, here {list(here.values())}. Give the module itself, "
                "or net.named_parameters(), on both sides"
            )
        return dict(zip(names, here, strict=True))
    clean = {name: clean_name(name) for name in names}
    if not any(name in here for name in clean.values()):
        if all(name.startswith(_WRAPPER) for name in clean.values()):
            return {old: name.removeprefix(_WRAPPER) for old, name in clean.items()}
        if here and all(name.startswith(_WRAPPER) for name in here):
            return {old: _WRAPPER + name for old, name in clean.items()}
    return clean


def _are_positions(names: Sequence[str]) -> bool:
    return list(names) == [str(i) for i in range(len(names))]
