"""State of links that work on all parameters concatenated: which parameters these are, and where they are after loading."""

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
"""Where a link over all parameters concatenated remembers which they are."""


class Vector:
    """Where the elements of a saved vector are now.

    Args:
        parts: The parameters that the vector was made of, as `slots.describe_params` has them; None where the link had not stepped.
        saved: The saved state.
        by_name: The parameters here by the names that they were saved with.
        active: Those that are trained.
        stacked: Whether they are stacked over members; each member then has a vector.
        reorders: How parameters that have another order of labels here are reordered, by saved name.

    Attributes:
        order: The parameters of the vector, as they are ordered here.
        fresh: Whether the vector can't be followed: a parameter is gone, or one was added to all of them.
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
        self.order = [param for param in active if any(param is known for known in self.params)]
        numels = [-1 if param is None else param.shape[self.stacked :].numel() for param in self.params]
        # A link in one branch of a chain has a vector of its own parameters, which others do not change.
        grown = sorted(names) == sorted(saved["order"]) and len(active) != len(names)
        self.fresh = numels != self.sizes or len(self.order) != len(names) or (grown and parts is not None)
        shapes = {name: saved["shapes"][name][self.stacked :] for name in names if name in reorders}
        self.inside = {name: reorders[name](torch.arange(prod(s)).view(*s)).reshape(-1) for name, s in shapes.items()}
        self.names = names

    def keep_shared(self, state: dict[str, Any], slots: Slots) -> dict[str, Any]:
        """The link's global state for the new order; what belongs to no parameter survives a fresh start."""
        if self.fresh:
            return {key: value for key, value in state.items() if isinstance(value, torch.Generator)}
        order = [f"{slots.find_name(p) or '?'}:{p.shape[self.stacked :].numel()}" for p in self.order]
        return {**self.permute(state), **({VECTOR: order} if order else {})}

    def permute(self, value: Any) -> Any:
        """A value with every axis as long as the vector in the new order."""
        if not self.inside and all(a is b for a, b in zip(self.order, self.params, strict=True)):
            return value
        pieces = dict(zip(self.params, torch.split(torch.arange(sum(self.sizes)), self.sizes), strict=True))
        for name, param in zip(self.names, self.params, strict=True):
            if name in self.inside:
                pieces[param] = pieces[param][self.inside[name]]
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
