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
        self.integer, self.categorical = sorted(set(integer or ())), dict(sorted((categorical or {}).items()))
        for index in (*self.integer, *self.categorical):
            if not isinstance(index, int):
                raise TypeError(f"integer and categorical list the indices of coordinates; got {index!r}")
            if not 0 <= index < dim:
                raise ValueError(
                    f"integer or categorical names coordinate {index}, but there are {dim}, counted from zero"
                )
            if index in self.integer and index in self.categorical:
                raise ValueError(f"coordinate {index} is called both integer and categorical; choose one")
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
            if count < 1:
                raise ValueError(f"categorical coordinate {index} has {count} categories; it needs at least one")
            self.lower[index], self.upper[index] = 0.0, float(count - 1)
        for i in (~(self.lower <= self.upper)).nonzero()[:1, 0].tolist():
            low, high = float(self.lower[i]), float(self.upper[i])
            raise ValueError(f"coordinate {i} has the lower bound {low} above the upper bound {high}")
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
    mirrored = torch.where(x < lower, 2 * lower - x, torch.where(x > upper, 2 * upper - x, x))
    offset = torch.remainder(x - lower, 2 * width)
    folded = lower + torch.minimum(offset, 2 * width - offset)
    out = torch.where(width.isfinite() & (width > 0), folded, mirrored)
    # Inside the bounds a point stays what it is, to the last bit.
    return torch.where((x >= lower) & (x <= upper), x, out).clamp(lower, upper)
