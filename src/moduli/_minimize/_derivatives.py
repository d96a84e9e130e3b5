"""A user's function of a point as a function of one real vector, and its first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._point import StartPoint, data_of, from_vector


class VectorFunction:
    """A function of the real vector of all leaves, with real values as a vector.

    Args:
        fun: The user's function, of a point in the form of x0.
        point: The form of x0.
        mode: "forward" or "reverse" mode of differentiation, or None for the cheaper one: forward where there are fewer
            variables than values.
        see: Maps leaves to those that the function is given, or None.
    """

    def __init__(
        self,
        fun: Callable[[Any], Any],
        point: StartPoint,
        mode: str | None = None,
        see: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        self.fun, self.point, self.mode, self.see = fun, point, mode, see

    def point_of(self, vector: Tensor) -> list[Tensor]:
        """Return the leaves that the function is given at a vector."""
        leaves = from_vector(vector, self.point.leaves)
        return leaves if self.see is None else self.see(leaves)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the values at a vector, complex ones as pairs."""
        return flatten_values(self.point.call(self.fun, self.point_of(vector)))

    def jacobian(self, vector: Tensor, values: int) -> Tensor:
        """Return the Jacobian at a vector.

        Args:
            vector: Where.
            values: How many values the function has.
        """
        forward = self.mode == "forward" or (self.mode is None and vector.numel() <= values)
        if forward:
            try:
                return self._differentiate_forward(vector)
            except (NotImplementedError, RuntimeError):
                # Not every operation of torch has a forward derivative. What else is wrong is found again in reverse.
                if self.mode == "forward":
                    raise
        return self._differentiate_reverse(vector)

    def curve(self, vector: Tensor, direction: Tensor) -> Tensor:
        """Return the second derivative of the values along a direction."""

        def slope(at: Tensor) -> Tensor:
            out: Tensor = torch.func.jvp(self, (at,), (direction,))[1]
            return out

        second: Tensor = torch.func.jvp(slope, (vector,), (direction,))[1]
        return second.detach()

    def _differentiate_forward(self, vector: Tensor) -> Tensor:
        """Return the Jacobian column by column: J'u is linear in u, and its derivatives by u are the columns of J.

        torch's own forward mode takes 0.1 ms and more for every operation with a constant.
        """
        with torch.enable_grad():
            leaf = vector.detach().requires_grad_()
            values = self(leaf)
            if not values.requires_grad:
                return torch.zeros(values.numel(), leaf.numel(), dtype=leaf.dtype, device=leaf.device)
            u = torch.zeros_like(values, requires_grad=True)
            (product,) = torch.autograd.grad(values, leaf, u, create_graph=True)
            if not product.requires_grad:
                raise RuntimeError("minimize: the function has no second derivatives, which forward mode goes through")
            return differentiate_rows(product, u).T

    def _differentiate_reverse(self, vector: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = vector.detach().requires_grad_()
            values = self(leaf)
            if not values.requires_grad:
                return torch.zeros(values.numel(), leaf.numel(), dtype=leaf.dtype, device=leaf.device)
            return differentiate_rows(values, leaf)


def differentiate_rows(values: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivatives of a vector by a leaf, one row for each value."""
    basis = torch.eye(values.numel(), dtype=values.dtype, device=values.device)
    try:
        (rows,) = torch.autograd.grad(values, leaf, basis, retain_graph=True, is_grads_batched=True)
    except RuntimeError:
        # Some operation has no rule for batches of gradients: one row after the other.
        rows = torch.stack([torch.autograd.grad(values, leaf, row, retain_graph=True)[0] for row in basis])
    return rows.detach()


def flatten_values(found: Any) -> Tensor:
    """Return what a function returned as a real vector, complex numbers as pairs."""
    data: Tensor | None = data_of(found)
    if data is None:
        raise TypeError(f"minimize: the function returned a {type(found).__name__}; return its values as a tensor")
    return (torch.view_as_real(data) if data.is_complex() else data).reshape(-1)
