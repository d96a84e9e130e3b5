"""Wrappers of a user's function.

They support user-defined derivatives, results that are floats or NumPy arrays, and residuals with a robust loss or NaN values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..labels import Space
from ..labels import Tensor as Labelled
from ._point import StartPoint, data_of, from_vector

MODES = ("forward", "reverse")


def attach_derivatives(
    fun: Callable[[Any], Any], x0: Any, jac: Any, hess: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """Return a function of torch whose derivatives are those of the user.

    Args:
        fun: The function; with jac=True it returns its value and its gradient, or its residuals and their Jacobian.
        x0: The starting point.
        jac: A function that returns the gradient or the Jacobian, True, or None for torch's.
        hess: A function that returns the Hessian, or None.
    """
    if isinstance(x0, nn.Module):
        raise TypeError("minimize: jac= and hess= are of points; the derivatives of a module's loss are torch's own")
    for name, function in (("jac", jac), ("hess", hess)):
        if function is not None and function is not True and not callable(function):
            instead = "a function, True, 'forward' or 'reverse'; without it torch differentiates"
            raise TypeError(f"minimize: {name} is {function!r}; it is {instead}")
    return DifferentiatedFunction(fun, x0, jac, hess)


class DifferentiatedFunction:
    """A function with derivatives that the user computes.

    Args:
        fun: The function.
        x0: The starting point.
        jac: Its first derivatives: a function, True where `fun` returns them too, or None for those of torch.
        hess: Its second derivatives, or None.
    """

    def __init__(self, fun: Callable[[Any], Any], x0: Any, jac: Any, hess: Callable[[Any], Any] | None) -> None:
        self.point, self.numpy = StartPoint(x0), holds_numpy(x0)
        self.fun, self.jac, self.hess = fun, jac, hess
        #: The last vector, the values there, and with jac=True the derivatives.
        self.last: tuple[Tensor, Tensor, Any] | None = None
        self.shape: tuple[int, ...] = ()

    def __call__(self, x: Any) -> Tensor:
        """Return the values at a point, in torch's graph."""
        parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in _collect_leaves(x)]
        vector = torch.cat([part.reshape(-1) for part in parts])
        values: Tensor = _UserValues.apply(vector, self)  # type: ignore[no-untyped-call]
        return values

    def locate(self, vector: Tensor) -> Any:
        """Return a vector as a point in the form that the user's functions take."""
        leaves: list[Any] = from_vector(vector.detach(), self.point.leaves)
        if self.numpy:
            leaves = [leaf.cpu().numpy() for leaf in leaves]
        return self.point.form(leaves)

    def evaluate(self, vector: Tensor) -> Tensor:
        """Return the values at a vector; those of the last vector are stored."""
        if self.last is not None and torch.equal(self.last[0], vector):
            return self.last[1].clone()
        out, derivatives = self.fun(self.locate(vector)), None
        if self.jac is True:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError("minimize: with jac=True the function returns (value, gradient)")
            out, derivatives = out
        values = _to_tensor(out, vector)
        self.shape = tuple(values.shape)
        self.last = vector.detach().clone(), values, derivatives
        return values.clone()

    def differentiate(self, vector: Tensor) -> Tensor:
        """Return the gradient, or the Jacobian with a row for each value."""
        count = max(1, int(np.prod(self.shape)))
        if self.jac is None:
            with torch.enable_grad():
                leaf = vector.detach().requires_grad_()
                out = data_of(self.fun(self.point.form(from_vector(leaf, self.point.leaves))))
                if out is None or out.numel() != 1:
                    raise TypeError(
                        "minimize: hess= is the Hessian of a loss that torch can differentiate; give jac= too"
                    )
                (gradient,) = torch.autograd.grad(out.reshape(()), leaf)
                return gradient
        if self.jac is True:
            self.evaluate(vector)
            out = self.last[2] if self.last is not None else None
        else:
            out = self.jac(self.locate(vector))
        rows = count if self.shape else 1
        return _read_matrix(out, self.point, rows, vector, "jac").reshape(*((count,) if self.shape else ()), -1)

    def multiply_hessian(self, vector: Tensor, direction: Tensor) -> Tensor:
        """Return the product of the Hessian with a vector."""
        if self.hess is None or self.shape not in ((), (1,)):
            raise TypeError(
                "minimize: this needs second derivatives, and jac= gives only the first: give hess=, or use bfgs"
            )
        size = vector.numel()
        out = self.hess(self.locate(vector))
        if len(self.point.leaves) > 1:
            blocks = self.point.match(out, "parts of the Hessian", lambda part: False)
            rows = [leaf.numel() for leaf in self.point.leaves]
            named = zip(blocks, rows, self.point.dims, strict=True)
            parts = [_read_matrix(block, self.point, n, vector, "hess", dims) for block, n, dims in named]
            return torch.cat(parts) @ direction
        return _read_matrix(out, self.point, size, vector, "hess", self.point.dims[0]) @ direction


