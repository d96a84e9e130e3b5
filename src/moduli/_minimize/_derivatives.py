"""A user's function of a point as a function of one real vector, and its first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ._point import StartPoint, data_of, from_vector

ELEMENTWISE = frozenset((
    "Abs", "Acos", "Acosh", "Add", "Addcdiv", "Addcmul", "Alias", "Asin", "Asinh", "Atan", "Atan2", "Atanh",
    "Clamp", "ClampMax", "ClampMin", "Clone", "Cos", "Cosh", "Digamma", "Div", "Elu", "Erf", "Erfc", "Exp",
    "Exp2", "Expm1", "Gelu", "Hypot", "LeakyRelu", "Lerp", "Lgamma", "Log", "Log10", "Log1P", "Log2",
    "LogSigmoid", "Logaddexp", "Logaddexp2", "Maximum", "Minimum", "Mul", "Neg", "Pow", "Reciprocal", "Relu",
    "Rsqrt", "Rsub", "Sgn", "Sigmoid", "Sign", "Silu", "Sin", "Sinc", "Sinh", "Softplus", "Sqrt", "Sub", "Tan",
    "Tanh", "ToCopy", "Where", "Xlogy",
))  # fmt: skip
"""Elementwise operations of torch, by the names of their nodes in graphs."""


@contextmanager
def allow_derivatives() -> Iterator[None]:
    """Record operations for derivatives, also where the caller has switched that off (no_grad, inference mode)."""
    inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else nullcontext(), torch.enable_grad():
        yield


def is_elementwise(node: Any) -> bool:
    """Return whether all operations of a graph that ends here are elementwise."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind, _, _ = node.name().partition("Backward")
        if kind in ELEMENTWISE:
            waiting.extend(parent for parent, _ in node.next_functions)
        elif node.name() != "torch::autograd::AccumulateGrad":
            return False
    return True


def _are_numbers(point: StartPoint) -> bool:
    """Return whether the leaves of a point are single real numbers of one dtype without labels."""
    dtype = point.leaves[0].dtype
    pairs = zip(point.leaves, point.dims, strict=True)
    return (
        all(leaf.dim() == 0 and dims is None and leaf.dtype is dtype for leaf, dims in pairs) and not dtype.is_complex
    )


class VectorFunction:
    """A function of the real vector of all leaves, with real values as a vector.

    Args:
        fun: The user's function, of a point in the form of x0.
        point: The form of x0.
        mode: "forward" or "reverse" mode of differentiation, or None for the cheaper one: forward if there are no more
            variables than values.
        see: Maps leaves to those that are passed to the function, or None.
    """

    def __init__(
        self,
        fun: Callable[[Any], Any],
        point: StartPoint,
        mode: str | None = None,
        see: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        self.fun, self.point, self.mode, self.see = fun, point, mode, see
        #: Whether the leaves are single real numbers, and whether the values are elementwise functions of them.
        self.numbers = see is None and point.module is None and _are_numbers(point)
        self.elementwise: bool | None = None if self.numbers else False
        #: The vector of the last evaluation, and the values there.
        self.at: Tensor | None = None
        self.values: Tensor | None = None

    def point_of(self, vector: Tensor) -> list[Tensor]:
        """Return the leaves that are passed to the function at a vector."""
        if self.numbers and vector.dtype is self.point.leaves[0].dtype:
            return list(vector.unbind())
        leaves = from_vector(vector, self.point.leaves)
        return leaves if self.see is None else self.see(leaves)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the values at a vector, complex ones as pairs."""
        result = self.point.call(self.fun, self.point_of(vector))
        out = flatten_values(result)
        if self.elementwise is not False and not out.requires_grad:
            self.at, self.values = vector, data_of(result)
        return out

    def jacobian(self, vector: Tensor, values: int) -> Tensor:
        """Return the Jacobian at a vector.

        Args:
            vector: The point.
            values: The number of values of the function.
        """
        forward = self.mode == "forward" or (self.mode is None and vector.numel() <= values)
        if forward:
            try:
                rows = self._differentiate_elementwise(vector, values)
                return self._differentiate_forward(vector) if rows is None else rows
            except (NotImplementedError, RuntimeError):
                # Not every operation of torch has a forward derivative. Other errors are raised again in reverse mode.
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

    def _differentiate_elementwise(self, vector: Tensor, values: int) -> Tensor | None:
        """Return the Jacobian of an elementwise model by one backward pass, or None if the model is not elementwise.

        Most curves are formulas of numbers, such as `a * exp(-b * x) + c`. With a copy of each number for every value, the
        derivative of the sum of the values by a copy is an entry of the Jacobian. The graph shows whether the model is such
        a formula: then all its operations are elementwise.

        Args:
            vector: The point.
            values: The number of values of the function.
        """
        reference = self.values
        if self.elementwise is False or reference is None or reference.numel() != values:
            return None
        copies = [torch.full_like(reference, number, requires_grad=True) for number in vector.tolist()]
        try:
            with torch.enable_grad():
                data = data_of(self.point.call(self.fun, copies))
        except (IndexError, RuntimeError, TypeError, ValueError):
            data = None  # the model accepts single numbers only
        if data is None or data.shape != reference.shape or not is_elementwise(data.grad_fn):
            self.elementwise = False
        elif self.elementwise is None:
            # Detached parts are not in the graph, and could depend on the number of copies, so the values are compared.
            same = self.at is not None and torch.equal(self.at, vector)
            self.elementwise = same and torch.allclose(reference, data.detach(), rtol=1e-6, equal_nan=True)
        if not self.elementwise:
            return None
        columns = torch.autograd.grad(data.sum(), copies, allow_unused=True, materialize_grads=True)
        return torch.stack(columns).reshape(len(copies), -1).T

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


def flatten_values(result: Any) -> Tensor:
    """Return the result of a function as a real vector, complex numbers as pairs."""
    data: Tensor | None = data_of(result)
    if data is None:
        raise TypeError(f"minimize: the function returned a {type(result).__name__}; return its values as a tensor")
    return (torch.view_as_real(data) if data.is_complex() else data).reshape(-1)
