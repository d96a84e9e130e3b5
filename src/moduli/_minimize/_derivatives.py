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

    def _differentiate(self, fun: Callable[[Any], Any], x: Any) -> tuple[Tensor, Tensor, Any]:
        """The values as a vector, their Jacobian by the real vector of all leaves, and what the function returned."""
        leaves = [leaf.clone().requires_grad_() for leaf in self.point.leaves_of(x)]
        with torch.enable_grad():
            found = self.point.call(fun, leaves)
            vector = data_of(found).reshape(-1)
            rows = [to_vector(_gradient(component, leaves)) for component in vector]
        empty = torch.zeros(0, to_vector(leaves).numel(), dtype=vector.dtype)
        return vector.detach(), torch.stack(rows) if rows else empty, found

    def _compute_hessian(self, x: Any) -> Tensor:
        """The Hessian of the value by the real vector of all leaves."""
        leaves = [leaf.clone().requires_grad_() for leaf in self.point.leaves_of(x)]
        with torch.enable_grad():
            data = data_of(self.point.call(self.fun, leaves))
            value = 0.5 * data.abs().square().sum() if data.numel() > 1 else data.reshape(())
            grads = _gradient(value, leaves, create_graph=True)
            parts = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
            first = torch.cat([part.reshape(-1) for part in parts])
            rows = [to_vector(_gradient(component, leaves, retain_graph=True)) for component in first]
        H = torch.stack(rows)
        return 0.5 * (H + H.T)

    def _spread(self, x: Any) -> Tensor:
        vector, J, _ = self._differentiate(self.fun, x)
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
        _, J, found = self._differentiate(self.fun, x)
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


def _gradient(value: Tensor, leaves: list[Tensor], **more: Any) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    more = {"retain_graph": True, **more}
    found = torch.autograd.grad(value, leaves, allow_unused=True, **more)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


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
