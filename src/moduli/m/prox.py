r"""Proximal operators: of penalties that have corners, and of sets.

Each is a function of a tensor and a step, $\operatorname{prox}_{th}(v) = \arg\min_x h(x) + \frac{1}{2t}\|x - v\|^2$, with
the penalty itself as `value`. `m.ProximalGradient`, `m.FISTA` and `moduli.minimize(prox=...)` take them, and any other
object of that form; for a penalty without `value` a function of (tensor, step) is enough.

References:
    N. Parikh, S. Boyd, "Proximal algorithms", Foundations and Trends in Optimization 1 (2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..labels import Tensor as Labelled

__all__ = ["BoxSet", "GroupPenalty", "L1Penalty", "NuclearPenalty", "SimplexSet"]


def _check_strength(owner: Any, strength: float) -> None:
    if not 0 <= strength < math.inf:
        raise ValueError(f"{type(owner).__name__}: strength is {strength}; it is a factor of a penalty, not negative")


def _shrink(sizes: Tensor, threshold: Any) -> Tensor:
    """Return the factor by which something of these sizes is multiplied, so that they fall by a threshold and end at zero."""
    # A size of zero divides by one instead: it stays zero whatever the factor.
    return (sizes - threshold).clamp(min=0) / torch.where(sizes == 0, 1.0, sizes)


@dataclass(frozen=True)
class L1Penalty:
    r"""The penalty $\lambda\sum_i|x_i|$, which makes numbers exactly zero.

    Args:
        strength: The factor $\lambda$.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> m.prox.L1Penalty(1.0)(torch.tensor([3.0, -0.5]), 0.5)
        tensor([2.5000, -0.0000])
    """

    strength: float

    def __post_init__(self) -> None:
        _check_strength(self, self.strength)

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        return x * _shrink(x.abs(), self.strength * step)

    def value(self, x: Tensor) -> Tensor:
        """Return the penalty."""
        return self.strength * x.abs().sum()


@dataclass(frozen=True)
class GroupPenalty:
    r"""The penalty $\lambda\sum_g\|x_g\|$ over groups of numbers, which are zero together.

    Args:
        strength: The factor $\lambda$.
        dim: The axes of a tensor whose numbers make a group: -1 makes a group of each row.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> m.prox.GroupPenalty(1.0)(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[2.4000, 3.2000],
                [0.0000, 0.0000]])
    """

    strength: float
    dim: int | tuple[int, ...] = -1

    def __post_init__(self) -> None:
        _check_strength(self, self.strength)

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        return x * _shrink(torch.linalg.vector_norm(x, dim=self.dim, keepdim=True), self.strength * step)

    def value(self, x: Tensor) -> Tensor:
        """Return the penalty."""
        return self.strength * torch.linalg.vector_norm(x, dim=self.dim).sum()


@dataclass(frozen=True)
class NuclearPenalty:
    r"""The penalty $\lambda\sum_i\sigma_i$ of the singular values of matrices, which lowers their rank.

    Args:
        strength: The factor $\lambda$.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> m.prox.NuclearPenalty(1.0)(torch.diag(torch.tensor([3.0, 0.5])), 1.0).round(decimals=3)
        tensor([[2., 0.],
                [0., 0.]])
    """

    strength: float

    def __post_init__(self) -> None:
        _check_strength(self, self.strength)

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        self._check(x)
        U, sizes, Vh = torch.linalg.svd(x, full_matrices=False)
        smaller = (sizes - self.strength * step).clamp(min=0).to(U.dtype)
        product: Tensor = (U * smaller[..., None, :]) @ Vh
        return product

    def value(self, x: Tensor) -> Tensor:
        """Return the penalty."""
        self._check(x)
        return self.strength * torch.linalg.svdvals(x).sum()

    def _check(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"NuclearPenalty: a tensor of shape {tuple(x.shape)} is no matrix; use L1Penalty for it")


@dataclass(frozen=True)
class BoxSet:
    """The set of points with every number between two bounds; its proximal operator is the projection onto it.

    Args:
        lower: The lower bound, a number or a tensor that broadcasts.
        upper: The upper bound.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> m.prox.BoxSet(0.0, 1.0)(torch.tensor([-1.0, 0.5, 2.0]), 1.0)
        tensor([0.0000, 0.5000, 1.0000])
    """

    lower: Any = -math.inf
    upper: Any = math.inf

    def __post_init__(self) -> None:
        for side, end in (("lower", self.lower), ("upper", self.upper)):
            if isinstance(end, Labelled):
                fact = f"BoxSet: {side} is labelled, and a proximal operator is given numbers without labels"
                raise TypeError(f"{fact}; write {side}=bound.align_to(x.dims).data")
        if not bool((torch.as_tensor(self.lower) <= torch.as_tensor(self.upper)).all()):
            raise ValueError(f"BoxSet: lower is {self.lower} and upper is {self.upper}; no point is between them")

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        if isinstance(self.lower, int | float) and isinstance(self.upper, int | float):
            return x.clamp(self.lower, self.upper)  # a Python number need not be copied to the device
        lower, upper = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in (self.lower, self.upper))
        return torch.minimum(torch.maximum(x, lower), upper)

    def value(self, x: Tensor) -> Tensor:
        """Return zero inside of the set, infinity outside."""
        return _measure_distance(x, self)


@dataclass(frozen=True)
class SimplexSet:
    r"""The set of vectors (along the last axis) that are not negative and add up to a total, as probabilities do.

    Args:
        total: What they add up to.

    Example:
        >>> import torch
        >>> from moduli import m
        >>> m.prox.SimplexSet()(torch.tensor([0.8, 0.6, -1.0]), 1.0).round(decimals=3)
        tensor([0.6000, 0.4000, 0.0000])

    References:
        J. Duchi et al., "Efficient projections onto the l1-ball for learning in high dimensions", ICML 2008, figure 1.
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.total < math.inf:
            raise ValueError(f"SimplexSet: total is {self.total}; give a positive number")

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        if x.dim() == 0:
            return torch.full_like(x, self.total)
        ordered = x.sort(-1, descending=True).values
        count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        shifts = (ordered.cumsum(-1) - self.total) / count
        last = (ordered > shifts).sum(-1, keepdim=True) - 1
        return (x - shifts.gather(-1, last)).clamp(min=0)

    def value(self, x: Tensor) -> Tensor:
        """Return zero inside of the set, infinity outside."""
        return _measure_distance(x, self)


def _measure_distance(x: Tensor, project: Any) -> Tensor:
    """Return zero for a point that its projection is equal to, up to rounding, and infinity for others."""
    distance = (x - project(x, 1.0)).abs().amax() if x.numel() else x.new_zeros(())
    rounding = 64 * torch.finfo(x.dtype).eps * (1 + x.abs().amax() if x.numel() else 1.0)
    return torch.where(distance <= rounding, 0.0, math.inf).to(x.dtype)
