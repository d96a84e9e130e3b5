"""The fit of PSGD: a factor for each axis of a tensor, fitted to pairs. Shared by PSGDKronWhiten and PSGDKronNewton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._measures import read
from ._axes import covariance, merge_shape, multiply, work

# The longest step of a rotation towards a symmetric factor; it is second order, so the step must be small.
_ROTATION = 0.125


def begin(state: Any, tensor: Tensor, setting: Any) -> None:
    """Start the factors as multiples of the identity.

    Args:
        state: Where they are stored.
        tensor: The first update.
        setting: The settings, among them init_scale, max_dim and max_skew.
    """
    x = work(tensor)
    shape = merge_shape(tensor.shape, 0, merge=False) or (1,)
    state["shape"] = shape
    scale = setting["init_scale"]
    if scale is None:
        fourth = read(x.abs().double().pow(4).mean()) if x.numel() else 1.0
        scale = (fourth + setting["damping"] ** 4 + 1e-40) ** (-1 / 8)
    each = scale ** ((2 if setting["dQ"] == "QUAD4P" else 1) / len(shape))
    factors = []
    for size in shape:
        diagonal = size > setting["max_dim"] or size * size > setting["max_skew"] * x.numel()
        ones = torch.ones(size, dtype=x.dtype, device=x.device)
        factors.append(ones * each if diagonal else torch.diag(ones) * each)
    state["factors"] = factors
    state["products"] = _products(factors, setting["dQ"])
    state["lipschitz"] = [x.abs().new_zeros(()) for _ in shape]


def _products(factors: list[Tensor], geometry: str) -> list[Tensor]:
    """Return P = Q^H Q of each axis; cached, because it is used at every step and changes only when the factors are fitted."""
    if geometry == "QUAD4P":  # the factors are those of P itself
        return factors
    return [q.mH @ q if q.dim() == 2 else q.abs().square() for q in factors]


def _apply_factors(tensor: Tensor, factors: list[Tensor]) -> Tensor:
    """Return a tensor multiplied by each factor (a matrix, or a diagonal as a vector) along its axis."""
    matrices: list[Tensor | None] = [factor if factor.dim() == 2 else None for factor in factors]
    if any(matrix is not None for matrix in matrices):
        tensor = multiply(tensor, matrices)
    for axis, factor in enumerate(factors):
        if factor.dim() == 1:
            tensor = tensor * factor.reshape([-1 if other == axis else 1 for other in range(tensor.dim())])
    return tensor


def precondition(state: Any, tensor: Tensor) -> Tensor:
    """Return P times a tensor of the fitted shape."""
    return _apply_factors(tensor, state["products"])


def largest(matrix: Tensor) -> Tensor:
    """Return an estimate of the largest eigenvalue of a positive matrix: two steps of power iteration from its largest row."""
    start = matrix.index_select(0, torch.diagonal(matrix).real.argmax().reshape(1)).squeeze(0)
    x = matrix @ start.conj()
    x = matrix @ (x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(matrix.dtype).tiny))
    length: Tensor = torch.linalg.vector_norm(x)
    return length


def flip(chance: float, generator: torch.Generator | None) -> bool:
    """Return True with this probability; nothing is drawn for 0 and 1."""
    if chance >= 1 or chance <= 0:
        return chance >= 1
    return bool(torch.rand((), generator=generator) < chance)


def limit_amplitude(tensor: Tensor, limit: float) -> Tensor:
    """Return a tensor scaled down to a root mean square, if it has a larger one."""
    if limit == float("inf"):
        return tensor
    return tensor * (limit / tensor.abs().square().mean().sqrt().clamp(min=limit))


def _size(contracted: Tensor) -> Tensor:
    return contracted.amax() if contracted.dim() == 1 else largest(contracted)


def balance(state: Any, setting: Any) -> None:
    """Scale the factors to the same size; their product does not change."""
    factors = state["factors"]
    if len(factors) < 2:
        return
    sizes = torch.stack([factor.abs().amax() for factor in factors])
    mean = sizes.log().mean().exp()
    state["factors"] = [factor * (mean / size) for factor, size in zip(factors, sizes, strict=True)]
    state["products"] = _products(state["factors"], setting["dQ"])


def _contract(tensor: Tensor, axis: int, diagonal: bool) -> Tensor:
    """Return a tensor times itself along all axes but one; only the diagonal for diagonal factors."""
    if not diagonal:
        return covariance(tensor, axis)
    others = [other for other in range(tensor.dim()) if other != axis]
    squares = tensor.abs().square()
    return squares.sum(others) if others else squares


def fit(state: Any, h: Tensor, v: Tensor | None, setting: Any) -> None:
    r"""One step of the factors for a pair, so that E[h' P h + v' P^-1 v] falls.

    Args:
        state: Where the factors are.
        h: The update, or the Hessian times v, in the shape that is fitted.
        v: The vector; None for white noise, of which only the mean is used (not with "EQ").
        setting: The settings, among them lr_preconditioner, betaL and dQ.
    """
    factors, geometry = state["factors"], setting["dQ"]
    if geometry == "EQ":
        if v is None:
            raise ValueError("the geometry 'EQ' inverts its factors, so it needs the noise itself, not its mean")
        first = _apply_factors(h, factors)
        second: Tensor | None = _solve_factors(v, factors)
    else:
        first, second = precondition(state, h), v
    fitted = []
    for axis, q in enumerate(factors):
        diagonal = q.dim() == 1
        plus = _contract(first, axis, diagonal)
        tau = h.numel() / q.shape[0]
        minus = None if second is None else _contract(second, axis, diagonal)
        if geometry == "QEP":
            plus, minus = _transform_terms(q, plus, tau if minus is None else minus)
        ell = _size(plus) + (tau if minus is None else _size(minus))
        bound = state["lipschitz"][axis]
        bound.copy_(torch.maximum(setting["betaL"] * bound + (1 - setting["betaL"]) * ell, ell))
        rate = setting["lr_preconditioner"] / bound
        if diagonal:
            fitted.append(q * (1 - rate * (plus - (tau if minus is None else minus))))
        elif geometry == "Q0.5EQ1.5" and minus is None:
            # The mean of the noise is a multiple of the identity, so that it needs no product.
            fitted.append(_straighten(q * (1 + rate * tau) - rate * (plus @ q)))
        else:
            fitted.append(_move_factor(q, plus, tau if minus is None else minus, rate, geometry))
    state["factors"] = fitted
    state["products"] = _products(fitted, geometry)


def _transform_terms(q: Tensor, plus: Tensor, minus: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return both terms of the gradient in the geometry "QEP": multiplied from both sides by the factor.

    Args:
        q: The factor: a matrix, or a diagonal as a vector.
        plus: The term of the update.
        minus: The term of the noise; a number for a multiple of the identity.
    """
    if q.dim() == 1:
        square = q.abs().square()
        return plus * square, square * minus
    return q @ plus @ q.mH, q @ minus @ q.mH if isinstance(minus, Tensor) else (q @ q.mH) * minus


