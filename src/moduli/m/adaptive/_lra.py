"""The fit of PSGD with a factor of low rank, fitted to pairs. Shared by PSGDLRAWhiten and PSGDLRANewton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._measures import read


def begin(state: Any, h: Tensor, setting: Any, generator: torch.Generator | None) -> None:
    """Start from a multiple of the identity plus a small random matrix of low rank.

    Args:
        state: Where they are stored.
        h: The first update.
        setting: The settings: rank, init_scale and damping.
        generator: Draws the random matrix.
    """
    n = h.numel()
    rank = min(int(setting["rank"]), max(n, 1))
    scale = setting["init_scale"]
    if scale is None:
        fourth = read(h.double().pow(4).mean()) if n else 1.0
        scale = (fourth + setting["damping"] ** 4 + 1e-40) ** (-1 / 8)
    draw = torch.randn(2, n, rank, dtype=h.dtype, device=h.device, generator=generator)
    # Columns are stored separately, since of a square matrix it is unknown which axis is the parameters.
    draw *= 0.1 / max(n * rank, 1) ** 0.5
    state["U"], state["V"] = list(draw[0].unbind(1)), list(draw[1].unbind(1))
    state["d"] = torch.ones_like(h) * scale
    state["lipschitz"] = [torch.zeros((), dtype=h.dtype, device=h.device) for _ in range(3)]


def precondition(state: Any, x: Tensor) -> Tensor:
    """Return P x with P = Q'Q and Q = (I + UV') diag(d)."""
    U, V, d = torch.stack(state["U"], 1), torch.stack(state["V"], 1), state["d"]
    return _adjoint(U, V, d, _product(U, V, d, x))


def _product(U: Tensor, V: Tensor, d: Tensor, x: Tensor) -> Tensor:
    scaled = d * x
    return scaled + U @ (V.mT @ scaled)


def _adjoint(U: Tensor, V: Tensor, d: Tensor, x: Tensor) -> Tensor:
    return d * (x + V @ (U.mT @ x))


def _solve_low_rank(U: Tensor, V: Tensor, x: Tensor) -> Tensor:
    """Return (I + UV')^-1 x by a small system."""
    small = V.mT @ U
    small.diagonal().add_(1.0)
    return x - U @ torch.linalg.solve(small, V.mT @ x)


def fit(state: Any, h: Tensor, v: Tensor, first: bool, setting: Any) -> None:
    """One step of U (or of V) and of d for a pair, so that E[h'Ph + v'P^-1v] falls.

    Each is a step of the gradient in a group: Q moves to (I + ZV') Q or (I + UZ') Q, and d to (1 + e) d.

    Args:
        state: Where the factors are.
        h: The update, or the Hessian times v.
        v: The vector.
        first: Whether U moves; else V.
        setting: The settings, among them lr_preconditioner and betaL.
    """
    U, V, d = torch.stack(state["U"], 1), torch.stack(state["V"], 1), state["d"]
    a = _product(U, V, d, h)
    b = _solve_low_rank(V, U, v / d)  # Q^-T v
    ph = _adjoint(U, V, d, a) * h
    pv = _solve_low_rank(U, V, b) / d * v
    rate = _rate(state, 2, ph.abs().amax() + pv.abs().amax(), setting)
    fixed = V if first else U
    at, bt = fixed.mT @ a, fixed.mT @ b
    norm = torch.linalg.vector_norm
    ell = norm(a) * norm(fixed @ at) + norm(b) * norm(fixed @ bt)
    turn = _rate(state, 0 if first else 1, ell, setting)
    if first:
        small = V.mT @ U
        small.diagonal().add_(1.0)
        U = U - turn * (torch.outer(a, at @ small) - torch.outer(b, bt @ small))
    else:
        V = V - turn * (torch.outer(a + V @ (U.mT @ a), at) - torch.outer(b + V @ (U.mT @ b), bt))
    # The same product with U and V of one size.
    even = (norm(V) / norm(U).clamp(min=torch.finfo(U.dtype).tiny)) ** 0.5
    even = torch.where(even > 0, even, torch.ones_like(even))
    state["U"], state["V"] = list((U * even).unbind(1)), list((V / even).unbind(1))
    state["d"] = d * (1 - rate * (ph - pv))


def _rate(state: Any, which: int, ell: Tensor, setting: Any) -> Tensor:
    """Return the step, by a bound on the curvature that rises at once and falls slowly."""
    bound = state["lipschitz"][which]
    bound.copy_(torch.maximum(setting["betaL"] * bound + (1 - setting["betaL"]) * ell, ell))
    out: Tensor = setting["lr_preconditioner"] / bound.clamp(min=torch.finfo(bound.dtype).tiny)
    return out
