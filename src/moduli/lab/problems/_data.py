"""Problems made of data: least squares, digits, spirals, and a page of text for a tiny transformer."""

import importlib
import math
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ._base import Point, Problem, SampledProblem


class LeastSquares(Problem):
    """Linear least squares with an ill-conditioned matrix: mean (A x - b)^2, solved exactly by `torch.linalg.lstsq`.

    >>> problem = LeastSquares()
    >>> problem.measure(Point(problem.solution)) - problem.optimum < 1e-12
    True
    """

    name = "least-squares"
    summary = "200 equations for 30 numbers, condition number 1000"
    tags = ("n-D", "unimodal", "smooth", "ill-conditioned", "data")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(17)
        left, _ = torch.linalg.qr(torch.randn(200, 30, generator=generator, dtype=torch.float64))
        right, _ = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))
        self.matrix = left @ torch.diag(torch.logspace(1.5, -1.5, 30, dtype=torch.float64)) @ right
        truth = torch.randn(30, generator=generator, dtype=torch.float64)
        self.target = self.matrix @ truth + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
        self.solution = torch.linalg.lstsq(self.matrix, self.target).solution
        self.optimum = float(((self.matrix @ self.solution - self.target) ** 2).mean())

    def model(self, seed: int) -> Point:
        """Return a random vector."""
        return Point(torch.randn(30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the mean squared residual."""
        x: torch.Tensor = model()
        residual: torch.Tensor = self.matrix @ x - self.target
        return residual.square().mean()


@cache
def _load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of the digits, with values from 0 to 1, and the digits."""
    data = importlib.import_module("sklearn.datasets").load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


class DigitsLogistic(Problem):
    """Multinomial logistic regression of 1797 handwritten digits, with 1e-3/2 times the squared weights.

    The loss is strictly convex. Its optimum was found by L-BFGS in double precision, to a gradient below 1e-9.
    """

    name = "digits-logistic"
    summary = "logistic regression of 8x8 digits, all of them at once"
    tags = ("n-D", "unimodal", "smooth", "data")
    requires = ("sklearn.datasets",)
    budget = 400
    tolerance = 1e-6
    optimum = 0.2639258232950745

    def model(self, seed: int) -> nn.Module:
        """Return a linear model with weights near zero."""
        return initialise(lambda: nn.Linear(64, 10, dtype=torch.float64), seed, 0.01)

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the mean cross entropy plus the penalty; the weights are computed from outputs at zero and at unit vectors."""
        x, y = _load_digits()
        x = x.double()
        probe = torch.cat([torch.zeros(1, 64, dtype=x.dtype), torch.eye(64, dtype=x.dtype)])
        outputs: torch.Tensor = model(torch.cat([x, probe]))
        scores, bias, weights = outputs[: len(x)], outputs[len(x)], outputs[len(x) + 1 :] - outputs[len(x)]
        penalty = (weights**2).sum() + (bias**2).sum()
        return F.cross_entropy(scores, y) + 0.5e-3 * penalty


class IllLogistic(Problem):
    """Logistic regression whose features have scales from 1 to 1e-3: the Hessian's condition number is above 1e5.

    400 rows of 20 features, which are correlated, and a penalty of 1e-6/2 times the squared weights. The optimum is found by
    Newton's method when the problem is made.

    >>> problem = IllLogistic()
    >>> problem.condition > 1e5
    True
    """

    name = "logistic-ill"
    summary = "logistic regression of 20 features whose scales differ by a thousand"
    tags = ("n-D", "unimodal", "smooth", "ill-conditioned", "data")
    tolerance = 1e-6
    penalty = 1e-6

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(23)
        features = torch.randn(400, 20, generator=generator, dtype=torch.float64)
        features = features @ (
            torch.eye(20, dtype=torch.float64) + 0.3 * torch.randn(20, 20, generator=generator, dtype=torch.float64)
        )
        truth = torch.randn(20, generator=generator, dtype=torch.float64)
        odds = 0.7 * (features @ truth) / 20**0.5
        self.y = (torch.rand(400, generator=generator, dtype=torch.float64) < odds.sigmoid()).double()
        self.x = features * torch.logspace(0, -3, 20, dtype=torch.float64)
        w = torch.zeros(20, dtype=torch.float64)
        for _ in range(30):
            gradient, hessian = self._expand(w)
            w = w - torch.linalg.solve(hessian, gradient)
        self.solution, self.optimum = w, float(self.loss(lambda: w))

    def _expand(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient and the Hessian."""
        p = (self.x @ w).sigmoid()
        hessian = self.x.T @ (self.x * (p * (1 - p))[:, None]) / len(self.x)
        return self.x.T @ (p - self.y) / len(self.x) + self.penalty * w, hessian + self.penalty * torch.eye(20).double()

    @property
    def condition(self) -> float:
        """The condition number of the Hessian at the optimum."""
        return float(torch.linalg.cond(self._expand(self.solution)[1]))

    def model(self, seed: int) -> Point:
        """Return small random weights."""
        return Point(0.1 * torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the mean cross entropy plus the penalty."""
        w: torch.Tensor = model()
        return F.binary_cross_entropy_with_logits(self.x @ w, self.y) + 0.5 * self.penalty * w.square().sum()


class DigitsMLP(SampledProblem):
    """A network 64-32-10 on handwritten digits, from batches of 128; judged by the loss over all digits."""

    name = "digits-mlp"
    summary = "a small network on 8x8 digits, batches of 128"
    tags = ("n-D", "noisy", "data", "network")
    requires = ("sklearn.datasets",)
    optimum = 0.0
    tolerance = 1e-3
    budget = 1000

    def model(self, seed: int) -> nn.Module:
        """Return a network with random weights of variance 1 / inputs."""
        return initialise(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), seed)

    def resample(self, generator: torch.Generator) -> None:
        """Draw another batch."""
        self.sample = torch.randint(len(_load_digits()[0]), (128,), generator=generator)

    def loss_of(self, model: Callable[..., Any], sample: torch.Tensor | None) -> torch.Tensor:
        """Return the cross entropy of a batch, or of all digits."""
        return self.loss_on(model, *(_load_digits() if sample is None else self.gather(sample)))

    def gather(self, sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return images and their digits."""
        x, y = _load_digits()
        return x[sample], y[sample]

    def loss_on(self, model: Callable[..., Any], *data: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        x, y = data
        return F.cross_entropy(model(x), y)


class Spirals(Problem):
    """Two interleaved spirals to classify (Lang and Witbrock 1988), a classic of neuroevolution.

    A network 2-16-1 of tanh units must bend its boundary around three quarters of a turn. Its biases are random: the spirals
    are symmetric, so with biases of zero their gradients would be rounding errors, which some optimizers divide by their size.

    >>> Spirals().dimension
    65
    """

    name = "spirals"
    summary = "two spirals, told apart by a network of 16 tanh units"
    tags = ("n-D", "multimodal", "smooth", "network")
    optimum = 0.0
    tolerance = 1e-3
    budget = 3000

    def __init__(self, points: int = 64, turns: float = 0.75) -> None:
        t = torch.linspace(0.15, 1, points)
        angle = 2 * math.pi * turns * t
        arm = torch.stack([t * torch.cos(angle), t * torch.sin(angle)], 1) * 2
        self.x = torch.cat([arm, -arm])
        self.y = torch.cat([torch.ones(points), torch.zeros(points)])

    def model(self, seed: int) -> nn.Module:
        """Return a network with random weights of variance 1 / inputs."""
        return initialise(lambda: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), seed, biases=0.1)

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the mean cross entropy of the two classes."""
        return F.binary_cross_entropy_with_logits(model(self.x).squeeze(-1), self.y)


WIDTH, CONTEXT, HEADS = 32, 32, 2


@cache
def _load_text() -> tuple[str, torch.Tensor]:
    """Return the letters of the page in alphabetical order, and the page as their indices."""
    text = files(__package__).joinpath("page.txt").read_text(encoding="utf-8")
    letters = "".join(sorted(set(text)))
    return letters, torch.tensor([letters.index(letter) for letter in text])


class _TransformerBlock(nn.Module):
    """Causal attention, then a small network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, place, width) to the same shape."""
        batch, places, _ = x.shape
        parts = self.mix(F.layer_norm(x, (WIDTH,))).view(batch, places, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        future = torch.ones(places, places, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, places, WIDTH))
        wide: torch.Tensor = self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))
        return x + wide


class _TextReader(nn.Module):
    """A transformer that predicts the next letter."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(_TransformerBlock(), _TransformerBlock())
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next letter at each place."""
        h = self.letter(x) + self.place(torch.arange(x.shape[1], device=x.device))
        scores: torch.Tensor = self.head(F.layer_norm(self.blocks(h), (WIDTH,)))
        return scores


class TextTransformer(SampledProblem):
    """Predict the next letter of a page that is shipped with the package, with two layers of attention 32 wide.

    Batches are 16 windows of 32 letters; a run is judged by the mean loss, in nats per letter, over 64 windows spread over
    the page. The best known value is where AdamW ended after six thousand steps with a
    one-cycle learning rate of at most 0.004.

    >>> 15_000 < TextTransformer().dimension < 25_000
    True
    """

    name = "text"
    summary = "a transformer of two layers on a page of text, batches of 16"
    tags = ("n-D", "noisy", "data", "network")
    exact = False
    optimum = 0.1864847
    budget = 400

    def model(self, seed: int) -> nn.Module:
        """Return a network with random weights of variance 1 / inputs."""
        return initialise(lambda: _TextReader(len(_load_text()[0])), seed)

    def resample(self, generator: torch.Generator) -> None:
        """Draw other windows."""
        self.sample = torch.randint(len(_load_text()[1]) - CONTEXT - 1, (16,), generator=generator)

    def loss_of(self, model: Callable[..., Any], sample: torch.Tensor | None) -> torch.Tensor:
        """Return the mean cross entropy of these windows, in nats per letter."""
        starts = torch.linspace(0, len(_load_text()[1]) - CONTEXT - 2, 64).long() if sample is None else sample
        letters = _load_text()[1][starts[:, None] + torch.arange(CONTEXT + 1)]
        return F.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


def initialise(make: Callable[[], nn.Module], seed: int, scale: float = 1.0, biases: float = 0.0) -> nn.Module:
    """Return a network with normal weights and biases, drawn from a separate generator: no other randomness is touched.

    Args:
        make: Creates the network.
        seed: The seed of the generator.
        scale: The standard deviation of a weight, times the square root of its inputs.
        biases: The standard deviation of biases.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        net = make()  # layers draw weights from the global generator when they are constructed
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                inputs = parameter.shape[-1] if parameter.ndim == 2 else parameter[0].numel()
                parameter.copy_(noise * scale / inputs**0.5)
            elif biases:
                parameter.copy_(biases * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
            else:
                parameter.zero_()
    return net
