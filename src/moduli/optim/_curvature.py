"""The parts of an objective that evaluate it at trial points and differentiate it twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..layout import Guard, allow_interrupts
from ._closure import Evaluator, hold_gradients
from ._needs import ClosureError
from ._processes import reduce_derivatives
from ._vectors import can_compare, from_vector, sample_like, to_vector

if TYPE_CHECKING:
    from .objective import Objective

_METHODS = ("autograd", "batched_autograd", "fd_forward", "fd_central")

# The Hessian products behind each `hessian_method`; the forms of torch.func differentiate the same graph in the same way.
_PRODUCTS = {
    **dict.fromkeys(("batched_autograd", "func", "functional_fwdrev"), "batched_autograd"),
    **dict.fromkeys(("autograd", "functional_revrev"), "autograd"),
    "gfd_forward": "fd_forward",
    "gfd_central": "fd_central",
    **dict.fromkeys(("fd", "fd_full"), "values"),
}
HESSIAN_METHODS = tuple(_PRODUCTS)
"""The values of `hessian_method`: the ways in which a dense Hessian can be computed."""


def _check(key: str, value: str, choices: Iterable[str]) -> str:
    """Return a value; raise ValueError if it is none of the choices."""
    if value not in choices:
        raise ValueError(f"{key} is {value!r}; it can be {', '.join(choices)}")
    return value


def _differentiate(
    values: Sequence[Tensor], params: Sequence[Tensor], z: Sequence[Tensor] | None, batch: int = 0, graph: bool = False
) -> list[Tensor]:
    """Return the derivatives of the dot product of values and `z`.

    Values without a graph contribute nothing, and parameters that no value depends on get zeros.

    Args:
        values: The values.
        params: The parameters.
        z: A vector in the shapes of the values; None for 1, if there is one value, a number.
        batch: The number of vectors, if each tensor of `z` has a first axis over several.
        graph: Whether the derivatives are differentiable.
    """
    live = [i for i, value in enumerate(values) if value.requires_grad]
    derivatives: Sequence[Tensor | None] = [None] * len(params)
    if live:
        with allow_interrupts():
            derivatives = torch.autograd.grad(
                [values[i] for i in live],
                params,
                grad_outputs=None if z is None else [z[i] for i in live],
                retain_graph=True,
                create_graph=graph,
                allow_unused=True,
                is_grads_batched=bool(batch),
            )
    sizes = (batch,) if batch else ()
    return [
        p.new_zeros(*sizes, *p.shape) if grad is None else grad for grad, p in zip(derivatives, params, strict=True)
    ]


class Moving:
    """The part of `Objective` that moves parameters to trial points, in place, and stores their values at the start."""

    params: list[Tensor]
    guard: Guard  # shared by all copies of an objective
    _graph: tuple[Tensor, list[Tensor]] | None = None
    _residuals: Tensor | None = None
    _elsewhere_graph: tuple[Tensor, list[Tensor]] | None = None

    def _remember_start(self, values: Sequence[Tensor] | None = None) -> None:
        """Register the parameters with the guard; `values` is a copy that is never written, or None to make one."""
        self.guard.tensors(self.params, values)

    @contextmanager
    def moved(self) -> Iterator[list[Tensor]]:
        """Yield the values of the parameters, which may be moved inside the block; they are restored at its end."""
        before = [param.detach().clone() for param in self.params]
        self._remember_start(before)
        with Guard() as guard:
            guard.add(self._forget_graph)
            guard.tensors(self.params, before)
            guard.gradients(self.params)
            yield before
            guard.restore()

    def move_to(self, point: Sequence[Tensor]) -> None:
        """Write a point to the parameters, in place. If the step fails later, their values at its start are restored."""
        self._remember_start()
        with torch.no_grad():
            for param, value in zip(self.params, point, strict=True):
                param.copy_(value)
        self._forget_graph()

    def _make_closure(self, evaluator: Evaluator) -> Callable[..., Tensor]:
        """Return a function that evaluates the current closure, for a link that replaces it.

        The result has a graph if it is called with `backward=False` and grad mode on, and the closure returns one. A loss at the
        start of the step is stored in the evaluator.
        """
        original = cast("Objective", self).clone(clone_updates=False)
        params = original.params
        start, versions = [param.detach().clone() for param in params], [param._version for param in params]

        def is_at_start() -> bool:
            """Return whether the parameters have their values at the start; on a device, whether they were never written."""
            if all(map(can_compare, params)):
                return all(map(torch.equal, params, start))
            return [param._version for param in params] == versions

        def evaluate(backward: bool = True) -> Tensor:
            if not backward and torch.is_grad_enabled() and evaluator.kind != "no":
                raw = evaluator.ask()
                loss = raw if original.members is not None else original._scalar(raw)
                value = original._value(raw)
            else:
                loss = value = original.get_loss(backward=backward, at_x0=False)
            if evaluator.start is None and is_at_start():
                evaluator.start = value
            return loss

        return evaluate

    def _forget_graph(self) -> None:
        """Drop the graph of the loss: the values that autograd saved were overwritten, so it has to be evaluated again."""
        self._graph = self._residuals = None

    def _evaluate_elsewhere(self, backward: bool, graph: bool) -> Tensor:
        """Return the loss at the current parameters, with its gradient in `.grad` or with a graph in `_elsewhere_graph`."""
        objective = cast("Objective", self)
        evaluator = objective._closure("evaluations at other points")
        if graph:
            raw, _, self._elsewhere_graph = objective._evaluate_graph(evaluator)
            return objective._value(raw)
        if backward:
            return objective._value(evaluator.gradient(objective.params, objective._scalar))
        # A plain loss function does not write gradients.
        with nullcontext() if evaluator.kind == "function" else hold_gradients(objective.params):
            return objective._value(evaluator.value())


class Curvature(Moving):
    """The part of `Objective` that differentiates twice."""

    get_loss: Callable[..., Tensor]
    get_grads: Callable[..., list[Tensor]]
    get_loss_grads: Callable[..., tuple[Tensor | None, list[Tensor]]]
    reduce: Callable[[Tensor], Tensor] | None = None

    def get_residuals(self) -> Tensor:
        """Return the vector of residuals that the closure computes, with its graph; the loss is half its squared norm."""
        self.get_loss(True, retain_graph=True)
        if self._residuals is None:
            raise ClosureError("a least-squares link needs the vector of residuals, but the closure returned a number")
        return self._residuals

    def hessian_vector_product(
        self,
        z: Sequence[Tensor],
        rgrad: Sequence[Tensor] | None = None,
        at_x0: bool = True,
        hvp_method: str = "autograd",
        h: float = 1e-3,
        retain_graph: bool = False,
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        r"""Return $Hz$, and the gradient it was computed from (pass it to the next product at the same point).

        Args:
            z: The vector, one tensor per parameter.
            rgrad: The gradient returned by an earlier product at the same point.
            at_x0: Whether the parameters are at the start of the step.
            hvp_method: "autograd" differentiates the gradient; "fd_forward" and "fd_central" take differences of one
                and two gradients along z.
            h: The length of the difference step.
            retain_graph: Kept for compatibility; the graph stays while the objective does.
        """
        if _check("hvp_method", hvp_method, _METHODS) in ("autograd", "batched_autograd"):
            grads = self._get_graph_gradient(rgrad, at_x0)
            products = [tensor.detach() for tensor in _differentiate(grads, self.params, z)]
            return reduce_derivatives(self.reduce, products), grads
        return self._difference(z, rgrad, at_x0, hvp_method, h)

    def _get_graph_gradient(self, rgrad: Sequence[Tensor] | None, at_x0: bool) -> list[Tensor]:
        """Return the gradient with its graph: that of an earlier product, unless there is a newer one."""
        if rgrad is None:
            return self.get_grads(create_graph=True, at_x0=at_x0)
        return self._graph[1] if at_x0 and self._graph is not None else list(rgrad)

    def _difference(
        self, z: Sequence[Tensor], rgrad: Sequence[Tensor] | None, at_x0: bool, method: str, h: float
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return a Hessian product by differences of gradients, and the gradient if there is one."""
        norm = float(torch.sqrt(sum((v.detach().abs().double() ** 2).sum() for v in z)))  # type: ignore[arg-type]
        base = None if rgrad is None else list(rgrad)
        if norm == 0.0:
            return [torch.zeros_like(p) for p in self.params], base
        if method == "fd_forward" and base is None:
            base = list(self.get_grads(at_x0=at_x0))
        with self.moved() as start:

            def gradient(step: float) -> list[Tensor]:
                self.move_to([s + (step / norm) * v for s, v in zip(start, z, strict=True)])
                return [g.detach().clone() for g in self.get_loss_grads(at_x0=False)[1]]

            forward = base is not None and method == "fd_forward"
            ahead, behind = gradient(h), base if forward else gradient(-h)
        scale = norm / (h if forward else 2 * h)
        return [(a - b) * scale for a, b in zip(ahead, behind or [], strict=True)], base

    def hessian_matrix_product(
        self,
        Z: Tensor,
        rgrad: Sequence[Tensor] | None = None,
        at_x0: bool = True,
        hvp_method: str = "batched_autograd",
        h: float = 1e-3,
        retain_graph: bool = False,
    ) -> tuple[Tensor, list[Tensor] | None]:
        r"""Return $HZ$ for the columns of a matrix over all parameters concatenated, and the gradient it was computed from.

        Args:
            Z: The matrix; each column is a vector over all parameters.
            rgrad: The gradient returned by an earlier product at the same point.
            at_x0: Whether the parameters are at the start of the step.
            hvp_method: As in `hessian_vector_product`; "batched_autograd" computes all columns in one call.
            h: The length of the difference step.
            retain_graph: Kept for compatibility; the graph stays while the objective does.
        """
        if _check("hvp_method", hvp_method, _METHODS) == "batched_autograd":
            grads = self._get_graph_gradient(rgrad, at_x0)
            rows = [from_vector(column, self.params) for column in Z.unbind(1)]
            stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
            derivatives = _differentiate(grads, self.params, stacked, len(rows))
            columns = [
                d.detach().reshape(len(rows), p.numel()).T for d, p in zip(derivatives, self.params, strict=True)
            ]
            return reduce_derivatives(self.reduce, [torch.cat(columns)])[0], grads
        out, grad = [], rgrad
        for column in Z.unbind(1):
            product, grad = self.hessian_vector_product(from_vector(column, self.params), grad, at_x0, hvp_method, h)
            out.append(to_vector(product))
        return (torch.stack(out, 1) if out else torch.zeros_like(Z)), None if grad is None else list(grad)

    def hutchinson_hessian(
        self,
        rgrad: Sequence[Tensor] | None = None,
        at_x0: bool = True,
        n_samples: int | None = 1,
        distribution: str | Sequence[Sequence[Tensor]] = "rademacher",
        hvp_method: str = "autograd",
        h: float = 1e-3,
        generator: torch.Generator | None = None,
        variance: float = 1,
        zHz: bool = True,
        retain_graph: bool = False,
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        r"""Return an unbiased estimate of the Hessian's diagonal, $\frac1k\sum_j z_j \odot H z_j$ (Hutchinson).

        Args:
            rgrad: A gradient returned by an earlier product.
            at_x0: Whether the parameters are at the start of the step.
            n_samples: The number of vectors to draw; None if `distribution` has the vectors.
            distribution: "rademacher", "normal", "uniform", "sphere", or the vectors themselves.
            hvp_method: As in `hessian_vector_product`; the number of vectors does not depend on it.
            h: The length of the difference step.
            generator: The random generator for the vectors.
            variance: The variance of each component.
            zHz: False for the mean of $Hz$ itself.
            retain_graph: Kept for compatibility; the graph stays while the objective does.
        """
        if isinstance(distribution, str):
            draws = [sample_like(self.params, distribution, variance, generator) for _ in range(n_samples or 1)]
        else:
            draws = [list(z) for z in distribution]
        Z = torch.stack([to_vector(z) for z in draws], 1)
        HZ, grad = self.hessian_matrix_product(Z, rgrad, at_x0, hvp_method, h)
        return from_vector((Z * HZ if zHz else HZ).mean(1), self.params), grad

    def hessian(
        self, hessian_method: str = "batched_autograd", h: float = 1e-3, at_x0: bool = True
    ) -> tuple[Tensor | None, list[Tensor] | None, Tensor]:
        """Return the loss, the gradient and the dense Hessian over all parameters concatenated.

        Args:
            hessian_method: "batched_autograd", "autograd", "func", "functional_revrev", "functional_fwdrev" (exact);
                "gfd_forward", "gfd_central" (differences of gradients, error of order h and h^2); "fd" (differences of
                values, symmetric).
            h: The length of the difference step.
            at_x0: Whether the parameters are at the start of the step.
        """
        product = _PRODUCTS[_check("hessian_method", hessian_method, HESSIAN_METHODS)]
        if product == "values":
            return self._difference_values(h, at_x0)
        exact, loss, grads = product.endswith("autograd"), None, None
        if product != "fd_central":
            loss, grads = self.get_loss_grads(create_graph=exact, at_x0=at_x0)
        size = sum(p.numel() for p in self.params)
        eye = torch.eye(size, dtype=self.params[0].dtype, device=self.params[0].device)
        matrix = self.hessian_matrix_product(eye, grads, at_x0, product, h)[0]
        matrix = matrix if exact else 0.5 * (matrix + matrix.T)
        return loss, None if grads is None else [g.detach() for g in grads], matrix

    def _difference_values(self, h: float, at_x0: bool) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return loss, gradient and Hessian by central differences of values."""
        loss = self.get_loss(backward=False, at_x0=at_x0)
        with self.moved() as start:
            origin = to_vector(start)
            steps = h * torch.eye(origin.numel(), dtype=origin.dtype, device=origin.device)

            def value(x: Tensor) -> Tensor:
                self.move_to(from_vector(x, self.params))
                return self.get_loss(backward=False, at_x0=False)

            def gradient(x: Tensor) -> Tensor:
                return torch.stack([value(x + step) - value(x - step) for step in steps]) / (2 * h)

            slopes = gradient(origin)
            matrix = torch.stack([gradient(origin + step) - gradient(origin - step) for step in steps]) / (2 * h)
        return loss, from_vector(slopes, self.params), 0.5 * (matrix + matrix.T)

    def derivatives(self, order: int, at_x0: bool = True, method: str = "autograd") -> tuple[Any, ...]:
        """Return the loss, the gradient vector, the Hessian and so on, as dense tensors over all parameters concatenated.

        Args:
            order: The highest order.
            at_x0: Whether the parameters are at the start of the step.
            method: "autograd" differentiates element by element, "batched_autograd" all elements at once.
        """
        _check("method", method, _METHODS[:2])
        if order == 0:
            return (self.get_loss(backward=False, at_x0=at_x0),)
        loss, grads = self.get_loss_grads(create_graph=True, at_x0=at_x0)
        with torch.enable_grad():
            out: list[Tensor] = [to_vector(grads)]
            for current_order in range(1, order):
                flat, more = out[-1].reshape(-1), current_order + 1 < order
                if method == "batched_autograd":
                    eye = torch.eye(flat.numel(), dtype=flat.dtype, device=flat.device)
                    derivatives = _differentiate([flat], self.params, [eye], len(flat), more)
                    rows = torch.cat([tensor.reshape(len(flat), -1) for tensor in derivatives], 1)
                else:
                    rows = torch.stack([to_vector(_differentiate([x], self.params, None, 0, more)) for x in flat])
                out.append(rows.reshape(*out[-1].shape, out[0].numel()))
        return (loss, out[0].detach(), *reduce_derivatives(self.reduce, [tensor.detach() for tensor in out[1:]]))

    def derivatives_at(self, x: Tensor | Sequence[Tensor], order: int, method: str = "autograd") -> tuple[Any, ...]:
        """Return `derivatives` at another point; the parameters are restored.

        Args:
            x: The point, as one vector or one tensor per parameter.
            order: The highest order.
            method: As in `derivatives`.
        """
        with self.moved():
            self.move_to(from_vector(x, self.params) if isinstance(x, Tensor) else x)
            return self.derivatives(order, False, method)

    def list_Hvp_function(
        self, hvp_method: str = "autograd", h: float = 1e-3, at_x0: bool = True
    ) -> tuple[list[Tensor] | None, Callable[[Sequence[Tensor]], list[Tensor]]]:
        """Return the gradient, if it was computed, and a function that multiplies lists of tensors by the Hessian.

        Args:
            hvp_method: As in `hessian_vector_product`.
            h: The length of the difference step.
            at_x0: Whether the parameters are at the start of the step.
        """
        grads: list[Tensor] | None = None
        if _check("hvp_method", hvp_method, _METHODS) != "fd_central":
            grads = self.get_grads(create_graph=hvp_method.endswith("autograd"), at_x0=at_x0)

        def product(z: Sequence[Tensor]) -> list[Tensor]:
            return self.hessian_vector_product(z, grads, at_x0, hvp_method, h)[0]

        return grads, product

    def tensor_Hvp_function(
        self, hvp_method: str = "autograd", h: float = 1e-3, at_x0: bool = True
    ) -> tuple[Tensor | None, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Return the gradient vector, if it was computed, and functions that multiply vectors and matrices by the Hessian.

        Args:
            hvp_method: As in `hessian_vector_product`.
            h: The length of the difference step.
            at_x0: Whether the parameters are at the start of the step.
        """
        grad, multiply_list = self.list_Hvp_function(hvp_method, h, at_x0)

        def multiply_vector(x: Tensor) -> Tensor:
            return to_vector(multiply_list(from_vector(x, self.params)))

        def multiply_matrix(X: Tensor) -> Tensor:
            return self.hessian_matrix_product(X, None, at_x0, hvp_method, h)[0]

        return (None if grad is None else to_vector(grad).detach()), multiply_vector, multiply_matrix
