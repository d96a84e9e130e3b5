"""MNIST-1D, made by the recipe of its paper, and networks that are trained on it.

Ten digits are drawn as curves of twelve points; each example is one of them, padded, stretched, scaled, moved, sheared, and with
noise. It distinguishes networks that MNIST does not, at a hundredth of the cost. The numbers are drawn here, from a generator of
torch: examples are of the paper's distribution and not those of its file.

Reference: S. Greydanus, D. Kobak, "Scaling down deep learning with MNIST-1D", ICML 2024, section 2 and appendix A.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from ._base import SampledProblem
from ._data import initialise

# The curves of the digits: the horizontal position at twelve heights, from the top of the digit to its bottom.
TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
EXAMPLES, JUDGED, LENGTH, PADDING, MOVED = 4000, 1000, 40, (36, 60), 48
SCALE, SHEAR, CORRELATED, INDEPENDENT = 0.4, 0.75, 0.25, 0.02


@cache
def make_mnist1d(count: int = EXAMPLES, seed: int = 42) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples of shape (count, 40) with mean 0 and standard deviation 1, and their digits, in random order.

    Args:
        count: How many examples, a multiple of ten: there are equally many of each digit.
        seed: The seed of all random numbers.

    >>> x, y = make_mnist1d(100)
    >>> x.shape, y.bincount().tolist()
    (torch.Size([100, 40]), [10, 10, 10, 10, 10, 10, 10, 10, 10, 10])
    """
    generator = torch.Generator().manual_seed(seed)
    curves = torch.tensor(TEMPLATES, dtype=torch.float64)
    curves = (curves - curves.mean(1, keepdim=True)) / curves.std(1, correction=0, keepdim=True)
    curves = (curves - curves[:, :1]) / 6 + 1e-8  # an exact zero marks padding, and curves begin at zero
    y = torch.arange(10).repeat_interleave(count // 10)
    width = curves.shape[1] + PADDING[1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = curves.shape[1] + PADDING[0] + (draw(len(y), 1) * (PADDING[1] - PADDING[0] + 1)).floor()
    x = _interpolate(F.pad(curves[y], (0, PADDING[1] + 1)), torch.linspace(0, 1, width) * (lengths - 1))
    x = x * (1 + SCALE * (draw(len(y), 1) - 0.5))
    source = torch.arange(width) - (draw(len(y), 1) * MOVED).long()
    x = x.gather(1, source % width)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    x = torch.where(x != 0, x, CORRELATED * _blur(noise))
    x = x + INDEPENDENT * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    x = x - SHEAR * (draw(len(y), 1) - 0.5) * torch.linspace(-0.5, 0.5, width, dtype=torch.float64)
    x = _interpolate(F.pad(x, (0, 1)), torch.linspace(0, width - 1, LENGTH, dtype=torch.float64).expand(len(y), -1))
    order = torch.randperm(len(y), generator=generator)
    x = (x - x.mean()) / x.std(correction=0)
    return x[order].float(), y[order]


def _interpolate(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the values of piecewise linear curves, one per row, at places counted in points."""
    left = places.floor().long()
    part = places - left
    return x.gather(1, left) * (1 - part) + x.gather(1, left + 1) * part


def _blur(x: torch.Tensor, sigma: float = 2.0) -> torch.Tensor:
    """Return rows smoothed by a Gaussian of four standard deviations to each side, reflected at the ends."""
    reach = int(4 * sigma + 0.5)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=x.dtype) / sigma) ** 2)
    wide = torch.cat([x[:, :reach].flip(1), x, x[:, -reach:].flip(1)], 1)
    return F.conv1d(wide[:, None], (weights / weights.sum())[None, None])[:, 0]


class Mnist1D(SampledProblem):
    """A network 40-50-10 on MNIST-1D, from batches of 100 of 4000 examples.

    It is judged by the cross entropy over the first 1000 of them.

    >>> Mnist1D().dimension
    2560
    """

    name = "mnist1d"
    summary = "a network 40-50-10 on MNIST-1D, batches of 100"
    tags = ("n-D", "noisy", "data", "network")
    optimum = 0.0
    tolerance = 1e-3
    budget = 1000

    def model(self, seed: int) -> nn.Module:
        """Return a network with random weights of variance 1 / inputs."""
        return initialise(lambda: nn.Sequential(nn.Linear(LENGTH, 50), nn.ReLU(), nn.Linear(50, 10)), seed)

    def resample(self, generator: torch.Generator) -> None:
        """Draw another batch."""
        self.sample = torch.randint(EXAMPLES, (100,), generator=generator)

    def loss_of(self, model: Callable[..., torch.Tensor], sample: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of a batch, or of the examples that runs are judged by."""
        return self.loss_on(model, *self.gather(torch.arange(JUDGED) if sample is None else sample))

    def gather(self, sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return examples and their digits."""
        x, y = make_mnist1d()
        return x[sample], y[sample]

    def loss_on(self, model: Callable[..., torch.Tensor], *data: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        x, y = data
        return F.cross_entropy(model(x), y)


class _Channels(nn.Module):
    """A layer from (batch, places) to (batch, 1, places)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the axis of channels."""
        return x.unsqueeze(1)


class Mnist1DConv(Mnist1D):
    """A network of three convolutions with 12 channels on MNIST-1D, as in the paper but for the number of channels.

    >>> Mnist1DConv().dimension
    1570
    """

    name = "mnist1d-conv"
    summary = "three convolutions of 12 channels on MNIST-1D, batches of 100"
    budget = 600
    stacks = False

    def model(self, seed: int) -> nn.Module:
        """Return a network with random weights of variance 1 / inputs."""

        def make() -> nn.Module:
            layers: list[nn.Module] = [_Channels()]
            for inputs, size in ((1, 5), (12, 3), (12, 3)):
                layers += [nn.Conv1d(inputs, 12, size, stride=2, padding=1), nn.ReLU()]
            return nn.Sequential(*layers, nn.Flatten(-2), nn.Linear(12 * 5, 10))

        return initialise(make, seed)


class Mnist1DAutoencoder(Mnist1D):
    """An autoencoder 40-32-8-32-40 on MNIST-1D, from batches of 100 of 4000 examples.

    It is judged by the mean squared error over the first 1000 of them. The best known value is where Adam ended after twenty
    thousand steps with a one-cycle step size of at most 0.01.

    >>> Mnist1DAutoencoder().dimension
    3184
    """

    name = "mnist1d-autoencoder"
    summary = "an autoencoder 40-32-8-32-40 on MNIST-1D, batches of 100"
    exact = False
    optimum = 0.2249

    def model(self, seed: int) -> nn.Module:
        """Return a network with random weights of variance 1 / inputs."""

        def make() -> nn.Module:
            sizes = (LENGTH, 32, 8, 32, LENGTH)
            layers: list[nn.Module] = []
            for inputs, outputs in itertools.pairwise(sizes):
                layers += [nn.Linear(inputs, outputs), nn.Tanh()]
            return nn.Sequential(*layers[:-1])

        return initialise(make, seed)

    def loss_on(self, model: Callable[..., torch.Tensor], *data: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error."""
        return F.mse_loss(model(data[0]), data[0])
