"""Truncated conjugate gradients within a trust region."""

import math

import torch
from torch import Tensor

from ._arguments import Callback, finite, finite_number, inner, limit, norm, symmetric_operator, tolerance
from ._operator import LinearOperator
from ._outcome import Outcome
from ._trust_step import TrustRegionStep


def steihaug(
    H: LinearOperator | Tensor,
    g: Tensor,
    radius: float,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    callback: Callback | None = None,
) -> TrustRegionStep:
    """Minimise gᴴ p + ½ pᴴ H p approximately subject to ‖p‖ ≤ radius, by truncated conjugate gradients.

    H may be indefinite. The iterates of conjugate gradients started at zero grow in norm; the first one that would leave
    the region is cut at its boundary, and a direction of negative curvature is followed to it. The decrease is at least
    that of the Cauchy point, and at least half of the best possible if H is positive definite.

    Args:
        H: A symmetric (Hermitian) operator, or a matrix that is taken to be.
        g: The gradient, (n,).
        radius: The radius of the trust region; positive, may be infinite.
        rtol: Stop inside when ‖H p + g‖ ≤ max(rtol ‖g‖, atol); by default eps^(2/3) of the dtype.
        atol: See `rtol`.
        maxiter: The limit on iterations, 10 n by default.
        callback: Called with (iteration, iterate, residual norm); a true result ends the iteration.

    Returns:
        A `TrustRegionStep` that ended in `INTERIOR`, `BOUNDARY`, `NEGATIVE_CURVATURE`, `MAXITER` or `STOPPED`. With an
        infinite radius, negative curvature ends at the last iterate, or at -g if there is none.

    Raises:
        TypeError: If H is not declared symmetric, or dtypes differ.
        ValueError: If the radius is not positive, shapes differ, or g or a product is not finite.

    Example:
        >>> import torch
        >>> from moduli.linalg import steihaug
        >>> found = steihaug(torch.diag(torch.tensor([1.0, -1.0])), torch.tensor([0.0, 1.0]), radius=2.0)
        >>> found.step, found.predicted_decrease
        (tensor([ 0., -2.]), 4.0)
        >>> print(found.outcome)
        The operator is not positive definite; a direction of negative or zero curvature was found.

    References:
        Steihaug, The conjugate gradient method and trust regions in large scale optimization, SIAM J. Numer. Anal. 20
        (1983) 626-637; Toint (1981); Nocedal and Wright, Numerical Optimization, 2nd ed., algorithm 7.2.
    """
    operator = symmetric_operator(H, "steihaug")
    n = operator.shape[-1]
    finite(operator, g, n, "g")
    radius = check_radius(radius, "steihaug")
    reached = norm(g)
    tol = tolerance(g.dtype, reached, rtol, atol)
    last = limit(maxiter, 10 * n)
    z = torch.zeros_like(g)
    if reached <= tol:
        return TrustRegionStep(z, Outcome.INTERIOR, 0.0, 0, reached, 0.0)
    # The recurrence runs on g / ‖g‖, so that the squares of tiny or huge gradients stay numbers.
    unit, radius, tol = reached, radius / reached, tol / reached
    g = r = g / unit

    def end_at(p: Tensor, r: Tensor, outcome: Outcome, k: int) -> TrustRegionStep:
        # H p = r - g, hence gᴴ p + ½ pᴴ H p = ½ (g + r)ᴴ p: the model's value costs no further product.
        return TrustRegionStep(unit * p, outcome, -0.5 * inner(g + r, p) * unit * unit, k, norm(r) * unit)

    d = -g
    rr = 1.0  # ‖r‖², in units of ‖g‖²
    for k in range(1, last + 1):
        Hd = operator.matvec(d)
        curvature = finite_number(inner(d, Hd), operator, "steihaug", k)
        if curvature <= 0:
            if math.isinf(radius):
                # -g itself: the recurrence's direction is the unit vector along it.
                z, r = (d, r + Hd) if k == 1 else (z, r)
                return end_at(z, r, Outcome.NEGATIVE_CURVATURE, k)
            tau = _to_boundary(z, d, radius)
            return end_at(_pull_inside(z + tau * d, radius), r + tau * Hd, Outcome.NEGATIVE_CURVATURE, k)
        alpha = rr / curvature
        beyond = torch.add(z, d, alpha=alpha)
        if norm(beyond) >= radius:
            tau = _to_boundary(z, d, radius)
            return end_at(_pull_inside(z + tau * d, radius), r + tau * Hd, Outcome.BOUNDARY, k)
        z, r = beyond, torch.add(r, Hd, alpha=alpha)
        reached = norm(r)
        stop = callback is not None and callback(k, unit * z, reached * unit)
        if reached <= tol:
            return end_at(z, r, Outcome.INTERIOR, k)
        if stop:
            return end_at(z, r, Outcome.STOPPED, k)
        rr_next = reached * reached
        d = torch.sub((rr_next / rr) * d, r)
        rr = rr_next
    return end_at(z, r, Outcome.MAXITER, last)


def check_radius(radius: float, solver: str) -> float:
    """The radius as a number, if it is one and positive."""
    value = float(radius)
    if not value > 0:
        raise ValueError(f"{solver}: the radius of a trust region is positive, not {value}")
    return value


def _to_boundary(z: Tensor, d: Tensor, radius: float) -> float:
    """The τ ≥ 0 with ‖z + τ d‖ = radius, without cancellation for either sign of zᴴ d."""
    length = norm(d)
    unit = d / length
    along, room = inner(z, unit), max((radius - norm(z)) * (radius + norm(z)), 0.0)
    root = math.sqrt(along * along + room)
    return (room / (along + root) if along > 0 else root - along) / length


def _pull_inside(p: Tensor, radius: float) -> Tensor:
    """The step, pulled back by the last bits by which rounding may have put it outside."""
    length = norm(p)
    return p * (radius / length) if length > radius else p
