"""Functions of a few or many numbers with known minima.

The formulas are those that the optimisation literature has used for decades: Moré, Garbow and Hillstrom, "Testing
unconstrained optimization software" (1981); Jamil and Yang, "A literature survey of benchmark functions for global
optimisation problems" (2013). Every function takes points on the last axis and works over all other axes at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._base import Point, Problem, SampledProblem

Formula = Callable[[torch.Tensor], torch.Tensor]


class Function(Problem):
    """A function of a vector, in double precision.

    Args:
        name: Its name.
        formula: The function, from points of shape (..., n) to values of shape (...).
        start: The starting point of seed 0.
        optimum: The smallest value.
        minimisers: For two numbers: the points that have this value.
        spread: Other seeds start at a normal distance of this size from `start`.
        window: For two numbers: the part of the plane (x0, x1, y0, y1) that a report draws.
        tags: Its properties.
        summary: One line about it.
        budget: Evaluations in a race.

    >>> bowl = Function("bowl", lambda x: (x**2).sum(-1), [3.0, 4.0], 0.0)
    >>> bowl.measure(bowl.model(0))
    25.0
    """

    def __init__(
        self,
        name: str,
        formula: Formula,
        start: Sequence[float],
        optimum: float,
        *,
        minimisers: Sequence[tuple[float, float]] = (),
        spread: float = 0.1,
        window: tuple[float, float, float, float] | None = None,
        tags: Sequence[str] = (),
        summary: str = "",
        budget: int = 1000,
    ) -> None:
        self.name, self.formula, self.optimum, self.summary, self.budget = name, formula, optimum, summary, budget
        self.start, self.spread, self.window = torch.tensor(start, dtype=torch.float64), spread, window
        self.minimisers = tuple(minimisers)
        self.tags = ("2-D" if len(start) == 2 else "n-D", *tags)

    def model(self, seed: int) -> Point:
        """Return the starting point: the classical one for seed 0, others around it."""
        if seed == 0:
            return Point(self.start)
        generator = torch.Generator().manual_seed(seed)
        jitter = torch.randn(self.start.shape, generator=generator, dtype=torch.float64)
        return Point(self.start + self.spread * jitter)

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the function at the point of the model."""
        return self.formula(model())

    def landscape(self, points: torch.Tensor) -> torch.Tensor:
        """Return the function at many points at once."""
        return self.formula(points)


class NoisyQuadratic(SampledProblem):
    """A quadratic with another random centre at each step, as a model of the noise of minibatches.

    The loss of a step is 1/2 sum a_i (x_i - c_i)^2 with c ~ N(0, noise^2); `measure` is its mean without the constant term.
    The mean of `measure` after steps of gradient descent has a closed form: `expected_value`.

    Args:
        size: The number of coordinates.
        condition: The largest curvature over the smallest.
        noise: The standard deviation of the centre.

    >>> problem = NoisyQuadratic(4, 10.0, 0.1)
    >>> problem.measure(problem.model(0)) > problem.optimum
    True

    References:
        G. Zhang et al., "Which algorithmic choices matter at which batch sizes? Insights from a noisy quadratic model",
        NeurIPS 2019, section 3.
    """

    optimum = 0.0
    tags = ("n-D", "noisy", "ill-conditioned", "smooth")
    summary = "a bowl whose centre trembles from step to step"

    def __init__(self, size: int = 20, condition: float = 100.0, noise: float = 0.1) -> None:
        self.name = f"noisy-{size}"
        self.curvature = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
        self.noise = noise

    def model(self, seed: int) -> Point:
        """Return a point in a random direction at distance sqrt(n)."""
        x = torch.randn(self.curvature.shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
        return Point(x * len(x) ** 0.5 / x.norm())

    def expected_value(self, start: torch.Tensor, rate: float, steps: int) -> float:
        r"""Return the mean of `measure` after steps of gradient descent with a constant rate (Zhang et al. 2019, equation 3).

        $E[x_i^2] = (1 - \eta a_i)^{2t} x_{0,i}^2 + \eta^2 a_i^2 \sigma^2 \frac{1 - (1 - \eta a_i)^{2t}}{1 - (1 - \eta a_i)^2}$

        Args:
            start: The starting point.
            rate: The step size, below 2 over the largest curvature.
            steps: How many steps.

        >>> problem = NoisyQuadratic(1, noise=0.0)
        >>> problem.expected_value(torch.tensor([2.0]), 0.5, 2)
        0.125
        """
        factor = (1 - rate * self.curvature) ** 2
        noise = (rate * self.curvature * self.noise) ** 2 * (1 - factor**steps) / (1 - factor)
        squares = factor**steps * start.double().square() + noise
        return float(0.5 * (self.curvature * squares).sum())

    def resample(self, generator: torch.Generator) -> None:
        """Draw another centre."""
        self.sample = self.noise * torch.randn(self.curvature.shape, generator=generator, dtype=torch.float64)

    def loss_of(self, model: Callable[..., Any], sample: torch.Tensor | None) -> torch.Tensor:
        """Return the quadratic around a centre; for None, around the mean centre, which is zero."""
        x: torch.Tensor = model()
        return 0.5 * (self.curvature * (x if sample is None else x - sample) ** 2).sum()


# -- formulas ---------------------------------------------------------------------------------------------------------


def _rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1)