def _move_factor(q: Tensor, plus: Tensor, minus: Tensor | float, rate: Tensor, geometry: str) -> Tensor:
    """Return a factor after a step in one of the local coordinates."""
    change = plus.clone()
    if isinstance(minus, Tensor):
        change -= minus
    else:
        change.diagonal().sub_(minus)
    if geometry == "QEQ":
        return q - rate * (q @ change)
    if geometry in ("QUAD", "QUAD4P"):
        # Two half steps, one from each side, keep a factor positive definite.
        half = change * (-0.5 * rate)
        half.diagonal().add_(1.0)
        moved = half @ q @ half
        return (moved + moved.mH) / 2
    if geometry == "EQ":
        return q - rate * (torch.triu(change) @ q)
    moved = q - rate * (change @ q)
    return _straighten(moved) if geometry == "Q0.5EQ1.5" else moved


def _solve_factors(tensor: Tensor, factors: list[Tensor]) -> Tensor:
    """Return a tensor multiplied by the inverse adjoint of each factor along its axis."""
    for axis, q in enumerate(factors):
        if q.dim() == 1:
            tensor = tensor / q.reshape([-1 if other == axis else 1 for other in range(tensor.dim())])
            continue
        moved = tensor.movedim(axis, 0)
        solved = torch.linalg.solve(q.mH, moved.reshape(q.shape[0], -1))
        tensor = solved.reshape(moved.shape).movedim(0, axis)
    return tensor


def _straighten(q: Tensor) -> Tensor:
    """Rotate a factor slightly towards a symmetric one: a step of the orthogonal Procrustes problem."""
    skew = q.mH - q
    size = torch.linalg.matrix_norm(skew) / 2**0.5
    skew = skew / size.clamp(min=torch.finfo(q.dtype).tiny)
    turned = skew @ q
    first = torch.diagonal(turned).real.sum()
    second = -(skew.conj() * turned).real.sum()  # the trace of skew @ skew @ q
    limit = torch.full_like(first, _ROTATION)
    step = torch.where(second < 0, torch.minimum(-first / second, limit), limit)
    step = torch.where((first > 0) & (size > 0), step, torch.zeros_like(step))
    out: Tensor = q + step * (turned + (0.5 * step) * (skew @ turned))
    return out
