"""Standard problems of unconstrained minimisation with their standard starts (Moré, Garbow and Hillstrom, 1981)."""

import math

import torch
from torch import Tensor

__all__ = ["PROBLEMS", "digits_logistic"]

D = torch.float64


def _t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=D)


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def beale(x):
    return sum((c - x[0] * (1 - x[1] ** k)) ** 2 for c, k in ((1.5, 1), (2.25, 2), (2.625, 3)))


def powell_singular(x):
    return (x[0] + 10 * x[1]) ** 2 + 5 * (x[2] - x[3]) ** 2 + (x[1] - 2 * x[2]) ** 4 + 10 * (x[0] - x[3]) ** 4


def wood(x):
    first = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2 + 90 * (x[3] - x[2] ** 2) ** 2 + (1 - x[2]) ** 2
    return first + 10 * (x[1] + x[3] - 2) ** 2 + 0.1 * (x[1] - x[3]) ** 2


def brown_badly_scaled(x):
    return (x[0] - 1e6) ** 2 + (x[1] - 2e-6) ** 2 + (x[0] * x[1] - 2) ** 2


def helical_valley(x):
    angle = torch.atan2(x[1], x[0]) / (2 * math.pi)
    return 100 * ((x[2] - 10 * angle) ** 2 + (torch.sqrt(x[0] ** 2 + x[1] ** 2) - 1) ** 2) + x[2] ** 2


def dixon_price(x):
    i = torch.arange(2, len(x) + 1, dtype=D)
    return (x[0] - 1) ** 2 + (i * (2 * x[1:] ** 2 - x[:-1]) ** 2).sum()


def trigonometric(x):
    n, i = len(x), torch.arange(1, len(x) + 1, dtype=D)
    return ((n - torch.cos(x).sum() + i * (1 - torch.cos(x)) - torch.sin(x)) ** 2).sum()


def broyden_tridiagonal(x):
    zero = torch.zeros(1, dtype=D)
    before, after = torch.cat([zero, x[:-1]]), torch.cat([x[1:], zero])
    return (((3 - 2 * x) * x - before - 2 * after + 1) ** 2).sum()


def biggs_exp6(x):
    t = torch.arange(1, 14, dtype=D) / 10
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    model = x[2] * torch.exp(-t * x[0]) - x[3] * torch.exp(-t * x[1]) + x[5] * torch.exp(-t * x[4])
    return ((model - y) ** 2).sum()


# name: (function, start, values of the known minima; the first is the global one)
PROBLEMS = {
    "Rosenbrock 2": (rosenbrock, _t(-1.2, 1.0), (0.0,)),
    "Rosenbrock 100": (rosenbrock, _t(-1.2, 1.0).repeat(50), (0.0, 3.986623854)),
    "Beale": (beale, _t(1.0, 1.0), (0.0,)),
    "Powell singular": (powell_singular, _t(3.0, -1.0, 0.0, 1.0), (0.0,)),
    "Wood": (wood, _t(-3.0, -1.0, -3.0, -1.0), (0.0,)),
    "Brown badly scaled": (brown_badly_scaled, _t(1.0, 1.0), (0.0,)),
    "Helical valley": (helical_valley, _t(-1.0, 0.0, 0.0), (0.0,)),
    "Dixon-Price": (dixon_price, torch.ones(10, dtype=D), (0.0,)),
    "Trigonometric": (trigonometric, torch.full((10,), 0.1, dtype=D), (0.0, 2.79506122e-5)),
    "Broyden tridiagonal": (broyden_tridiagonal, -torch.ones(20, dtype=D), (0.0,)),
    "Biggs EXP6": (biggs_exp6, _t(1.0, 2.0, 1.0, 1.0, 1.0, 1.0), (0.0, 5.655649925e-3)),
}


def digits_logistic():
    """Return the loss of logistic regression on handwritten digits, its start and its minima, as in `moduli.lab.problems`."""
    from sklearn.datasets import load_digits

    from moduli.lab.problems import DigitsLogistic

    data = load_digits()
    pixels, target = torch.tensor(data.data / 16, dtype=D), torch.tensor(data.target)
    pixels = torch.cat([pixels, torch.ones(len(pixels), 1, dtype=D)], 1)

    def loss(x):
        return torch.nn.functional.cross_entropy(pixels @ x.view(65, 10), target) + 0.5e-3 * (x * x).sum()

    return loss, torch.zeros(650, dtype=D), (DigitsLogistic.optimum,)
