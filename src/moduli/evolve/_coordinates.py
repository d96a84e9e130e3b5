"""What the coordinates of a search are: real, integer or categorical, and how far they reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Bounds: TypeAlias = tuple[Tensor | float, Tensor | float]
"""A lower and an upper bound: numbers for all coordinates, or one number per coordinate. Ends may be infinite."""


class Coordinates:
    """The bounds and kinds of the coordinates of one search, checked once."""

    def __init__(
        self,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        bounds: Bounds | None,
        integer: Iterable[int] | None,
        categorical: Mapping[int, int] | None,
    ) -> None:
        self.dim = dim
        self.integer = _indices(integer or (), dim, "integer")
        self.categorical = dict(sorted((categorical or {}).items()))
        _indices(self.categorical, dim, "categorical")
        both = set(self.integer) & set(self.categorical)
        if both:
            raise ValueError(f"coordinate {min(both)} is called both integer and categorical; choose one")
        for index, count in self.categorical.items():
            if count < 1:
                raise ValueError(f"categorical coordinate {index} has {count} categories; it needs at least one")
        self.bounded = bounds is not None or bool(self.categorical)
        low, high = (-torch.inf, torch.inf) if bounds is None else bounds
        self.whole = torch.tensor([*self.integer, *self.categorical], dtype=torch.long, device=device)
        if bounds is None and len(self.whole) == 0:
            # Two numbers, which broadcast, instead of two vectors.
            self.lower, self.upper = (torch.tensor(b, dtype=dtype, device=device) for b in (-torch.inf, torch.inf))
            return
        self.lower, self.upper = (
            _expand_bound(b, dim, dtype, device, side) for b, side in ((low, "lower"), (high, "upper"))
        )
        for index, count in self.categorical.items():
            self.lower[index], self.upper[index] = 0.0, float(count - 1)
        crossed = (~(self.lower <= self.upper)).nonzero()
        if len(crossed):
            i = int(crossed[0])
            raise ValueError(
                f"coordinate {i} has the lower bound {float(self.lower[i])} above the upper bound {float(self.upper[i])}"
            )
        for i in self.integer:
            self.lower[i], self.upper[i] = self.lower[i].ceil(), self.upper[i].floor()
            if self.lower[i] > self.upper[i]:
                raise ValueError(f"there is no integer between the bounds of coordinate {i}")

    def rounded(self, x: Tensor) -> Tensor:
        """Integer and categorical coordinates of the rows of x as whole numbers."""
        if len(self.whole) == 0:
            return x
        return x.index_copy(-1, self.whole, x.index_select(-1, self.whole).round())


def check_choice(name: str, given: Any, known: Sequence[Any]) -> None:
    """Refuse a setting that is none of those that there are."""
    if given not in known:
        raise ValueError(f"{name}={given!r} is unknown; there are {', '.join(map(repr, known[:-1]))} and {known[-1]!r}")


def check_sigma(sigma: float) -> None:
    """Refuse a standard deviation that is not positive."""
    if not sigma > 0:
        raise ValueError(f"sigma={sigma}: members need a positive standard deviation")


def _indices(given: Iterable[int], dim: int, name: str) -> list[int]:
    found = sorted(set(given))
    for index in found:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name} lists the indices of coordinates; got {index!r}")
        if not 0 <= index < dim:
            raise ValueError(f"{name} names coordinate {index}, but there are {dim}, counted from zero")
    return found


def _expand_bound(bound: Tensor | float, dim: int, dtype: torch.dtype, device: torch.device, side: str) -> Tensor:
    tensor = torch.as_tensor(bound, dtype=dtype, device=device)
    if tensor.shape not in ((), (dim,)):
        raise ValueError(f"the {side} bound has shape {tuple(tensor.shape)}; give a number or {dim} numbers")
    if bool(tensor.isnan().any()):
        raise ValueError(f"the {side} bound contains NaN; write an infinite bound as -inf or inf")
    return tensor.expand(dim).clone()


def reflect(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Fold the line into [lower, upper] by reflection at the ends.

    The fitness of the folded point is a continuous function of the unfolded one, so a distribution that lives outside
    of the bounds is judged as fairly as one inside. An end may be infinite; equal ends give that one value.
    """
    width = upper - lower
    both, finite_lower, finite_upper = width.isfinite(), lower.isfinite(), upper.isfinite()
    period = torch.where(both & (width > 0), 2 * width, torch.ones_like(width))
    low, high = lower.nan_to_num(neginf=0.0), upper.nan_to_num(posinf=0.0)
    offset = torch.remainder(x - low, period)
    folded = low + torch.minimum(offset, period - offset).clamp(max=width.nan_to_num(posinf=0.0))
    from_below, from_above = low + (x - low).abs(), high - (high - x).abs()
    out = torch.where(both, folded, torch.where(finite_lower, from_below, torch.where(finite_upper, from_above, x)))
    # Inside the bounds a point stays what it is, to the last bit.
    return torch.where((x >= lower) & (x <= upper), x, out).clamp(lower, upper)
