"""The base classes of problems."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn


class Problem(ABC):
    """A model and a loss to minimise.

    A subclass says where the search starts (`model`) and what is minimised (`loss`). Everything else has a default.

    Attributes:
        name: What the command line and reports call it.
        summary: One line about it.
        tags: Its properties: ``"2-D"``, ``"smooth"``, ``"multimodal"``, ``"ill-conditioned"``, ``"noisy"``, ...
        optimum: The smallest value that `measure` can have, or the best that is known; None when nothing is known.
        exact: Whether `optimum` is the true minimum, and not only the best value that was ever found.
        tolerance: A run stops when `measure` is within this distance of an exact optimum.
        noisy: Whether `loss` changes with `resample`. A race then judges a run by `measure` and not by the losses.
        window: For a function of two numbers, the part of the plane (x0, x1, y0, y1) that a report draws.
        minimisers: For such a function, the points where the optimum is taken.
        budget: How many evaluations a run has, unless the race sets a budget.
        stacks: Whether a tuned race may run settings as members of one population. Convolutions are faster one by one.

    Example:
        >>> class Parabola(Problem):
        ...     name, optimum = "parabola", 1.0
        ...     def model(self, seed):
        ...         return Point(torch.tensor([3.0 + seed]))
        ...     def loss(self, model):
        ...         return (model() ** 2).sum() + 1
        >>> problem = Parabola()
        >>> problem.measure(problem.model(0)), problem.dimension
        (10.0, 1)
    """

    name: str = "problem"
    summary: str = ""
    tags: tuple[str, ...] = ()
    optimum: float | None = None
    exact: bool = True
    tolerance: float = 1e-8
    noisy: bool = False
    window: tuple[float, float, float, float] | None = None
    minimisers: tuple[tuple[float, float], ...] = ()
    budget: int = 1000
    stacks: bool = True
    requires: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Return a new model at the starting point of a seed. Equal seeds give equal points."""

    @abstractmethod
    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the loss that is minimised, one number with its gradient history.

        Args:
            model: The model, or anything that can be called like it: a member of a population has no attributes.
        """

    def resample(self, generator: torch.Generator) -> None:
        """Draw the batch or the noise of the next step, before each step; all evaluations of a step use the same."""
        return

    def measure(self, model: Callable[..., Any]) -> float:
        """Return the value that a run is judged by: the loss, and for noisy problems the loss without the noise."""
        with torch.no_grad():
            return float(self.loss(model))

    def residuals(self, model: Callable[..., Any]) -> torch.Tensor | None:
        """Return the vector whose sum of squares, times a constant, is the loss; None if this is no least-squares problem."""
        return None

    def landscape(self, points: torch.Tensor) -> torch.Tensor:
        """Return the function at many points of the plane at once, from (..., 2) to (...). Only with a `window`."""
        raise TypeError(f"{self.name} is no function of two numbers, there is no landscape to draw")

    @property
    def dimension(self) -> int:
        """The number of real parameters that are optimized."""
        return sum(p.numel() * (1 + p.is_complex()) for p in self.model(0).parameters() if p.requires_grad)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.summary}>"


class SampledProblem(Problem):
    """A problem whose loss has another sample at each step, and whose runs are judged without that noise.

    Attributes:
        sample: The sample of this step, drawn by `resample`.
    """

    noisy = True
    sample: torch.Tensor | None = None

    @abstractmethod
    def loss_of(self, model: Callable[..., Any], sample: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of a sample; for None, the value that a run is judged by."""

    def gather(self, sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the data of a sample, or of a stack of samples along the first axis, which `loss_on` takes.

        Runs of several seeds gather their data in one call. By default the sample itself is the data.
        """
        return (sample,)

    def loss_on(self, model: Callable[..., Any], *data: torch.Tensor) -> torch.Tensor:
        """Return the loss on the data of one sample."""
        return self.loss_of(model, *data)

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the loss of this step's sample."""
        return self.loss_of(model, self.sample)

    def measure(self, model: Callable[..., Any]) -> float:
        """Return the loss without the noise."""
        with torch.no_grad():
            return float(self.loss_of(model, None))


class Point(nn.Module):
    """A model that is one vector; called without arguments, it returns the vector.

    Args:
        x: The starting value.

    >>> Point(torch.tensor([1.0, 2.0]))()
    Parameter containing:
    tensor([1., 2.], requires_grad=True)
    """

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.detach().clone())

    def forward(self) -> torch.Tensor:
        """Return the vector."""
        return self.x
