"""Second derivatives of the objective: products with the Hessian, its diagonal, the Hessian, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from . import _dense_hessian
from ._needs import ClosureError
from ._processes import reduce_derivatives
from ._vectors import from_vector, sample_like, to_vector

if TYPE_CHECKING:
    from .objective import Objective


HvpMethod = Literal["autograd", "batched_autograd", "fd_forward", "fd_central"]
_METHODS = ("autograd", "batched_autograd", "fd_forward", "fd_central")


def _method(name: str) -> str:
    if name not in _METHODS:
        raise ValueError(f"hvp_method is {name!r}; it can be {', '.join(_METHODS)}")
    return name


def _differentiate(
    grads: Sequence[Tensor], params: Sequence[Tensor], z: Sequence[Tensor], retain: bool
) -> list[Tensor]:
    """Derivative of <g, z>; gradients that are constant (linear or unused parameters) contribute nothing."""
    live = [(g, v) for g, v in zip(grads, z, strict=True) if g.requires_grad]
    if not live:
        return [torch.zeros_like(p) for p in params]
    found = torch.autograd.grad(
        [g for g, _ in live],
        params,
        grad_outputs=[v for _, v in live],
        retain_graph=retain,
        allow_unused=True,
    )
    return [torch.zeros_like(p) if f is None else f.detach() for f, p in zip(found, params, strict=True)]


class Curvature:
    """The part of `Objective` that differentiates twice."""

    params: list[Tensor]

    def get_residuals(self) -> Tensor:
        """The vector of residuals that the closure returns, with its graph; the loss is half its squared norm."""
        me = cast("Objective", self)
        me.get_loss(True, retain_graph=True)
        if me._residuals is None:
            raise ClosureError(
                "a least-squares link needs a closure that returns the vector of residuals, "
                "but it returned one number; return prediction - target without summing"
            )
        return me._residuals

    def hessian_vector_product(
        self,
        z: Sequence[Tensor],
        rgrad: Sequence[Tensor] | None = None,
        at_x0: bool = True,
        hvp_method: str = "autograd",
        h: float = 1e-3,
        retain_graph: bool = False,
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        r"""$Hz$, and the gradient it was made from (hand it back for the next product).

        Args:
            z: The vector, one tensor per parameter.
            rgrad: The gradient returned by an earlier product at the same point.
            at_x0: Whether the parameters are at the start of the step.
            hvp_method: "autograd" differentiates the gradient; "fd_forward" and "fd_central" take differences of one
                and two gradients along z.
            h: The length of the difference step.
            retain_graph: Kept for compatibility; the graph stays while the objective does.
        """
        me = cast("Objective", self)
        if _method(hvp_method) in ("autograd", "batched_autograd"):
            grads = list(rgrad) if rgrad is not None else me.get_grads(create_graph=True, at_x0=at_x0)
            if rgrad is not None and at_x0 and me._graph is not None:
                grads = me._graph[1]
            found = _differentiate(grads, self.params, z, retain=True)
            return reduce_derivatives(me.reduce, found), grads
        return self._difference(z, rgrad, at_x0, hvp_method, h)

    def _difference(
        self, z: Sequence[Tensor], rgrad: Sequence[Tensor] | None, at_x0: bool, method: str, h: float
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        me = cast("Objective", self)
        norm = float(torch.sqrt(sum((v.detach().abs().double() ** 2).sum() for v in z)))  # type: ignore[arg-type]
        if norm == 0.0:
            return [torch.zeros_like(p) for p in self.params], None if rgrad is None else list(rgrad)
        unit = [v / norm for v in z]
        base: list[Tensor] | None = None if rgrad is None else list(rgrad)
        if method == "fd_forward" and base is None:
            base = [g.detach().clone() for g in me.get_grads(at_x0=at_x0)]
        with me.moved() as start:

            def gradient(step: float) -> list[Tensor]:
                with torch.no_grad():
                    for p, s, v in zip(self.params, start, unit, strict=True):
                        p.copy_(s + step * v)
                return [g.detach().clone() for g in me.get_loss_grads(at_x0=False)[1]]

            ahead = gradient(h)
            if base is not None and method == "fd_forward":
                product = [(a - b) * (norm / h) for a, b in zip(ahead, base, strict=True)]
            else:
                behind = gradient(-h)
                product = [(a - b) * (norm / (2 * h)) for a, b in zip(ahead, behind, strict=True)]
        return product, base

    def hessian_matrix_product(
        self,
        Z: Tensor,
        rgrad: Sequence[Tensor] | None = None,
        at_x0: bool = True,
        hvp_method: str = "batched_autograd",
        h: float = 1e-3,
        retain_graph: bool = False,
    ) -> tuple[Tensor, list[Tensor] | None]:
        r"""$HZ$ for the columns of a matrix over all parameters concatenated; one batched call where possible."""
        me = cast("Objective", self)
        if _method(hvp_method) == "batched_autograd":
            grads = me.get_grads(create_graph=True, at_x0=at_x0) if rgrad is None else list(rgrad)
            if rgrad is not None and at_x0 and me._graph is not None:
                grads = me._graph[1]
            live = [i for i, g in enumerate(grads) if g.requires_grad]
            if not live:
                return torch.zeros_like(Z), grads
            rows = [from_vector(column, self.params) for column in Z.unbind(1)]
            stacked = [torch.stack([row[i] for row in rows]) for i in live]
            found = torch.autograd.grad(
                [grads[i] for i in live],
                self.params,
                grad_outputs=stacked,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            k = Z.shape[1]
            columns = [
                torch.zeros(p.numel(), k, dtype=p.dtype, device=p.device)
                if f is None
                else f.detach().reshape(k, p.numel()).T
                for f, p in zip(found, self.params, strict=True)
            ]
            return reduce_derivatives(me.reduce, [torch.cat(columns)])[0], grads
        out, grad = [], None if rgrad is None else list(rgrad)
        for column in Z.unbind(1):
            product, grad = self.hessian_vector_product(
                from_vector(column, self.params), grad, at_x0=at_x0, hvp_method=hvp_method, h=h
            )
            out.append(to_vector(product))
        return (torch.stack(out, 1) if out else torch.zeros_like(Z)), grad

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
        r"""An unbiased estimate of the Hessian's diagonal, $\frac1k\sum_j z_j \odot H z_j$ (Hutchinson).

        Args:
            rgrad: A gradient returned by an earlier product.
            at_x0: Whether the parameters are at the start of the step.
            n_samples: How many vectors to draw; None where they are given.
            distribution: "rademacher", "normal", "uniform", "sphere", or the vectors themselves.
            hvp_method: As in `hessian_vector_product`; batched products draw as many vectors as any other.
            h: The length of the difference step.
            generator: Draws the vectors.
            variance: The variance of each component.
            zHz: False for the mean of $Hz$ itself.
            retain_graph: Kept for compatibility.
        """
        grad = None if rgrad is None else list(rgrad)
        if isinstance(distribution, str):
            if n_samples is None or n_samples < 1:
                raise ValueError(f"n_samples is {n_samples}; draw at least one vector")
            draws = [sample_like(self.params, distribution, variance, generator) for _ in range(n_samples)]
        else:
            draws = [list(z) for z in distribution]
        if _method(hvp_method) == "batched_autograd":
            Z = torch.stack([to_vector(z) for z in draws], 1)
            HZ, grad = self.hessian_matrix_product(Z, grad, at_x0, hvp_method, h)
            estimate = (Z * HZ if zHz else HZ).mean(1)
            return from_vector(estimate, self.params), grad
        total = [torch.zeros_like(p) for p in self.params]
        for z in draws:
            product, grad = self.hessian_vector_product(z, grad, at_x0, hvp_method, h)
            for t, v, p in zip(total, z, product, strict=True):
                t.add_(v * p if zHz else p)
        return [t / len(draws) for t in total], grad

    def hessian(
        self, hessian_method: str = "batched_autograd", h: float = 1e-3, at_x0: bool = True
    ) -> tuple[Tensor | None, list[Tensor] | None, Tensor]:
        """Loss, gradient and the dense Hessian over all parameters concatenated.

        Args:
            hessian_method: "batched_autograd", "autograd", "func", "functional_revrev", "functional_fwdrev" (exact);
                "gfd_forward", "gfd_central" (differences of gradients, error of order h and h^2); "fd" (differences of
                values, symmetric).
            h: The length of the difference step.
            at_x0: Whether the parameters are at the start of the step.
        """
        return _dense_hessian.hessian(cast("Objective", self), hessian_method, h, at_x0)

    def derivatives(self, order: int, at_x0: bool = True, method: str = "autograd") -> tuple[Any, ...]:
        """Loss, gradient vector, Hessian, third derivatives, ... as dense tensors over all parameters concatenated.

        Args:
            order: The highest.
            at_x0: Whether the parameters are at the start of the step.
            method: "autograd" differentiates element by element, "batched_autograd" all elements at once.
        """
        return _dense_hessian.derivatives(cast("Objective", self), order, at_x0, method)

    def derivatives_at(self, x: Tensor | Sequence[Tensor], order: int, method: str = "autograd") -> tuple[Any, ...]:
        """The same at another point, given as one vector or one tensor per parameter; the parameters are put back."""
        me = cast("Objective", self)
        with me.moved():
            me.move_to(from_vector(x, self.params) if isinstance(x, Tensor) else x)
            return _dense_hessian.derivatives(me, order, False, method)

    def list_Hvp_function(
        self, hvp_method: str = "autograd", h: float = 1e-3, at_x0: bool = True
    ) -> tuple[list[Tensor] | None, Callable[[Sequence[Tensor]], list[Tensor]]]:
        """The gradient (where known) and a function that multiplies lists of tensors by the Hessian."""
        me = cast("Objective", self)
        held: list[list[Tensor] | None] = [None]
        if _method(hvp_method) in ("autograd", "batched_autograd"):
            held[0] = me.get_grads(create_graph=True, at_x0=at_x0)
        elif hvp_method == "fd_forward":
            held[0] = [g.detach().clone() for g in me.get_grads(at_x0=at_x0)]

        def product(z: Sequence[Tensor]) -> list[Tensor]:
            out, held[0] = self.hessian_vector_product(z, held[0], at_x0, hvp_method, h)
            return out

        return held[0], product

    def tensor_Hvp_function(
        self, hvp_method: str = "autograd", h: float = 1e-3, at_x0: bool = True
    ) -> tuple[Tensor | None, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The gradient (where known), a function for vectors and one for matrices, over all parameters concatenated."""
        grad, of_list = self.list_Hvp_function(hvp_method, h, at_x0)

        def vector(x: Tensor) -> Tensor:
            return to_vector(of_list(from_vector(x, self.params)))

        def matrix(X: Tensor) -> Tensor:
            return self.hessian_matrix_product(X, None, at_x0, hvp_method, h)[0]

        return (None if grad is None else to_vector(grad).detach()), vector, matrix
