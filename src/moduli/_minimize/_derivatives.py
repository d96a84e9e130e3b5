"""Derivatives and error bars at a result, in the form of x0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..labels import Space
from ..labels import Tensor as Labelled
from ._point import StartPoint, data_of, from_vector, to_vector


class FoundProblem:
    """A function of a point of some form, differentiated where it is asked.

    Args:
        fun: The function.
        point: The form of x0.
        fixed: For each leaf the numbers that bounds fix, or None.
        constraints: Functions of the point that are zero: what holds as an equation at the result.
    """

    def __init__(
        self,
        fun: Callable[[Any], Any],
        point: StartPoint,
        fixed: Sequence[Tensor | None],
        constraints: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self.fun, self.point, self.fixed, self.constraints = fun, point, fixed, constraints

    # ------------------------------------------------------------------ as matrices

    def _evaluate(self, fun: Callable[[Any], Any], vector: Tensor) -> Any:
        """A function at the point with these real numbers."""
        return self.point.call(fun, from_vector(vector, self.point.leaves))

    def _differentiate(self, fun: Callable[[Any], Any], x: Any) -> tuple[Tensor, Tensor]:
        """The values as a vector, and their Jacobian by the real vector of all leaves."""
        start = to_vector(self.point.leaves_of(x))

        def values(vector: Tensor) -> Tensor:
            data: Tensor = data_of(self._evaluate(fun, vector))
            return data.reshape(-1)

        return values(start).detach(), torch.autograd.functional.jacobian(values, start)  # type: ignore[no-untyped-call]

    def _compute_hessian(self, x: Any) -> Tensor:
        """The Hessian of the value by the real vector of all leaves."""

        def value(vector: Tensor) -> Tensor:
            data: Tensor = data_of(self._evaluate(self.fun, vector))
            return 0.5 * data.abs().square().sum() if data.numel() > 1 else data.reshape(())

        H: Tensor = torch.autograd.functional.hessian(value, to_vector(self.point.leaves_of(x)))  # type: ignore[no-untyped-call]
        return 0.5 * (H + H.T)

    def _spread(self, x: Any) -> Tensor:
        vector, J = self._differentiate(self.fun, x)
        if vector.numel() == 1:
            curvature, scale = self._compute_hessian(x), 1.0
        else:
            curvature, scale = J.T @ J, None
        normals = [J.new_zeros(0, J.shape[1])]
        fixed = [
            torch.zeros_like(leaf) if f is None else f.to(leaf.dtype)
            for leaf, f in zip(self.point.leaves, self.fixed, strict=True)
        ]
        chosen = to_vector(fixed) != 0
        normals.append(torch.eye(J.shape[1], dtype=J.dtype)[chosen])
        normals += [self._differentiate(constraint, x)[1] for constraint in self.constraints]
        A = torch.cat(normals)
        # Directions in which neither what is fixed nor a constraint changes.
        _, sizes, Vh = torch.linalg.svd(A, full_matrices=True)
        rank = int((sizes > 1e-10 * max(1.0, float(sizes.max()) if sizes.numel() else 1.0)).sum())
        Z = Vh[rank:].T
        if scale is None:
            freedom = vector.numel() - Z.shape[1]
            scale = float(vector.abs().square().sum()) / freedom if freedom > 0 else torch.inf
        values, vectors = torch.linalg.eigh(Z.T @ curvature @ Z)
        # The eigenvalues of J'J are squares, so that those of J are compared, as curve_fit does.
        least = torch.finfo(values.dtype).eps * max(J.shape) * float(values.abs().max() if values.numel() else 0.0)
        if bool((values <= least).any()) or scale == torch.inf:
            weight = (Z @ Z.T).abs() > 1e-12
            return torch.where(weight, torch.inf, 0.0).to(J.dtype)
        inverse: Tensor = Z @ (vectors / values) @ vectors.T @ Z.T
        return scale * inverse

    # ------------------------------------------------------------------ in x0's form

    def jacobian(self, x: Any) -> Any:
        """Rows of the Jacobian by leaf."""
        _, J = self._differentiate(self.fun, x)
        found = self._evaluate(self.fun, to_vector(self.point.leaves_of(x)))
        dims = found.dims if isinstance(found, Labelled) else None
        shape = tuple(data_of(found).shape)
        parts: list[Any] = []
        pieces = [from_vector(row, self.point.leaves) for row in J]
        for i, own in enumerate(self.point.dims):
            leaf = torch.stack([row[i] for row in pieces]).reshape((*shape, *self.point.leaves[i].shape))
            if own is not None or dims is not None:
                before = dims if dims is not None else tuple(Space(n, "residual") for n in shape)
                after = own if own is not None else tuple(Space(n) for n in self.point.leaves[i].shape)
                parts.append(Labelled(leaf, (*before, *_prime(after, before))))
            else:
                parts.append(leaf)
        return self.point.form(parts)

    def hessian(self, x: Any) -> Any:
        """Blocks of the Hessian by pairs of leaves."""
        return self._blocks(self._compute_hessian(x))

    def covariance(self, x: Any) -> Any:
        """Blocks of the covariance by pairs of leaves."""
        return self._blocks(self._spread(x))

    def stderr(self, x: Any) -> Any:
        """Roots of the covariance's diagonal."""
        return self.point.form(from_vector(self._spread(x).diagonal().sqrt(), self.point.leaves))

    def _blocks(self, matrix: Tensor) -> Any:
        point = self.point
        if any(leaf.is_complex() for leaf in point.leaves):
            raise TypeError("minimize: second derivatives are given of real parameters; x0 has complex ones")
        sizes = [leaf.numel() for leaf in point.leaves]
        out = []
        for i, band in enumerate(torch.split(matrix, sizes, 0)):
            row: list[Any] = []
            for j, block in enumerate(torch.split(band, sizes, 1)):
                data = block.reshape((*point.leaves[i].shape, *point.leaves[j].shape))
                first, second = point.dims[i], point.dims[j]
                if first is not None and second is not None:
                    row.append(Labelled(data, (*first, *_prime(second, first))))
                else:
                    row.append(data)
            out.append(point.form(row))
        return point.form(out)


def _prime(spaces: Sequence[Space], taken: Sequence[Space]) -> tuple[Space, ...]:
    """The spaces, with a prime where another axis has that name already."""
    names = {space.name for space in taken if space.name is not None}
    out = []
    for space in spaces:
        name = space.name
        while name is not None and name in names:
            name += "'"
        out.append(space if name == space.name else space.rename(name))
        names |= {name} if name is not None else set()
    return tuple(out)
