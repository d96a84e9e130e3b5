"""Measures of members (one number each) and of the whole population, and elementwise functions."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ._arithmetic import Arithmetic, broadcast, check_count, match, read_operand
from ._core import Core, allocate


class Statistics(Arithmetic):
    """The methods of a population for measures and elementwise functions."""

    # -- measures ----------------------------------------------------------------------------------------------------

    def dot(self, other: Any) -> Tensor:
        """Return the inner product of each member with the same member of another population, or with one module: (N,).

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 2, 1)
            >>> torch.allclose(pop.dot(pop), pop.norm() ** 2)
            True
        """
        self._check_members()
        parts = [
            torch.einsum("np,np->n", ours.conj(), theirs.to(ours.dtype))
            if ours.dtype is matrix.dtype
            # Half precision was widened: a pairwise sum rounds less than an inner product.
            else (ours * theirs).sum(1)
            for ours, theirs, matrix in zip(
                self._matrices(), self._read_other(other), self._values.matrices, strict=True
            )
        ]
        return sum(parts[1:], parts[0]) if parts else torch.zeros(self._count)

    def norm(self) -> Tensor:
        """Return the Euclidean norm of each member: (N,).

        Example:
            >>> from moduli.population import Population
            >>> (0 * Population.of(nn.Linear, 3, 2, 1)).norm()
            tensor([0., 0., 0.])
        """
        self._check_members()
        return _hypot([torch.linalg.vector_norm(m, dim=1) for m in self._matrices()], (self._count,))

    def cosine(self, other: Any) -> Tensor:
        """Return the cosine of the angle between each member and that of another population, or one module: (N,).

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 2, 2, 1)
            >>> torch.allclose(pop.cosine(-pop), torch.tensor([-1.0, -1.0]))
            True
        """
        theirs = zip(self._matrices(), self._read_other(other), strict=True)
        size = _hypot([torch.linalg.vector_norm(y.to(x.dtype), dim=1) for x, y in theirs], (self._count,))
        return torch.div(self.dot(other), self.norm() * size)

    def distance(self, other: Any) -> Tensor:
        """Return the Euclidean distance of each member to that of another population, or to one module: (N,).

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(2, 1), 3)
            >>> pop.distance(pop[0])
            tensor([0., 0., 0.])
        """
        self._check_members()
        parts = zip(self._matrices(), self._read_other(other), strict=True)
        return _hypot([torch.linalg.vector_norm(x - y, dim=1) for x, y in parts], (self._count,))

    def distances(self, other: Self | None = None) -> Tensor:
        """Return the Euclidean distances between all members, or to all members of another population: (N, M).

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear, 3, 2, 1).distances().shape
            torch.Size([3, 3])
        """
        self._check_members()
        self._refuse_shard("the distance of every member to every other")
        whom = self if other is None else other
        parts = []
        for x, y in zip(self._matrices(), widen(match(self, whom)[0]), strict=True):
            a, b = (torch.view_as_real(m).flatten(1) if m.is_complex() else m for m in (x, y))
            parts.append(torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist"))
        return _hypot(parts, (self._count, len(whom)))

    def diversity(self) -> Tensor:
        r"""Return the root mean square distance of members to their mean: $\sqrt{\frac1N \sum_i \|x_i - \bar x\|^2}$.

        Raises:
            ValueError: If there are no members.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(2, 1), 4)  # the mean of four equal numbers is exact
            >>> pop.diversity().item()
            0.0
        """
        self._check_nonempty("diversity")
        self._check_members()
        parts = [torch.linalg.vector_norm(m - m.mean(0)).reshape(1) for m in self._matrices()]
        return torch.div(_hypot(parts, (1,))[0], self._count**0.5)

    def mean(self) -> nn.Module:
        """Return the mean of all members as a module. Integers and buffers are those of the first member.

        Raises:
            ValueError: If there are no members.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 2, 1)
            >>> torch.allclose(pop.mean().weight, sum(net.weight for net in pop) / 3)
            True
        """
        self._check_nonempty("mean")
        return self._one(lambda m: m.mean(0, keepdim=True))

    def std(self) -> nn.Module:
        """Return the standard deviation of every parameter over the members (divided by N), as a module.

        Raises:
            ValueError: If there are no members.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear(2, 1), 3).std().bias.item()
            0.0
        """
        self._check_nonempty("standard deviation")
        return self._one(lambda m: m.std(0, correction=0, keepdim=True))

    # -- elementwise -------------------------------------------------------------------------------------------------

    def sign(self) -> Self:
        """Return the sign of every value.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear(1, 1), 2).sign().matrix.abs().max().item()
            1.0
        """
        return self._map_tensors(torch.sign)

    def sqrt(self) -> Self:
        """Return the square root of every value.

        Example:
            >>> from moduli.population import Population
            >>> (4 + 0 * Population.of(nn.Linear(1, 1), 2)).sqrt().matrix.mean().item()
            2.0
        """
        return self._map_tensors(torch.sqrt)

    def exp(self) -> Self:
        """Return the exponential of every value.

        Example:
            >>> from moduli.population import Population
            >>> (0 * Population.of(nn.Linear(1, 1), 2)).exp().matrix.mean().item()
            1.0
        """
        return self._map_tensors(torch.exp)

    def clamp(self, min: float | None = None, max: float | None = None) -> Self:
        """Return every value clamped to two bounds.

        Args:
            min: The lower bound.
            max: The upper bound.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear, 2, 9, 9).clamp(-0.25, 0.25).matrix.abs().max().item() <= 0.25
            True
        """

        def act(x: Tensor, **out: Any) -> Tensor:
            return torch.clamp(x, min, max, **out)

        return self._map_tensors(act)

    def zeros_like(self) -> Self:
        """Return a population of zeros; the buffers are copies.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear(1, 1), 2).zeros_like().norm()
            tensor([0., 0.])
        """

        def act(x: Tensor, out: Tensor | None = None) -> Tensor:
            return torch.zeros_like(x) if out is None else out.zero_()

        return self._map_tensors(act)

    def lerp(self, other: Any, weight: float | Tensor) -> Self:
        """Return the linear interpolation to another population or module: `self + weight * (other - self)`.

        Args:
            other: The end point.
            weight: The weight of the end point; one number, or one per member.

        Example:
            >>> from moduli.population import Population
            >>> a, b = Population.of(nn.Linear, 3, 2, 1), Population.of(nn.Linear, 3, 2, 1)
            >>> torch.allclose(a.lerp(b, 0.5).matrix, ((a + b) / 2).matrix)
            True
        """
        return self + weight * (other - self)  # type: ignore[no-any-return]

    def lerp_(self, other: Any, weight: float | Tensor) -> Self:
        """Interpolate in place, as `lerp`.

        Args:
            other: The end point.
            weight: The weight of the end point; one number, or one per member.

        Example:
            >>> from moduli.population import Population
            >>> a, b = Population.of(nn.Linear, 3, 2, 1), Population.of(nn.Linear, 3, 2, 1)
            >>> torch.equal(a.lerp_(b, 1.0).matrix, b.matrix)
            True
        """
        self._check_operands()
        targets = self._read_other(other)

        def act(matrix: Tensor, target: Tensor, each: Any) -> None:
            if matrix.is_floating_point() or matrix.is_complex():
                matrix.lerp_(target, each)

        self._write(act, targets, read_operand(self, weight, operator.mul) or [])
        return self

    def axpy_(self, factor: float | Tensor, other: Any) -> Self:
        """Add `factor * other` in place, without a temporary.

        Args:
            factor: One number, or one per member.
            other: A population or a module.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 2, 1)
            >>> pop.axpy_(-1.0, pop).norm()
            tensor([0., 0., 0.])
        """
        self._check_operands()
        factors, others = read_operand(self, factor, operator.mul), self._read_other(other)

        def act(matrix: Tensor, step: Tensor, each: Any) -> None:
            if isinstance(each, Tensor):
                matrix.addcmul_(step, each)
            else:
                matrix.add_(step, alpha=each)

        self._write(act, others, factors or [])
        return self

    def where(self, mask: Tensor, other: Any) -> Self:
        """Return members, or values, where a mask is true, and those of another population or module elsewhere.

        Args:
            mask: Booleans: one per member (N,), per position (P,), or for every value (N, P).
            other: The population or module whose values are used where the mask is false.

        Example:
            >>> from moduli.population import Population
            >>> a, b = Population.of(nn.Linear, 2, 2, 1), Population.of(nn.Linear, 2, 2, 1)
            >>> c = a.where(torch.tensor([True, False]), b)
            >>> torch.equal(c[0].weight, a[0].weight), torch.equal(c[1].weight, b[1].weight)
            (True, True)
        """
        self._check_members()
        if mask.dtype is not torch.bool:
            raise TypeError(f"a mask holds booleans, not {mask.dtype}")
        masks = broadcast(self, mask.to(torch.int64)) if mask.dim() else [mask] * len(self.layout.groups)
        others = self._read_other(other)
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, self._count)
            for out, ours, theirs, chosen in zip(values.matrices, self._values.matrices, others, masks, strict=True):
                torch.where(chosen != 0, ours, theirs, out=out)
        return self._finish_result(values)

    def map(self, fn: Callable[..., Tensor], *others: Self, named: bool = False) -> Self:
        """Return the population with a function applied to each stacked parameter, of shape (N, *shape).

        Args:
            fn: The function; its result has the same shape.
            *others: More populations, whose parameters are further arguments.
            named: Whether the first argument is the name of the parameter.

        Returns:
            A population of the results.

        Raises:
            ValueError: If the function changes the shape.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 2, 1)
            >>> torch.equal(pop.map(torch.neg).matrix, -pop.matrix)
            True
        """
        self._check_members()
        for other in others:
            check_count(self, other)
        inert = self._inert()
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, self._count)
            columns = [self.layout.views(match(self, pop)[0]) for pop in (self, *others)]
            for place, (entry, out) in enumerate(zip(self.layout, self.layout.views(values.matrices), strict=True)):
                name = (entry.name,) if named else ()
                new = columns[0][place] if place in inert else fn(*name, *(column[place] for column in columns))
                if not isinstance(new, Tensor) or new.shape != out.shape:
                    got = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
                    raise ValueError(f"the function gave {got} for {entry.name!r}, which has shape {tuple(out.shape)}")
                out.copy_(new)
        return self._finish_result(values)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _matrices(self) -> list[Tensor]:
        """Return the matrices in float32 or wider, because squares in half precision overflow."""
        return widen(self._values.matrices)

    def _read_other(self, other: Any) -> list[Tensor]:
        """Return another population's matrices, or the rows of one module or of a tensor, expanded to matrices."""
        if not isinstance(other, Core | nn.Module | Tensor):
            raise TypeError(f"a Population, a module or a tensor is expected, not a {type(other).__name__}")
        values = read_operand(self, other, operator.add) or []
        return [v.detach().expand(self._count, g.numel) for v, g in zip(values, self.layout.groups, strict=True)]

    def _check_nonempty(self, what: str) -> None:
        self._refuse_shard(f"the {what}")
        if not self._count:
            raise ValueError(f"the {what} of no members")

    def _one(self, fn: Callable[[Tensor], Tensor]) -> nn.Module:
        self._check_members()
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, 1)
            for out, matrix in zip(values.matrices, self._values.matrices, strict=True):
                out.copy_(fn(matrix) if matrix.is_floating_point() or matrix.is_complex() else matrix[:1])
            buffers = {name: buffer[:1].clone() for name, buffer in self._buffers.items()}
            single = self._make_alike(values, 1, buffers)
        # A copy, which is an ordinary module and not a member.
        return copy.deepcopy(single[0])  # type: ignore[no-any-return, index]


def widen(matrices: list[Tensor]) -> list[Tensor]:
    """Return detached matrices in float32 or wider, integers in float64."""
    return [
        m.detach().to(torch.promote_types(m.dtype, torch.float32))
        if m.is_floating_point() or m.is_complex()
        else m.detach().double()
        for m in matrices
    ]


def _hypot(parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the norms of vectors from the norms of their parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([p.double() for p in parts]), dim=0) if parts else torch.zeros(shape)