class _UserValues(torch.autograd.Function):
    """The values of a function whose first derivatives are the user's."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, functions: DifferentiatedFunction) -> Tensor:
        ctx.functions = functions
        ctx.save_for_backward(vector)
        return functions.evaluate(vector)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (vector,) = ctx.saved_tensors
        J = _UserDerivatives.apply(vector, ctx.functions)  # type: ignore[no-untyped-call]
        return (grad * J if J.dim() == 1 else grad.reshape(-1) @ J), None


class _UserDerivatives(torch.autograd.Function):
    """The user's first derivatives, whose derivatives are the user's Hessian."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, functions: DifferentiatedFunction) -> Tensor:
        ctx.functions = functions
        ctx.save_for_backward(vector)
        return functions.differentiate(vector)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (vector,) = ctx.saved_tensors
        return ctx.functions.multiply_hessian(vector, grad.reshape(-1)), None


def _read_matrix(
    out: Any, point: StartPoint, rows: int, vector: Tensor, name: str, row_dims: Sequence[Space] | None = None
) -> Tensor:
    """Return derivatives in the form of x0, after an axis of rows, as a matrix; raise ValueError if shapes differ.

    Args:
        out: The derivatives.
        point: The form of x0.
        rows: The number of rows.
        vector: The point as a vector.
        name: The name of the user's function in errors.
        row_dims: The labelled axes of the rows of a Hessian.
    """
    single = len(point.leaves) == 1 and not isinstance(point.x0, Mapping)
    parts = [out] if single else point.match(out, f"parts of {name}", lambda part: False)
    if any(part is None for part in parts):
        raise ValueError(f"minimize: {name} returned no derivatives for a part of x0")
    aligned = [_align_derivatives(part, dims, row_dims, name) for part, dims in zip(parts, point.dims, strict=True)]
    tensors = [_to_tensor(part, vector) for part in aligned]
    pieces = [torch.view_as_real(part) if part.is_complex() else part for part in tensors]
    sizes = [leaf.numel() * (2 if leaf.is_complex() else 1) for leaf in point.leaves]
    if any(piece.numel() != rows * size for piece, size in zip(pieces, sizes, strict=True)):
        shapes = ", ".join(str(tuple(part.shape)) for part in tensors)
        fact = f"minimize: {name} returned {shapes}; for {rows} values of {vector.numel()} variables it returns"
        raise ValueError(f"{fact} ({rows}, ...), with the axes of each tensor of x0 after the first")
    return torch.cat([piece.reshape(rows, -1).to(vector) for piece in pieces], 1)


def _align_derivatives(part: Any, dims: Sequence[Space] | None, row_dims: Sequence[Space] | None, name: str) -> Any:
    """Return labelled derivatives with axes and labels in the order of those of x0; others unchanged."""
    if not isinstance(part, Labelled) or not dims or part.data.dim() < len(dims):
        return part
    at = part.data.dim() - len(dims)
    first, last = part.dims[:at], part.dims[at:]
    if row_dims and len(row_dims) == at:
        first = _match_names(first, row_dims)
    try:
        return part.align_to((*first, *_match_names(last, dims)))
    except ValueError as error:
        raise ValueError(f"minimize: {name} does not have the axes and labels of x0: {error}") from None


def _match_names(own: Sequence[Space], dims: Sequence[Space]) -> tuple[Space, ...]:
    """Return axes of x0, under the names that the derivatives have for them."""
    if {axis.name for axis in own} == {axis.name for axis in dims}:
        return tuple(dims)
    return tuple(dim.rename(axis.name) for axis, dim in zip(own, dims, strict=True))


def _to_tensor(value: Any, like: Tensor) -> Tensor:
    """Return the result of a user's function as a tensor without a graph; real numbers in the precision of the point."""
    data: Tensor | None = data_of(value)
    if data is not None:
        return data.detach().to(like.device)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"minimize: the function returned a {type(value).__name__}; return numbers, an array or a tensor"
        )
    tensor = torch.from_numpy(np.array(array, dtype=complex if array.dtype.kind == "c" else float))
    return tensor.to(like.device) if tensor.is_complex() else tensor.to(like)


def _collect_leaves(x: Any) -> list[Tensor]:
    """Return the tensors of a point in the order of `StartPoint`."""
    if isinstance(x, Mapping):
        return [leaf for item in x.values() for leaf in _collect_leaves(item)]
    if isinstance(x, list | tuple):
        return [leaf for item in x for leaf in _collect_leaves(item)]
    return [data_of(x)]


def holds_numpy(x0: Any) -> bool:
    """Whether the tensors of a point are NumPy arrays."""
    if isinstance(x0, Mapping | list | tuple):
        parts = list(x0.values()) if isinstance(x0, Mapping) else list(x0)
        return bool(parts) and all(map(holds_numpy, parts))
    return isinstance(x0, np.ndarray)


