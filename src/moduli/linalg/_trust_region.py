"""The trust-region problem: by truncated conjugate gradients, and to working precision."""

import math

import torch
from torch import Tensor

from ._checks import Callback, finite_number, inner, norm, prepare
from ._lowrank import Eigendecomposition
from ._operator import LinearOperator
from ._results import Outcome, TrustRegionStep

_ROUNDS = 200


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
    operator, _, reached, tol, last = prepare(H, g, "g", "steihaug", rtol, atol, maxiter)
    radius = _check_radius(radius, "steihaug")
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


def trust_exact(H: LinearOperator | Tensor, g: Tensor, radius: float) -> TrustRegionStep:
    """Minimise gᴴ p + ½ pᴴ H p subject to ‖p‖ ≤ radius, to working precision.

    p is the solution if and only if there is a λ ≥ 0 with (H + λ I) p = -g, H + λ I positive semidefinite, and
    λ (radius - ‖p‖) = 0 (Nocedal and Wright, theorem 4.1, (4.8)). From the eigenvalues of H, λ is found by Newton's method on
    1 / ‖p(λ)‖ = 1 / radius, which is nearly linear in λ. In the hard case g has no part along the lowest eigenvectors,
    and one of them is added to reach the boundary.

    Args:
        H: A symmetric (Hermitian) operator, or a matrix that is taken to be. It is decomposed at every call, in O(n³),
            unless it is an `Eigendecomposition` of all n vectors: pass that to try several radii.
        g: The gradient, (n,).
        radius: The radius of the trust region; positive and finite.

    Returns:
        A `TrustRegionStep` that ended in `INTERIOR`, `BOUNDARY` or `HARD_CASE`, with its multiplier λ.

    Raises:
        TypeError: If H is not declared symmetric, or dtypes differ.
        MissingAbilityError: If H is matrix-free; `steihaug` takes those.
        ValueError: If the radius is not positive and finite, shapes differ, or H or g is not finite.

    Example:
        >>> import torch
        >>> from moduli.linalg import trust_exact
        >>> found = trust_exact(torch.diag(torch.tensor([1.0, -2.0])), torch.tensor([3.0, 0.0]), radius=2.0)
        >>> found.step.abs(), found.multiplier, found.outcome.name
        (tensor([1.0000, 1.7321]), 2.0, 'HARD_CASE')

    References:
        Moré and Sorensen, Computing a trust region step, SIAM J. Sci. Stat. Comput. 4 (1983) 553-572; Nocedal and Wright,
        Numerical Optimization, 2nd ed., section 4.3.
    """
    operator, n, size, _, _ = prepare(H, g, "g", "trust_exact", None, 0.0, None)
    radius = _check_radius(radius, "trust_exact")
    if math.isinf(radius):
        raise ValueError("trust_exact: the radius is infinite; without a region use solve, or steihaug")
    if n == 0:
        return TrustRegionStep(torch.zeros_like(g), Outcome.INTERIOR, 0.0, 0, 0.0, 0.0)
    decomposition = _decompose(operator, n)
    values, vectors = decomposition.values, decomposition.vectors
    parts = vectors.mH @ g
    eps = torch.finfo(values.dtype).eps
    spread = n * eps * max(float(values.abs().max()), torch.finfo(values.dtype).tiny)
    low = float(values.min())
    # A part of g that rounding alone could have made is none: the hard case is a statement about exact zeros.
    parts = torch.where(parts.abs() <= n * eps * size, torch.zeros_like(parts), parts)
    # Lengths are searched for in units of ‖g‖, so that squares stay numbers.
    unit = size or 1.0
    weights, target = parts.abs().to(torch.float64) / unit, radius / unit
    lifted = (values - low).to(torch.float64)  # eigenvalues of H - low I: λ + low = mu is what is searched for
    lowest = lifted <= spread
    lifted = torch.where(lowest, torch.zeros_like(lifted), lifted)
    share = norm(weights[lowest])

    def below(mu: float) -> Tensor:
        """The eigenvalues of H + (mu - low) I; directions without a part of g have no part of p either."""
        return torch.where(weights == 0, torch.ones_like(lifted), lifted + mu)

    def length(mu: float) -> float:
        """‖p‖ / ‖g‖ for (H + (mu - low) I) p = -g."""
        return norm(weights / below(mu))

    def step(mu: float, along: float = 0.0) -> Tensor:
        coefficients = -parts / below(mu).to(values.dtype)
        coefficients[int(values.argmin())] += along
        return vectors @ coefficients

    def end_at(p: Tensor, outcome: Outcome, rounds: int, multiplier: float) -> TrustRegionStep:
        p = _pull_inside(p, radius)
        image = vectors @ (values * (vectors.mH @ p))
        decrease = -inner(g, p) - 0.5 * inner(p, image)
        return TrustRegionStep(p, outcome, decrease, rounds, norm(image + multiplier * p + g), multiplier)

    # Inside: H positive semidefinite (its null space free of g) and the shortest minimiser short enough
    free = low > spread or (low >= -spread and share == 0)
    if free and length(max(low, 0.0)) <= target:
        return end_at(step(max(low, 0.0)), Outcome.INTERIOR, 0, 0.0)
    if share == 0 and low <= spread and (short := length(0.0)) <= target:
        # Hard case (Nocedal and Wright, section 4.3): an eigenvector z, times tau, fills what is left of the radius
        along = unit * math.sqrt((target - short) * (target + short))
        return end_at(step(0.0, along), Outcome.HARD_CASE, 0, max(-low, 0.0))
    mu = max(low, 0.0, share / target)  # λ ≥ 0; here ‖p‖ ≥ radius, from where Newton's method is monotone
    for rounds in range(1, _ROUNDS + 1):  # noqa: B007 - the count is returned
        far = length(mu)
        if abs(far - target) <= 4 * eps * target:
            break
        # -½ d‖p‖²/dmu / ‖p‖²: of a direction, since cubes of mu leave the range of numbers where the radius is small.
        slope = float(((weights / below(mu) / far) ** 2 / below(mu)).sum())
        # Newton on 1/‖p‖ - 1/radius (Nocedal and Wright, algorithm 4.3)
        following = mu + (far / target - 1) / slope
        if not following > mu:
            break
        mu = following
    return end_at(step(mu), Outcome.BOUNDARY, rounds, max(mu - low, 0.0))


def _decompose(operator: LinearOperator, n: int) -> Eigendecomposition:
    """Return the operator with all its n eigenvectors; raise an error if it is matrix-free or not finite."""
    if isinstance(operator, Eigendecomposition) and operator.values.shape[-1] == n:
        return operator
    if operator.is_matrix_free:
        operator._dense_for("solve the trust-region problem exactly")
    dense = operator.to_dense()
    if not bool(torch.isfinite(dense).all()):
        raise ValueError(f"trust_exact: {operator} has non-finite entries")
    return Eigendecomposition.of(dense)


def _check_radius(radius: float, solver: str) -> float:
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
