"""`path`: the loss along the segment between two models, and its barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._figures import make_axes
from ._averages import linear
from ._driver import Buffers, Integers, ModelT
from ._models import MergeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class LossPath:
    """The loss between two models, or over the plane of three.

    Attributes:
        weights: The weight of each model at each point, one row for each.
        losses: The loss at each point; over a plane a table.
        grid: The positions of the points along each side, from 0 (the first model) to 1.
    """

    weights: Tensor
    losses: Tensor
    grid: Tensor

    @property
    def barrier(self) -> float:
        """The largest excess of the loss over the linear interpolation of the models' losses, on the segment or triangle."""
        inside = (self.weights >= 0).all(-1)
        ends = torch.stack([self.losses[tuple((self.weights[..., at] == 1).nonzero()[0])] for at in self._each_model()])
        above = self.losses - (self.weights * ends).sum(-1)
        return max(0.0, float(above[inside].max()))

    def _each_model(self) -> range:
        return range(self.weights.shape[-1])

    def __repr__(self) -> str:
        return f"LossPath({self.losses.numel()} points of {self.weights.shape[-1]} models, barrier={self.barrier:.4g})"

    def plot(self, ax: Any = None) -> Figure:
        """Draw the losses along the segment, or over the plane; needs matplotlib (extra `plot`).

        Args:
            ax: The axes of matplotlib to draw into; by default those of a new figure.

        Raises:
            ImportError: Without matplotlib.
        """
        ax = make_axes(ax, (4.8, 3.4))
        if self.losses.dim() == 1:
            ax.plot(self.grid.numpy(), self.losses.numpy())
            ax.set(xlabel="weight of the second model", ylabel="loss")
        else:
            drawn = ax.contourf(self.grid.numpy(), self.grid.numpy(), self.losses.T.numpy(), levels=20)
            ax.figure.colorbar(drawn, ax=ax, label="loss")
            ax.plot([0, 1, 0], [0, 0, 1], "wo", markeredgecolor="black")
            ax.set(xlabel="weight of the second model", ylabel="weight of the third model")
        return ax.figure  # type: ignore[no-any-return]


def path(
    a: ModelT,
    b: ModelT,
    loss: Callable[[ModelT], Any],
    c: ModelT | None = None,
    *,
    points: int = 21,
    reach: tuple[float, float] = (0.0, 1.0),
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> LossPath:
    """Measure the loss along the segment between two models, or over the plane of three.

    Args:
        a: A module or state dict.
        b: Another of the same structure.
        loss: A function of a model that returns one number.
        c: A third model: losses are then measured over the plane.
        points: The number of points on each side.
        reach: The range of the weights of `b` and `c`; beyond 0 and 1 it extrapolates.
        buffers: As for `linear`.
        integers: As for `linear`.

    Returns:
        The losses, with the `barrier` above the line between the ends.

    Raises:
        MergeError: If there are too few points, or the models do not fit.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = {"w": torch.tensor([-1.0])}, {"w": torch.tensor([1.0])}
        >>> way = merge.path(a, b, lambda model: float(1 - model["w"].square()), points=5)
        >>> way.losses.tolist(), way.barrier
        ([0.0, 0.75, 1.0, 0.75, 0.0], 1.0)
    """
    if points < 2 or not reach[0] <= 0.0 < 1.0 <= reach[1]:
        raise MergeError(
            f"a path has at least its ends: points is {points} and reach {reach}, from at most 0 to at least 1"
        )
    grid = torch.linspace(*reach, points, dtype=torch.float64)
    for end in (0.0, 1.0):  # the models themselves are points
        grid[(grid - end).abs().argmin()] = end
    models: Sequence[Any] = [a, b] if c is None else [a, b, c]
    sides = [grid] if c is None else torch.meshgrid(grid, grid, indexing="ij")
    others = torch.stack(list(sides), -1)
    weights = torch.cat([1 - others.sum(-1, keepdim=True), others], -1)
    losses = []
    with torch.no_grad():
        for row in weights.reshape(-1, len(models)).tolist():
            merged = linear(models, row, buffers=buffers, integers=integers)
            losses.append(float(loss(merged)))
    return LossPath(weights, torch.tensor(losses, dtype=torch.float64).reshape(weights.shape[:-1]), grid)
