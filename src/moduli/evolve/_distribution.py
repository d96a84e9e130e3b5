"""Searches that move a Gaussian whose samples are drawn again from seeds instead of being stored."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._base import Search
from ._noise import Noise
from ._problem import Reason, check_choice, check_sigma, clean, reflect


class Distribution(Search):
    """A Gaussian around a mean, with independent coordinates; memory is linear in the dimension for any population.

    A sample outside of the bounds is reflected into them, so the Gaussian itself is unbounded.

    Args:
        x0: The first mean.
        population: The number of members; None for 4 + 3 ln P.
        antithetic: Whether members come in pairs, mirrored at the mean.
        rank: Draw the noise of each matrix as a product of this rank; needs `shapes`.
        shapes: The shapes of the parameters that the vector holds, in order.
        **options: Those of `Search`.
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int | None,
        antithetic: bool,
        rank: int | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        self.antithetic, self.rank, self.shapes = antithetic, rank, shapes
        super().__init__(x0, population=choose_population(x0.numel()) if population is None else population, **options)
        self._restore_derived()

    def _restore_derived(self) -> None:
        # Mirrored members are neighbours: 2d and 2d + 1 are the mean plus and minus direction d. The last of an odd number
        # has no mirror image.
        directions = -(-self.population // 2) if self.antithetic else self.population
        self._noise = Noise(self._count_drawn(), directions, self.dtype, self.device, self.shapes, self.rank)

    def _count_drawn(self) -> int:
        """Return how many numbers are drawn for one direction."""
        return self.dim

    def _draws(self) -> int:
        return self._noise.blocks

    @abstractmethod
    def _scale(self) -> Tensor | float:
        """Return the standard deviation of all coordinates, or of each."""

    def _directions(self, start: int, stop: int) -> Tensor:
        """Return directions `start` to `stop`, which may share memory with the noise and must not be written to."""
        return self._noise.rows(self._int("seed"), self._int("counter"), start, stop)

    def _propose(self, start: int, stop: int) -> Tensor:
        mean, scale = self._tensor("mean"), self._scale()
        if not self.antithetic:
            return self._reflect(_shift(mean, self._directions(start, stop), scale, 1))
        first = start // 2
        step = self._directions(first, -(-stop // 2))
        pairs = step.new_empty(len(step), 2, self.dim)
        for side, sign in enumerate((1, -1)):
            _shift(mean, step, scale, sign, pairs[:, side])
        return self._reflect(pairs.view(-1, self.dim)[start - 2 * first : stop - 2 * first])

    def _reflect(self, x: Tensor, columns: slice = slice(None)) -> Tensor:
        c = self.coordinates
        return reflect(x, c.lower[columns], c.upper[columns]) if c.bounded else x

    def _separable(self) -> bool:
        """Whether the noise of each coordinate depends on no other."""
        return True

    def draft(self) -> Search | None:
        """Return a copy with only the state that other processes need to draw the members of this generation.

        None where members are so small that they are sent themselves, or can't be drawn elsewhere.
        """
        in_parts = (self._noise.segmented and self._separable()) or self.shares_products()
        if not in_parts or self.device.type != "cpu" or self.dtype is torch.bfloat16:
            return None
        out = copy.copy(self)
        names = ("seed", "counter", "population", "mean", "sigma", "C")
        out.state = {name: self.state[name] for name in names if name in self.state}
        out._pending = out.share = None
        out._noise = self._noise.copy_plan()
        return out

    def parts(self, index: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over one member in parts, (offset, numbers); each part may be overwritten by the next one."""
        if not self._separable():
            yield from super().parts(index)
            return
        mean, scale = self._tensor("mean"), self._scale()
        sign, first = (1 - 2 * (index % 2), index // 2) if self.antithetic else (1, index)
        for columns, step in self._noise.iterate_direction(self._int("seed"), self._int("counter"), first):
            part = scale[columns] if isinstance(scale, Tensor) else scale
            # Segments are not stored, so they may be overwritten.
            out = step if self._noise.segmented else None
            yield columns.start, self._reflect(_shift(mean[columns], step, part, sign, out), columns)

    def shares_products(self) -> bool:
        """Whether members are a mean plus noise of low rank, so that they are evaluated without forming their matrices."""
        return self.rank is not None and self._separable() and not self.coordinates.bounded

    def spread(self) -> Tensor | None:
        """Return the standard deviation of each number; None where it is the same for all."""
        scale = self._scale()
        return scale if isinstance(scale, Tensor) else None

    def count_drawn(self) -> int:
        """Return how many numbers are drawn for one direction."""
        return self._noise.drawn

    def factors(self, members: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the noise of members for each parameter: (A, B) of A Bᵀ, or (numbers, None), with signs.

        It includes the standard deviation where all numbers have the same one; otherwise the caller multiplies by `spread`.

        Args:
            members: The indices of the members.
        """
        step = 2 if self.antithetic else 1
        directions = [member // step for member in members]
        distinct = sorted(set(directions))
        rows = torch.tensor([distinct.index(each) for each in directions], device=self.device)
        signs = [1 - 2 * (member % 2) if self.antithetic else 1 for member in members]
        scale = torch.tensor(signs, dtype=self.dtype, device=self.device)
        scale = scale if self.spread() is not None else scale * self._scale()
        noise: list[tuple[Tensor, Tensor | None]] = []
        for left, right in self._noise.factors(self._int("seed"), self._int("counter"), distinct):
            scaled = left[rows] * scale.view(-1, *[1] * (left.dim() - 1))
            noise.append((scaled, None if right is None else right[rows]))
        return noise

    def _moments(self, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Σ first ε and Σ second ε² over the directions of this generation."""
        return self._noise.sum_weighted(self._int("seed"), self._int("counter"), first, second, self.share)

    def _pair_weights(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Convert weights of members to weights of their directions, and of the squares of the directions."""
        if not self.antithetic:
            return weights, weights
        paired = self.population // 2 * 2
        plus, minus, alone = weights[0:paired:2], weights[1:paired:2], weights[paired:]
        return torch.cat([plus - minus, alone]), torch.cat([plus + minus, alone])

    @property
    def mean(self) -> Tensor:
        """The centre of the distribution, inside the bounds."""
        return self._reflect(self._tensor("mean").clone())


def choose_population(dim: int) -> int:
    """Return the default population of a distribution over P coordinates: 4 + 3 ln P."""
    return 4 + int(3 * math.log(max(dim, 1)))


def _shift(mean: Tensor, step: Tensor, scale: Tensor | float, sign: int, out: Tensor | None = None) -> Tensor:
    """Return mean + sign · scale · step."""
    if isinstance(scale, Tensor):
        return torch.addcmul(mean, step, scale, value=sign, out=out)
    return torch.add(mean, step, alpha=sign * scale, out=out)


class GradientSearch(Distribution):
    """A Gaussian whose mean descends along an estimate of the gradient of its expected fitness.

    Args:
        x0: The first mean.
        population: How many members.
        lr: The learning rate.
        sigma: The standard deviation of the members around the mean.
        optimizer: `"adam"`, `"sgd"`, or None: the mean is not moved, and `take_estimate` returns the gradient estimate.
        momentum: Of `"sgd"`.
        betas: Of `"adam"`.
        **options: Those of `Distribution` and `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import OpenES
        >>> search = OpenES(torch.ones(3, dtype=torch.float64), population=4000, optimizer=None, shape="raw", sigma=0.01)
        >>> search.tell(search.ask().square().sum(1))
        >>> (search.take_estimate() - 2).abs().max() < 0.3
        tensor(True)
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int = 64,
        lr: float = 0.05,
        sigma: float = 0.1,
        optimizer: str | None = "adam",
        momentum: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        antithetic: bool = True,
        **options: Any,
    ) -> None:
        check_choice("optimizer", optimizer, ("adam", "sgd", None))
        check_sigma(sigma)
        self.lr, self.sigma, self.optimizer, self.momentum, self.betas = lr, sigma, optimizer, momentum, betas
        self._estimate: list[Tensor] = []
        super().__init__(x0, population=population, antithetic=antithetic, **options)

    def take_estimate(self) -> Tensor:
        """Return the gradient estimate of the last completed generation, with `optimizer=None`."""
        parts, self._estimate = self._estimate, []
        if not parts:
            raise RuntimeError("there is no estimate: make the search with optimizer=None, and tell it a generation")
        estimate = torch.cat(parts)
        self.state["step"] = float(torch.linalg.vector_norm(estimate, torch.inf))
        return estimate

    def _start(self, x0: Tensor) -> None:
        self.state["mean"] = x0
        if self.optimizer == "adam":
            self.state["first"], self.state["second"] = torch.zeros_like(x0), torch.zeros_like(x0)
        else:
            self.state["step"] = 0.0
            if self.momentum:
                self.state["velocity"] = torch.zeros_like(x0)

    def _scale(self) -> Tensor | float:
        return self.sigma

    def gradient(self, fitness: Tensor) -> Tensor:
        """Return the gradient estimate from the fitness of the current generation; the state is unchanged."""
        return torch.cat([part.clone() for _, part in self._estimates(clean(fitness))])

    def _learn(self, fitness: Tensor) -> None:
        if self.optimizer == "sgd":
            self.state["step"] = 0.0
        self._estimate.clear()
        for columns, gradient in self._estimates(fitness):
            self._descend(gradient, columns)

    @abstractmethod
    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over `gradient` in parts, from fitness without NaN; each part may be overwritten by the next one."""

    def _sums(self, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over Σ weights ε over the directions of this generation, in parts as `_estimates` yields them."""
        counter, share = self._int("counter"), self.share
        for columns, total, _ in self._noise.sums(self._int("seed"), counter, weights, share=share):
            yield columns, total

    def _descend(self, gradient: Tensor, columns: slice) -> None:
        """Move some coordinates of the mean along the gradient, or store the gradient if there is no optimizer."""
        if self.optimizer is None:
            self._estimate.append(gradient.clone())  # a part is overwritten by the next one
            return
        mean = self._tensor("mean")[columns]
        if self.optimizer == "adam":
            # Kingma and Ba 2015, algorithm 1, with the two bias corrections as scalars.
            first, second, (b1, b2) = self._tensor("first")[columns], self._tensor("second")[columns], self.betas
            first.lerp_(gradient, 1 - b1)
            second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            late, early = math.sqrt(1 - b2 ** (self.generation + 1)), 1 - b1 ** (self.generation + 1)
            mean.addcdiv_(first, second.sqrt().add_(1e-8 * late), value=-self.lr * late / early)
            return
        if self.momentum:
            gradient = self._tensor("velocity")[columns].mul_(self.momentum).add_(gradient)
        mean.sub_(gradient, alpha=self.lr)
        longest = float(torch.linalg.vector_norm(gradient, torch.inf))
        self.state["step"] = max(self._float("step"), self.lr * longest)

    def _find_convergence(self) -> Reason | None:
        # Adam divides by the size of the gradients, so its steps never become small.
        if self.optimizer == "adam" or self.generation == 0:
            return None
        return self._check_step(self._float("step"), self._tensor("mean"))
