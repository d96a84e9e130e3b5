"""State over all parameters concatenated: how it follows them when they are reordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import map_tensors

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