def accept_numbers(fun: Callable[[Any], Any], x0: Any) -> Callable[[Any], Any]:
    """Return the function for derivative-free methods: it may return floats and NumPy's numbers.

    If x0 is NumPy arrays, the function gets arrays, because NumPy's functions do not take tensors.
    """
    numpy = holds_numpy(x0)

    def evaluate(x: Any) -> Any:
        out = fun(_to_arrays(x) if numpy else x)
        if data_of(out) is not None:
            return out
        leaves = _collect_leaves(x) if not isinstance(x, nn.Module) else list(x.parameters())
        return _to_tensor(out, leaves[0].detach().real)

    return evaluate


def _to_arrays(x: Any) -> Any:
    """Return a point with NumPy arrays instead of its tensors."""
    if isinstance(x, Mapping):
        return {key: _to_arrays(item) for key, item in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_to_arrays(item) for item in x)
    return x.detach().cpu().numpy()


# ---------------------------------------------------------------------------------------------- residuals


def _grow_like_cauchy(z: Tensor) -> Tensor:
    near = z < 1e-4
    far = torch.where(near, 1.0, z)
    return torch.where(near, 1 - z / 2 + z**2 / 3 - z**3 / 4, torch.log1p(far) / far)


def _grow_like_arctan(z: Tensor) -> Tensor:
    near = z < 1e-3
    far = torch.where(near, 1.0, z)
    return torch.where(near, 1 - z**2 / 3 + z**4 / 5, torch.arctan(far) / far)


def _grow_like_huber(z: Tensor) -> Tensor:
    far = torch.where(z > 1, z, 1.0)
    return (2 * far.sqrt() - 1) / far


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "soft_l1": lambda z: 2 / (1 + torch.sqrt(1 + z)),
    "huber": _grow_like_huber,
    "cauchy": _grow_like_cauchy,
    "arctan": _grow_like_arctan,
}
"""For each robust loss rho(z), with z the square of a residual, the function rho(z) / z; smooth at zero."""


def change_residuals(fun: Callable[[Any], Any], loss: str, f_scale: float, nan: str | None) -> Callable[[Any], Any]:
    r"""Return the residuals whose halved sum of squares is the robust cost, without those that are NaN.

    A residual r becomes $r \sqrt{\rho(z) / z}$ with $z = (r / C)^2$, so that half the sum of squares is SciPy's cost
    $C^2/2 \sum \rho(z)$, and all methods for residuals apply.

    Args:
        fun: The residuals.
        loss: "linear" for none, or a name in `LOSSES`.
        f_scale: C, the size of a residual beyond which it counts less.
        nan: "mask" to leave out the residuals that are not a number at the first call, or None.
    """
    if loss != "linear" and loss not in LOSSES:
        raise ValueError(f"minimize: loss is {loss!r}; it is 'linear', {', '.join(map(repr, LOSSES))}")
    if not f_scale > 0:
        raise ValueError(f"minimize: f_scale is {f_scale}; it is the size of a residual, above zero")
    if nan not in (None, "mask"):
        raise ValueError(f"minimize: nan is {nan!r}; it is 'mask', or None to end where a residual is not a number")
    if loss == "linear" and nan is None:
        return fun
    return ChangedResiduals(fun, LOSSES.get(loss), f_scale, nan == "mask")


class ChangedResiduals:
    """Residuals with a robust loss, or without those that are not a number at the start.

    Args:
        fun: The residuals.
        ratio: rho(z) / z of the loss, or None.
        f_scale: The size of a residual beyond which it counts less.
        mask: Whether residuals that are not a number at the first call are left out.
    """

    def __init__(
        self, fun: Callable[[Any], Any], ratio: Callable[[Tensor], Tensor] | None, f_scale: float, mask: bool
    ) -> None:
        self.fun, self.ratio, self.f_scale, self.mask = fun, ratio, f_scale, mask
        self.used: Tensor | None = None

    def __call__(self, x: Any) -> Any:
        """Return the residuals that are squared and summed."""
        out = self.fun(x)
        data = data_of(out)
        if data is None:
            raise TypeError(f"minimize: the function returned a {type(out).__name__}; return residuals as a tensor")
        if data.dim() == 0:
            raise ValueError("minimize: loss= and nan= are of residuals, and the function returned one number")
        if self.mask and self.used is None:
            self.used = ~data.detach().isnan()
            if not bool(self.used.any()):
                raise ValueError("minimize: no residual is a number at x0, so that nan='mask' leaves nothing to fit")
        masked = self.used is not None and not bool(self.used.all())
        if masked:
            data = data[self.used]
        if self.ratio is not None:
            square = (data * data.conj()).real if data.is_complex() else data * data
            data = data * torch.sqrt(self.ratio(square / self.f_scale**2))
        return Labelled(data, out.dims) if isinstance(out, Labelled) and not masked else data