def _rastrigin(x: torch.Tensor) -> torch.Tensor:
    return (x**2 - 10 * torch.cos(2 * math.pi * x) + 10).sum(-1)


def _ackley(x: torch.Tensor) -> torch.Tensor:
    # The root is not differentiable at its minimum; the smallest normal number keeps its gradient finite there.
    radius = ((x**2).mean(-1) + torch.finfo(x.dtype).tiny).sqrt()
    return 20 + math.e - 20 * torch.exp(-0.2 * radius) - torch.exp(torch.cos(2 * math.pi * x).mean(-1))


def _griewank(x: torch.Tensor) -> torch.Tensor:
    root = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device).sqrt()
    return 1 + (x**2).sum(-1) / 4000 - torch.cos(x / root).prod(-1)


def _levy(x: torch.Tensor) -> torch.Tensor:
    w = 1 + (x - 1) / 4
    first = torch.sin(math.pi * w[..., 0]) ** 2
    middle = ((w[..., :-1] - 1) ** 2 * (1 + 10 * torch.sin(math.pi * w[..., :-1] + 1) ** 2)).sum(-1)
    last = (w[..., -1] - 1) ** 2 * (1 + torch.sin(2 * math.pi * w[..., -1]) ** 2)
    return first + middle + last


def _ellipsoid(x: torch.Tensor) -> torch.Tensor:
    return (torch.logspace(0, 6, x.shape[-1], dtype=x.dtype, device=x.device) * x**2).sum(-1)


def _powell(x: torch.Tensor) -> torch.Tensor:
    a, b, c, d = x[..., 0::4], x[..., 1::4], x[..., 2::4], x[..., 3::4]
    return ((a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4).sum(-1)


def _styblinski(x: torch.Tensor) -> torch.Tensor:
    return ((x**4 - 16 * x**2 + 5 * x) / 2).sum(-1)


def _absolute(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device) * (x - 1).abs()).sum(-1)


def _maxq(x: torch.Tensor) -> torch.Tensor:
    return (x**2).amax(-1)


def _beale(p: torch.Tensor) -> torch.Tensor:
    x, y = p[..., 0], p[..., 1]
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def _himmelblau(p: torch.Tensor) -> torch.Tensor:
    x, y = p[..., 0], p[..., 1]
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


def _goldstein(p: torch.Tensor) -> torch.Tensor:
    x, y = p[..., 0], p[..., 1]
    first = 1 + (x + y + 1) ** 2 * (19 - 14 * x + 3 * x**2 - 14 * y + 6 * x * y + 3 * y**2)
    second = 30 + (2 * x - 3 * y) ** 2 * (18 - 32 * x + 12 * x**2 + 48 * y - 36 * x * y + 27 * y**2)
    return first * second


