"""The state of links that work on all parameters concatenated, reordered to the order that the parameters have here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..layout import Reorder, map_tensors
from .slots import Slots
from .state_encoding import MemberValues

VECTOR = "vector of"
"""The key of `global_state` under which a link over all parameters concatenated stores their names and sizes."""


class Vector:
    """The mapping of the elements of a saved vector to their new positions.

    Args:
        parts: The parameters of the vector, as from `slots.describe_params`; None if the link had not stepped.
        saved: The saved state.
        by_name: The parameters here by the names that they were saved with.
        active: The parameters that are trained.
        stacked: Whether parameters are stacked over members, each with its own vector.
        reorders: The reordering of each parameter whose labels have another order here, by saved name.

    Attributes:
        order: The parameters of the vector, in their order here.
        fresh: Whether the state restarts, since the vector has other parameters here.
        inside: For parameters whose labels have another order, by saved name, the new order of their elements.
    """

    def __init__(
        self,
        parts: list[str] | None,
        saved: Mapping[str, Any],
        by_name: dict[str, Tensor],
        active: list[Tensor],
        stacked: bool,
        reorders: Mapping[str, Reorder],
    ) -> None:
        self.stacked = int(stacked)
        split = [part.rpartition(":") for part in parts or ()]
        names, self.sizes = [name for name, _, _ in split], [int(size) for _, _, size in split]
        self.params = [by_name.get(name) for name in names]
        own = set(map(id, self.params))
        self.order = [param for param in active if id(param) in own]
        numels = [-1 if param is None else param.shape[self.stacked :].numel() for param in self.params]
        # A link of `m.Split` has a vector of some of the parameters; only one of all parameters restarts if there are new ones.
        grown = sorted(names) == sorted(saved["order"]) and len(active) != len(names)
        self.fresh = numels != self.sizes or len(self.order) != len(names) or (grown and parts is not None)
        shapes = {name: saved["shapes"][name][self.stacked :] for name in names if name in reorders}
        self.inside = {name: reorders[name](torch.arange(prod(s)).view(*s)).reshape(-1) for name, s in shapes.items()}
        self.names = names

    def keep_shared(self, state: dict[str, Any], slots: Slots) -> dict[str, Any]:
        """Return the link's global state in the new order; only the random generators if the state restarts."""
        if self.fresh:
            return {key: value for key, value in state.items() if isinstance(value, torch.Generator)}
        order = [f"{slots.find_name(p) or '?'}:{p.shape[self.stacked :].numel()}" for p in self.order]
        return {**self.permute(state), **({VECTOR: order} if order else {})}

    def permute(self, value: Any) -> Any:
        """Return a value with every axis as long as the vector reordered."""
        if not self.inside and all(a is b for a, b in zip(self.order, self.params, strict=True)):
            return value
        positions = dict(zip(self.params, torch.split(torch.arange(sum(self.sizes)), self.sizes), strict=True))
        for name, param in zip(self.names, self.params, strict=True):
            if name in self.inside:
                positions[param] = positions[param][self.inside[name]]
        index = torch.cat([positions[param] for param in self.order])

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
