"""The kinds and bounds of coordinates, transformations of fitness, and the reasons why a search ends."""

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
    """The bounds and kinds (real, integer, categorical) of the coordinates of one search."""

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
        low, high = (-torch.inf, torch.inf) if bounds is None else split_bounds(bounds)
        self.whole = torch.tensor([*self.integer, *self.categorical], dtype=torch.long, device=device)
        if bounds is None and len(self.whole) == 0:
            # Two 0-d tensors, which broadcast, instead of two vectors.
            self.lower, self.upper = (torch.tensor(b, dtype=dtype, device=device) for b in (-torch.inf, torch.inf))
            return
        self.lower, self.upper = (
            _expand_bound(b, dim, dtype, device, side) for b, side in ((low, "lower"), (high, "upper"))
        )
        self._fit_bounds()

    def _fit_bounds(self) -> None:
        """Set the bounds of categorical coordinates, round those of integer ones inwards, and raise if none is left."""
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
        """Return x with its integer and categorical coordinates rounded."""
        if len(self.whole) == 0:
            return x
        return x.index_copy(-1, self.whole, x.index_select(-1, self.whole).round())


def check_choice(name: str, given: Any, known: Sequence[Any]) -> None:
    """Raise ValueError if a setting is not one of the known choices.

    Args:
        name: The name of the setting.
        given: Its value.
        known: The choices, at least two.
    """
    if given not in known:
        raise ValueError(f"{name}={given!r} is unknown; there are {', '.join(map(repr, known[:-1]))} and {known[-1]!r}")


def check_sigma(sigma: float) -> None:
    """Raise ValueError if a standard deviation is not positive."""
    if not sigma > 0:
        raise ValueError(f"sigma={sigma}: members need a positive standard deviation")


def split_bounds(bounds: Any) -> tuple[Any, Any]:
    """Return the lower and the upper bound; raise ValueError for other forms, such as SciPy's intervals of each coordinate."""
    is_pair = hasattr(bounds, "__len__") and len(bounds) == 2 and not isinstance(bounds, Mapping | str)
    if not is_pair or (isinstance(bounds, list) and all(isinstance(end, tuple) for end in bounds)):
        fact = "bounds are a pair (lower, upper), of numbers or of one number for each coordinate"
        raise ValueError(f"{fact}; intervals [(low, high), ...] are the pair tuple(zip(*intervals))")
    low, high = bounds
    return low, high


def _expand_bound(bound: Tensor | float, dim: int, dtype: torch.dtype, device: torch.device, side: str) -> Tensor:
    try:
        tensor = torch.as_tensor(bound, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError):
        fact = f"the {side} bound is {bound!r}; give a number or {dim} numbers"
        raise ValueError(f"{fact}, and write an infinite bound as -inf or inf") from None
    if tensor.shape not in ((), (dim,)):
        raise ValueError(f"the {side} bound has shape {tuple(tensor.shape)}; give a number or {dim} numbers")
    if bool(tensor.isnan().any()):
        raise ValueError(f"the {side} bound contains NaN; write an infinite bound as -inf or inf")
    return tensor.expand(dim).clone()


def reflect(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return x folded into [lower, upper] by reflection at the bounds.

    The fitness of the folded point is a continuous function of the unfolded one, so a search can use samples outside of the
    bounds like those inside.

    Args:
        x: The points, one per row.
        lower: The lower bounds, which may be infinite.
        upper: The upper bounds; where both are equal, that value is returned.
    """
    width = upper - lower
    mirrored = torch.where(x < lower, 2 * lower - x, torch.where(x > upper, 2 * upper - x, x))
    offset = torch.remainder(x - lower, 2 * width)
    folded = lower + torch.minimum(offset, 2 * width - offset)
    out = torch.where(width.isfinite() & (width > 0), folded, mirrored)
    # Inside the bounds a point is unchanged, to the last bit.
    return torch.where((x >= lower) & (x <= upper), x, out).clamp(lower, upper)


# -- transformations of fitness


def clean(fitness: Tensor) -> Tensor:
    """Return a copy of the fitness in double, with NaN replaced by the worst value, +inf."""
    f = fitness.detach().to(torch.float64, copy=True)
    return f.masked_fill_(f.isnan(), math.inf)


def _count_better(fitness: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each member how many are better, and how many are better or equal."""
    ordered = fitness.sort().values
    return torch.searchsorted(ordered, fitness), torch.searchsorted(ordered, fitness, right=True)


def centre_ranks(fitness: Tensor) -> Tensor:
    """Return ranks scaled to [-½, ½], the best member at -½ (Salimans et al. 2017, section 2.1).

    Equal members get the mean of their ranks, so a flat fitness gives zeros and moves nothing.
    """
    n = len(fitness)
    below, upto = _count_better(fitness)
    rank = 0.5 * (below + upto - 1).to(fitness)
    return rank / max(n - 1, 1) - (0.5 if n > 1 else 0.0)


def nes_utilities(fitness: Tensor) -> Tensor:
    """Return utilities that sum to zero, the best member highest (Wierstra et al. 2014, section 3.1).

    u_k = max(0, ln(N/2 + 1) - ln k) / Σ_j max(0, ln(N/2 + 1) - ln j) - 1/N for the k-th best; equal members get their mean.
    """
    n = len(fitness)
    k = torch.arange(1, n + 1, dtype=torch.float64, device=fitness.device)
    raw = (math.log(n / 2 + 1) - k.log()).clamp(min=0)
    total = torch.cat([raw.new_zeros(1), raw.cumsum(0)])
    below, upto = _count_better(fitness)
    return (total[upto] - total[below]) / (upto - below) / total[-1].clamp(min=1e-300) - 1 / n


def standardise(fitness: Tensor) -> Tensor:
    """Return (f - mean) / standard deviation; infinities count as the worst finite value, and equal values give zeros."""
    f = _finite(fitness)
    f = f - f.mean()
    deviation = f.square().mean().sqrt()
    return f / deviation if deviation > 0 else torch.zeros_like(f)


def _finite(fitness: Tensor) -> Tensor:
    """Return fitness with infinities replaced by the worst (or best) finite value; zeros if no value is finite."""
    finite = fitness[fitness.isfinite()]
    if len(finite) == 0:
        return torch.zeros_like(fitness)
    return fitness.clamp(float(finite.min()), float(finite.max()))


SHAPES = {"ranks": centre_ranks, "standardize": standardise, "raw": _finite}
"""The transformations of fitness in a gradient estimate, by name. Larger is worse in all of them."""


def keep_finite(members: Tensor) -> Tensor:
    """Return the rows without infinity or NaN, or all rows if none is finite."""
    finite = members.isfinite().all(1)
    return members[finite] if bool(finite.any()) else members


@unique
class Reason(Enum):
    """Why a search should stop, or did. The value of each member is a sentence, which `str` returns.

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
        """Whether the search ended because it reached its target or converged.

        Example:
            >>> from moduli.evolve import Reason
            >>> Reason.SMALL_STEP.success, Reason.BUDGET.success
            (True, False)
        """
        return self in (Reason.TARGET, Reason.SMALL_STEP, Reason.FLAT)
