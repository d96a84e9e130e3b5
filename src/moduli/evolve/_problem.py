"""What a search is about: the kinds and bounds of its coordinates, what fitness counts for, and why it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, unique
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
            if not 0 <= index < dim:
                raise ValueError(f"integer or categorical names coordinate {index} of {dim}, counted from zero")
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


# -- fitness: only the order counts, ties share, and what is not a number comes last


def clean(fitness: Tensor) -> Tensor:
    """Fitness in double, with NaN as the worst there is: +inf. Always a copy."""
    f = fitness.detach().to(torch.float64, copy=True)
    return f.masked_fill_(f.isnan(), math.inf)


def _count_better(fitness: Tensor) -> tuple[Tensor, Tensor]:
    """For each member, how many are better, and how many are better or equal."""
    ordered = fitness.sort().values
    return torch.searchsorted(ordered, fitness), torch.searchsorted(ordered, fitness, right=True)


def centre_ranks(fitness: Tensor) -> Tensor:
    """Ranks scaled to [-½, ½], the best member at -½ (Salimans et al. 2017, section 2.1).

    Equal members get the mean of their ranks, so a flat fitness gives zeros and moves nothing.
    """
    n = len(fitness)
    below, upto = _count_better(fitness)
    rank = 0.5 * (below + upto - 1).to(fitness)
    return rank / max(n - 1, 1) - (0.5 if n > 1 else 0.0)


def nes_utilities(fitness: Tensor) -> Tensor:
    """Utilities that sum to zero, the best member highest (Wierstra et al. 2014, section 3.1).

    u_k = max(0, ln(N/2 + 1) - ln k) / Σ_j max(0, ln(N/2 + 1) - ln j) - 1/N for the k-th best; equal members share.
    """
    n = len(fitness)
    k = torch.arange(1, n + 1, dtype=torch.float64, device=fitness.device)
    raw = (math.log(n / 2 + 1) - k.log()).clamp(min=0)
    total = torch.cat([raw.new_zeros(1), raw.cumsum(0)])
    below, upto = _count_better(fitness)
    return (total[upto] - total[below]) / (upto - below) / total[-1].clamp(min=1e-300) - 1 / n


def standardise(fitness: Tensor) -> Tensor:
    """(f - mean) / standard deviation; what is infinite counts as the worst finite value, and equal values as zero."""
    f = _finite(fitness)
    f = f - f.mean()
    deviation = f.square().mean().sqrt()
    return f / deviation if deviation > 0 else torch.zeros_like(f)


def _finite(fitness: Tensor) -> Tensor:
    """Infinite values replaced by the worst (or best) finite one; zeros when there is none."""
    finite = fitness[fitness.isfinite()]
    if len(finite) == 0:
        return torch.zeros_like(fitness)
    return fitness.clamp(float(finite.min()), float(finite.max()))


SHAPES = {"ranks": centre_ranks, "standardize": standardise, "raw": _finite}
"""How fitness enters a gradient estimate, by name. Larger is worse in all of them."""


def keep_finite(members: Tensor) -> Tensor:
    """The rows without infinity or NaN, of which a spread can be measured; all rows where none is finite."""
    finite = members.isfinite().all(1)
    return members[finite] if bool(finite.any()) else members


@unique
class Reason(Enum):
    """Why a search should stop, or did. The value of each member is the sentence, which `str` gives.

    Example:
        >>> from moduli.evolve import Reason
        >>> print(Reason.TARGET)
        The target fitness was reached.
    """

    TARGET = "The target fitness was reached."
    BUDGET = "The budget of evaluations is spent."
    SMALL_STEP = "The steps are smaller than the tolerance."
    FLAT = "The fitness no longer differs between members and generations."
    STALLED = "The best fitness has not improved for as many generations as the patience allows."
    CONDITION = "The covariance matrix is too ill-conditioned to go on."
    DIVERGED = "The steps have grown without limit."
    NOT_FINITE = "No member has had a finite fitness for ten generations."
    RESTARTS = "The limit on restarts was reached."
    CALLBACK = "The callback asked to stop."
    INTERRUPTED = "The search was interrupted; it can be resumed."

    def __str__(self) -> str:
        return self.value

    @property
    def success(self) -> bool:
        """Whether the search ended because it found what it looked for, or can't find better.

        Example:
            >>> from moduli.evolve import Reason
            >>> Reason.SMALL_STEP.success, Reason.BUDGET.success
            (True, False)
        """
        return self in (Reason.TARGET, Reason.SMALL_STEP, Reason.FLAT)
