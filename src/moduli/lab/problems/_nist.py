"""The 27 nonlinear regressions of NIST's Statistical Reference Datasets, with certified values and standard errors.

The data (`nist.txt`) are in the public domain: https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml.
"""

import functools
import math
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._base import Point, Problem


class NistData(NamedTuple):
    """One data set: two starting points, the certified parameters with their standard errors, and the observations.

    Attributes:
        starts: The two starting points; the first is far from the solution, the second near.
        certified: The parameters, certified to 11 digits.
        stderr: Their standard errors.
        rss: The residual sum of squares.
        y: The observed values.
        x: The predictors, one row each.
    """

    starts: tuple[Tensor, Tensor]
    certified: Tensor
    stderr: Tensor
    rss: float
    y: Tensor
    x: Tensor


def _gauss(b: Tensor, x: Tensor) -> Tensor:
    first, second = torch.exp(-((x - b[3]) ** 2) / b[4] ** 2), torch.exp(-((x - b[6]) ** 2) / b[7] ** 2)
    return b[0] * torch.exp(-b[1] * x) + b[2] * first + b[5] * second


def _lanczos(b: Tensor, x: Tensor) -> Tensor:
    return b[0] * torch.exp(-b[1] * x) + b[2] * torch.exp(-b[3] * x) + b[4] * torch.exp(-b[5] * x)


def _cubic_by_cubic(b: Tensor, x: Tensor) -> Tensor:
    return (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _enso(b: Tensor, x: Tensor) -> Tensor:
    turn = 2 * math.pi * x
    year = b[1] * torch.cos(turn / 12) + b[2] * torch.sin(turn / 12)
    second = b[4] * torch.cos(turn / b[3]) + b[5] * torch.sin(turn / b[3])
    return b[0] + year + second + b[7] * torch.cos(turn / b[6]) + b[8] * torch.sin(turn / b[6])


MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Misra1a": lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)),
    "Chwirut2": lambda b, x: torch.exp(-b[0] * x) / (b[1] + b[2] * x),
    "Chwirut1": lambda b, x: torch.exp(-b[0] * x) / (b[1] + b[2] * x),
    "Lanczos3": _lanczos,
    "Gauss1": _gauss,
    "Gauss2": _gauss,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Hahn1": _cubic_by_cubic,
    "Nelson": lambda b, x: b[0] - b[1] * x[0] * torch.exp(-b[2] * x[1]),
    "MGH17": lambda b, x: b[0] + b[1] * torch.exp(-x * b[3]) + b[2] * torch.exp(-x * b[4]),
    "Lanczos1": _lanczos,
    "Lanczos2": _lanczos,
    "Gauss3": _gauss,
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Roszman1": lambda b, x: b[0] - b[1] * x - torch.arctan(b[2] / (x - b[3])) / math.pi,
    "ENSO": _enso,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "Thurber": _cubic_by_cubic,
    "BoxBOD": lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)),
    "Rat42": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)),
    "MGH10": lambda b, x: b[0] * torch.exp(b[1] / (x + b[2])),
    "Eckerle4": lambda b, x: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Rat43": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
}
"""The model of each data set, a function of its parameters and predictors, in NIST's order of difficulty."""


@functools.cache
def read_nist() -> dict[str, NistData]:
    """Return the data sets by name.

    >>> read_nist()["Misra1a"].certified
    tensor([2.3894e+02, 5.5016e-04], dtype=torch.float64)
    """
    sets = {}
    text = resources.files(__package__).joinpath("nist.txt").read_text(encoding="utf-8")
    for block in text.split("[")[1:]:
        name, _, body = block.partition("]\n")
        lines = (line.partition(": ") for line in body.splitlines())
        rows = {
            key: torch.tensor([float(n) for n in numbers.split()], dtype=torch.float64) for key, _, numbers in lines
        }
        x = torch.stack([rows["x"], rows["x2"]]) if "x2" in rows else rows["x"]
        # Nelson's model predicts the logarithm of the observations.
        y = rows["y"].log() if name == "Nelson" else rows["y"]
        starts = (rows["start 1"], rows["start 2"])
        sets[name] = NistData(starts, rows["certified"], rows["stderr"], float(rows["rss"]), y, x)
    return sets


class NistFit(Problem):
    """A nonlinear regression with certified values; the loss is the residual sum of squares.

    Args:
        key: NIST's name of the data set.

    >>> fit = NistFit("Misra1a")
    >>> fit.dimension, round(fit.measure(Point(fit.data.certified)), 6)
    (2, 0.124551)
    """

    tags = ("n-D", "smooth", "ill-conditioned", "least squares", "certified")
    budget = 2000

    def __init__(self, key: str) -> None:
        self.data, self.predict = read_nist()[key], MODELS[key]
        self.name = f"nist-{key.lower()}"
        self.summary = (
            f"NIST's regression {key}: {len(self.data.y)} observations, {len(self.data.certified)} parameters"
        )
        self.optimum = self.data.rss
        # The sum of squares of Lanczos1 is 1e-25 only: rounding in the data.
        self.tolerance = max(1e-9 * self.data.rss, 1e-20)

    def model(self, seed: int) -> Point:
        """Return NIST's first starting point for even seeds, the second for odd ones."""
        return Point(self.data.starts[seed % 2])

    def residuals(self, model: Callable[..., Any]) -> Tensor:
        """Return the predictions minus the observations."""
        return self.predict(model(), self.data.x) - self.data.y

    def loss(self, model: Callable[..., Any]) -> Tensor:
        """Return the residual sum of squares."""
        return self.residuals(model).square().sum()