def _camel(p: torch.Tensor) -> torch.Tensor:
    x, y = p[..., 0], p[..., 1]
    return (4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + (-4 + 4 * y**2) * y**2


def _valley(p: torch.Tensor) -> torch.Tensor:
    x, y = p[..., 0], p[..., 1]
    return (x - 1) ** 2 / 4 + (y - 2 * x**2 + 1).abs()


# -- tables -----------------------------------------------------------------------------------------------------------

# Solutions of the stationary equations to the last digit, by Newton's method in higher precision.
_STYBLINSKI_X = -2.903534027771177
_STYBLINSKI = -39.16616570377141
_CAMEL = -1.0316284534898774


_HIMMELBLAU = [(3.0, 2.0), (-2.805118086952745, 3.131312518250573)]
_HIMMELBLAU += [(-3.779310253377747, -3.283185991286170), (3.584428340330492, -1.848126526964404)]


def _plane(formula: Formula, start: list[float], optimum: float = 0.0, **kwargs: Any) -> Callable[[str], Problem]:
    """Return a function that makes the problem of a formula of two numbers under a name."""
    return lambda name: Function(name, formula, start, optimum, **kwargs)


PLANE: dict[str, Callable[[str], Problem]] = {
    "rosenbrock": _plane(_rosenbrock, [-1.2, 1.0], minimisers=[(1, 1)], window=(-2, 2, -1, 3),
                         tags=["unimodal", "smooth", "ill-conditioned"], summary="a bent valley (Rosenbrock 1960)"),
    "beale": _plane(_beale, [1.0, 1.0], minimisers=[(3, 0.5)], window=(-1, 4.5, -2, 2),
                    tags=["unimodal", "smooth"], summary="flat, with steep corners (Beale 1958)"),
    "himmelblau": _plane(_himmelblau, [0.0, 0.0], minimisers=_HIMMELBLAU, window=(-5, 5, -5, 5), spread=1.0,
                         tags=["multimodal", "smooth"], summary="four equal minima (Himmelblau 1972)"),
    "goldstein-price": _plane(_goldstein, [0.5, 0.5], 3.0, minimisers=[(0, -1)], window=(-2, 2, -2, 2), spread=0.3,
                              tags=["multimodal", "smooth"], summary="values over six orders (Goldstein and Price 1971)"),
    "camel": _plane(_camel, [-1.5, 0.8], _CAMEL, window=(-2, 2, -1.2, 1.2), spread=0.3,
                    minimisers=[(0.08984201310031806, -0.7126564030207396), (-0.08984201310031806, 0.7126564030207396)],
                    tags=["multimodal", "smooth"], summary="six humps, two of them lowest (Dixon and Szegő 1978)"),
    "styblinski-tang": _plane(_styblinski, [0.0, 0.5], 2 * _STYBLINSKI, minimisers=[(_STYBLINSKI_X,) * 2],
                              window=(-5, 5, -5, 5), spread=1.0, tags=["multimodal", "smooth"],
                              summary="four basins, one deepest"),
    "rastrigin": _plane(_rastrigin, [2.4, -1.6], minimisers=[(0, 0)], window=(-4, 4, -4, 4), spread=1.0,
                        tags=["multimodal", "smooth"], summary="a bowl full of dimples (Rastrigin 1974)"),
    "ackley": _plane(_ackley, [2.2, -1.7], minimisers=[(0, 0)], window=(-4, 4, -4, 4), spread=1.0,
                     tags=["multimodal", "non-smooth"], summary="a needle in a dimpled plain (Ackley 1987)"),
    "kinked-valley": _plane(_valley, [-1.0, 1.5], minimisers=[(1, 1)], window=(-2, 2, -1.5, 3),
                            tags=["unimodal", "non-smooth"], summary="Rosenbrock's valley with a kink for a floor"),
}  # fmt: skip
"""The functions of two numbers."""


def _repeat(
    formula: Formula, start: list[float], optimum: float = 0.0, every: int = 1, **kwargs: Any
) -> Callable[[str, int], Problem]:
    """Return a function that makes the problem of a formula for a name and a number of numbers.

    Args:
        formula: The formula.
        start: The starting point, repeated until it has enough numbers.
        optimum: The optimum divided by the number of numbers.
        every: The number of numbers must be a multiple of this.
        **kwargs: Further arguments of `Function`.
    """

    def make(name: str, n: int) -> Problem:
        if n % every:
            raise ValueError(f"{name}-{n}: this function needs a multiple of {every} numbers, as in {name}-{2 * every}")
        return Function(f"{name}-{n}", formula, (start * n)[:n], optimum * n, **kwargs)

    return make


SCALABLE: dict[str, tuple[int, Callable[[str, int], Problem]]] = {
    "sphere": (10, _repeat(lambda x: (x**2).sum(-1), [1.0], tags=["unimodal", "smooth"], summary="the easiest bowl")),
    "ellipsoid": (10, _repeat(_ellipsoid, [1.0], tags=["unimodal", "smooth", "ill-conditioned"],
                              summary="a bowl a million times longer than wide")),
    "rosenbrock": (20, _repeat(_rosenbrock, [-1.2, 1.0], budget=2000, tags=["unimodal", "smooth", "ill-conditioned"],
                               summary="a bent valley in many dimensions")),
    "powell": (8, _repeat(_powell, [3.0, -1.0, 0.0, 1.0], every=4, tags=["unimodal", "smooth", "singular"],
                          summary="its Hessian is singular at the minimum (Powell 1962)")),
    "rastrigin": (10, _repeat(_rastrigin, [2.4], spread=1.0, tags=["multimodal", "smooth"], budget=4000,
                              summary="a bowl full of dimples")),
    "ackley": (10, _repeat(_ackley, [2.2], spread=1.0, tags=["multimodal", "non-smooth"], budget=4000,
                           summary="a needle in a dimpled plain")),
    "griewank": (10, _repeat(_griewank, [40.0], spread=10.0, tags=["multimodal", "smooth"], budget=4000,
                             summary="a wide bowl with fine ripples (Griewank 1981)")),
    "levy": (10, _repeat(_levy, [-4.0], spread=1.0, tags=["multimodal", "smooth"], budget=4000,
                         summary="waves along a valley (Lévy and Montalvo 1985)")),
    "styblinski-tang": (10, _repeat(_styblinski, [0.5], _STYBLINSKI, spread=1.0, tags=["multimodal", "smooth"],
                                    budget=4000, summary="2^n basins, one deepest")),
    "absolute": (10, _repeat(_absolute, [3.0], tags=["unimodal", "non-smooth"], summary="a weighted sum of distances")),
    "maxq": (10, _repeat(_maxq, [2.0], spread=0.5, tags=["unimodal", "non-smooth"],
                         summary="the largest of the squares (Haarala 2004)")),
    "noisy": (20, lambda name, n: NoisyQuadratic(n)),
}  # fmt: skip
"""The functions of any number of numbers: the usual number, and what makes one."""
