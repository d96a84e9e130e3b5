"""The minimum residual method."""

import math

import torch
from torch import Tensor

from ._checks import Callback, finite_number, inner, norm, prepare, tolerance
from ._operator import LinearOperator
from ._results import LinearSolution, Outcome


def minres(
    A: LinearOperator | Tensor,
    b: Tensor,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    stop_at_negative_curvature: bool = False,
    callback: Callback | None = None,
) -> LinearSolution:
    """Solve A x = b for a symmetric A of any signature, by the method of minimal residuals.

    The iterate minimises ‖b - A x‖ over the Krylov space, so the residual never grows. The system may be indefinite. If
    it is singular and has no solution, the iteration ends in `LEAST_SQUARES`, with Aᴴ (b - A x) = 0.

    The residual r = b - A x of every iterate also tells the curvature rᴴ A r, at no cost: asked to, the method ends with
    the first residual that has rᴴ A r ≤ 0, and returns it as the direction.

    Args:
        A: A symmetric (Hermitian) operator, or a matrix that is taken to be.
        b: The right-hand side, (n,).
        rtol: Stop when ‖b - A x‖ ≤ max(rtol ‖b‖, atol), or when ‖A r‖ ≤ rtol ‖A‖ ‖r‖; by default eps^(2/3) of the dtype.
        atol: See `rtol`.
        maxiter: The limit on iterations, 10 n by default.
        stop_at_negative_curvature: Whether to end with a direction of negative or zero curvature.
        callback: Called with (iteration, iterate, residual norm); a true result ends the iteration.

    Returns:
        A `LinearSolution` that ended in `CONVERGED`, `LEAST_SQUARES`, `NEGATIVE_CURVATURE`, `MAXITER` or `STOPPED`.

    Raises:
        TypeError: If A is not declared symmetric, or dtypes differ.
        ValueError: If shapes differ, or b or a product is not finite.

    Example:
        >>> import torch
        >>> from moduli.linalg import minres
        >>> minres(torch.diag(torch.tensor([2.0, -4.0])), torch.ones(2)).x
        tensor([ 0.5000, -0.2500])

    References:
        Paige and Saunders, Solution of sparse indefinite systems of linear equations, SIAM J. Numer. Anal. 12 (1975)
        617-629, sections 5 and 6; the curvature test is that of Liu and Roosta, MINRES: from negative curvature
        detection to monotonicity properties, SIAM J. Optim. 32 (2022) 2636-2661.
    """
    operator, n, beta, tol, last = prepare(A, b, "b", "minres", rtol, atol, maxiter)
    relative = tolerance(b.dtype, 1.0, rtol, 0.0)
    eps = torch.finfo(b.dtype).eps
    x = torch.zeros_like(b)
    if beta <= tol:
        return LinearSolution(x, Outcome.CONVERGED, 0, beta)
    r = b
    v_old, v = torch.zeros_like(b), b / beta
    d_old, d = torch.zeros_like(b), torch.zeros_like(b)
    # The last rotation (c, s), the remaining right-hand side phi = ‖r‖, and what it left of the next column of T.
    c, s, phi, delta, epsilon, size = -1.0, 0.0, beta, 0.0, 0.0, 0.0
    step = 0.0
    for k in range(1, last + 1):
        # Lanczos: A v = step v_old + alpha v + step_next v_next (Paige and Saunders, section 2)
        w = operator.matvec(v)
        if k > 1:
            w = w - step * v_old
        alpha = inner(v, w)
        w = w - alpha * v
        step = finite_number(norm(w), operator, "minres", k)
        size = max(size, math.hypot(alpha, step))
        # The previous rotation applied to the new column; then the next one makes it triangular (section 5)
        upper = c * delta + s * alpha
        gamma = s * delta - c * alpha
        above, epsilon = epsilon, s * step
        delta = -c * step
        if stop_at_negative_curvature and c * gamma >= 0:  # rᴴ A r = -c gamma phi² (Liu and Roosta)
            return LinearSolution(x, Outcome.NEGATIVE_CURVATURE, k, phi, r)
        # ‖A r‖ = phi ‖(gamma, delta)‖: the residual is orthogonal to the range
        if math.hypot(gamma, delta) <= max(relative, n * eps) * size:
            return LinearSolution(x, Outcome.LEAST_SQUARES, k, phi)
        pivot = math.hypot(gamma, step)
        c, s = gamma / pivot, step / pivot
        tau, phi = c * phi, s * phi
        d_old, d = d, (v - upper * d - above * d_old) / pivot  # section 6
        x = x + tau * d
        invariant = step <= n * eps * size
        v_old, v = v, torch.zeros_like(w) if invariant else w / step
        if stop_at_negative_curvature:
            r = s * s * r - (phi * c) * v
        stop = callback is not None and callback(k, x, phi)
        if phi <= tol:
            return LinearSolution(x, Outcome.CONVERGED, k, phi)
        if invariant:
            return LinearSolution(x, Outcome.LEAST_SQUARES, k, phi)
        if stop:
            return LinearSolution(x, Outcome.STOPPED, k, phi)
    return LinearSolution(x, Outcome.MAXITER, last, phi)
