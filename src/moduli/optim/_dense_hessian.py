"""The dense Hessian of an objective and higher derivatives, exactly or by differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._processes import reduce_derivatives
from ._vectors import from_vector, to_vector

if TYPE_CHECKING:
    from .objective import Objective


HESSIAN_METHODS = (
    "batched_autograd",
    "autograd",
    "func",
    "functional_revrev",
    "functional_fwdrev",
    "gfd_forward",
    "gfd_central",
    "fd",
    "fd_full",
)
"""How a dense Hessian may be asked for: the values of `hessian_method`."""


def hessian(
    objective: Objective, method: str, h: float, at_x0: bool
) -> tuple[Tensor | None, list[Tensor] | None, Tensor]:
    """(loss, gradient, Hessian)."""
    if method not in HESSIAN_METHODS:
        raise ValueError(f"hessian_method is {method!r}; it can be {', '.join(HESSIAN_METHODS)}")
    if method in ("gfd_forward", "gfd_central"):
        return _difference_gradients(objective, method, h, at_x0)
    if method in ("fd", "fd_full"):
        return _difference_values(objective, h, at_x0)
    loss, grads = objective.get_loss_grads(create_graph=True, at_x0=at_x0)
    if method in ("autograd", "functional_revrev"):
        matrix = reduce_derivatives(objective.reduce, [_differentiate_rows(grads, objective.params)])[0]
    else:
        # One batched reverse pass; the forms of torch.func differentiate the same graph in the same way.
        size = sum(p.numel() for p in objective.params)
        eye = torch.eye(size, dtype=objective.params[0].dtype, device=objective.params[0].device)
        matrix = objective.hessian_matrix_product(eye, grads, at_x0, "batched_autograd")[0]
    return loss, [g.detach() for g in grads], matrix.detach()


def _differentiate_rows(grads: list[Tensor], params: list[Tensor]) -> Tensor:
    rows = []
    with torch.enable_grad():  # the elements must stay part of the graph
        flat = to_vector(grads)
        elements = flat.unbind(0)
    for element in elements:
        if not element.requires_grad:
            rows.append(torch.zeros_like(flat))
            continue
        found = torch.autograd.grad(element, params, retain_graph=True, allow_unused=True)
        rows.append(to_vector([torch.zeros_like(p) if f is None else f for f, p in zip(found, params, strict=True)]))
    return torch.stack(rows).detach() if rows else torch.zeros(0, 0, dtype=flat.dtype, device=flat.device)


def _difference_gradients(
    objective: Objective, method: str, h: float, at_x0: bool
) -> tuple[Tensor | None, list[Tensor] | None, Tensor]:
    loss: Tensor | None = None
    base: list[Tensor] | None = None
    if method == "gfd_forward":
        loss, found = objective.get_loss_grads(at_x0=at_x0)
        base = [g.detach().clone() for g in found]
    with objective.moved() as start:
        origin = to_vector(start)

        def gradient(x: Tensor) -> Tensor:
            with torch.no_grad():
                for p, v in zip(objective.params, from_vector(x, objective.params), strict=True):
                    p.copy_(v)
            return to_vector(objective.get_loss_grads(at_x0=False)[1]).detach().clone()

        columns = []
        for i in range(origin.numel()):
            step = torch.zeros_like(origin)
            step[i] = h
            if base is not None:
                columns.append((gradient(origin + step) - to_vector(base)) / h)
            else:
                columns.append((gradient(origin + step) - gradient(origin - step)) / (2 * h))
    matrix = torch.stack(columns, 1)
    return loss, base, 0.5 * (matrix + matrix.T)


def _difference_values(
    objective: Objective, h: float, at_x0: bool
) -> tuple[Tensor | None, list[Tensor] | None, Tensor]:
    """Central differences: f at +-h along each axis, and at the four corners of each pair of axes."""
    loss = objective.get_loss(backward=False, at_x0=at_x0)
    with objective.moved() as start:
        origin = to_vector(start)
        n = origin.numel()

        def value(*moves: tuple[int, float]) -> Tensor:
            x = origin.clone()
            for i, step in moves:
                x[i] += step
            with torch.no_grad():
                for p, v in zip(objective.params, from_vector(x, objective.params), strict=True):
                    p.copy_(v)
            return objective.get_loss(backward=False, at_x0=False)

        matrix = torch.zeros(n, n, dtype=origin.dtype, device=origin.device)
        gradient = torch.zeros_like(origin)
        for i in range(n):
            ahead, behind = value((i, h)), value((i, -h))
            gradient[i] = (ahead - behind) / (2 * h)
            matrix[i, i] = (ahead - 2 * loss + behind) / h**2
            for j in range(i):
                corner = (
                    value((i, h), (j, h)) - value((i, h), (j, -h)) - value((i, -h), (j, h)) + value((i, -h), (j, -h))
                )
                matrix[i, j] = matrix[j, i] = corner / (4 * h**2)
    return loss, from_vector(gradient, objective.params), matrix


def derivatives(objective: Objective, order: int, at_x0: bool, method: str) -> tuple[Any, ...]:
    """(loss, gradient, Hessian, ...) up to this order."""
    if order < 0:
        raise ValueError(f"order is {order}; it starts at 0, the loss itself")
    if method not in ("autograd", "batched_autograd"):
        raise ValueError(f"method is {method!r}; it can be 'autograd' or 'batched_autograd'")
    if order == 0:
        return (objective.get_loss(backward=False, at_x0=at_x0),)
    loss, grads = objective.get_loss_grads(create_graph=True, at_x0=at_x0)
    with torch.enable_grad():
        out: list[Tensor] = [to_vector(grads)]
        for _ in range(order - 1):
            flat = out[-1].reshape(-1)
            rows = (
                _differentiate_batched(flat, objective.params)
                if method == "batched_autograd"
                else _one_by_one(flat, objective.params)
            )
            out.append(rows.reshape(*out[-1].shape, out[0].numel()))
    return (loss, out[0].detach(), *reduce_derivatives(objective.reduce, [tensor.detach() for tensor in out[1:]]))


def _row(found: Sequence[Tensor | None], params: Sequence[Tensor], batch: tuple[int, ...]) -> Tensor:
    """Derivatives by each parameter as one vector (or several); where there are none, zeros."""
    pieces = [
        torch.zeros(*batch, p.numel(), dtype=p.dtype, device=p.device) if f is None else f.reshape(*batch, p.numel())
        for f, p in zip(found, params, strict=True)
    ]
    return torch.cat(pieces, -1)


def _one_by_one(flat: Tensor, params: Sequence[Tensor]) -> Tensor:
    rows = []
    for element in flat:
        live = element.requires_grad
        found = (
            torch.autograd.grad(element, params, create_graph=True, allow_unused=True) if live else [None] * len(params)
        )
        rows.append(_row(found, params, ()))
    return torch.stack(rows)


def _differentiate_batched(flat: Tensor, params: Sequence[Tensor]) -> Tensor:
    size = (flat.numel(),)
    if not flat.requires_grad:
        return _row([None] * len(params), params, size)
    eye = torch.eye(flat.numel(), dtype=flat.dtype, device=flat.device)
    found = torch.autograd.grad(flat, params, eye, create_graph=True, allow_unused=True, is_grads_batched=True)
    return _row(found, params, size)
