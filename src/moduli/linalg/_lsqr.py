"""Least squares from products with an operator and its adjoint."""

import math

import torch
from torch import Tensor

from ._checks import Callback, finite, finite_number, limit, norm, single, tolerance
from ._operator import LinearOperator
from ._results import LinearSolution, Outcome


def lsqr(
    A: LinearOperator | Tensor,
    b: Tensor,
    *,
    damp: float = 0.0,
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    callback: Callback | None = None,
) -> LinearSolution:
    """Minimise ‖A x - b‖² + damp² ‖x‖² for an A of any shape, from products with A and Aᴴ.

    It is conjugate gradients on the normal equations in exact arithmetic, with the accuracy of an orthogonal method: the
    matrix Aᴴ A never appears. This is the matrix-free Gauss-Newton step, and with damp = √λ the Levenberg-Marquardt step.
    Among many solutions it finds the shortest.

    Args:
        A: An operator of shape (m, n) with adjoint products, or a matrix.
        b: The right-hand side, (m,).
        damp: The weight of ‖x‖.
        rtol: Stop when ‖r‖ ≤ max(rtol ‖b‖, atol), or when ‖Aᴴ r‖ ≤ rtol ‖A‖ ‖r‖; by default eps^(2/3) of the dtype.
        atol: See `rtol`.
        maxiter: The limit on iterations, 10 max(m, n) by default.
        callback: Called with (iteration, iterate, residual norm); a true result ends the iteration.

    Returns:
        A `LinearSolution` that ended in `CONVERGED` (the residual vanishes), `LEAST_SQUARES`, `MAXITER` or `STOPPED`. Its
        residual norm is that of (b - A x, damp x).

    Raises:
        TypeError: If A is no operator or matrix, or dtypes differ.
        MissingAbilityError: If A has no adjoint products.
        ValueError: If shapes differ, `damp` is negative, or b or a product is not finite.

    Example:
        >>> import torch
        >>> from moduli.linalg import lsqr
        >>> found = lsqr(torch.tensor([[1.0], [1.0]]), torch.tensor([1.0, 3.0]))
        >>> found.x.round(decimals=3), found.outcome.name, round(found.residual_norm, 4)
        (tensor([2.]), 'LEAST_SQUARES', 1.4142)

    References:
        Paige and Saunders, LSQR: an algorithm for sparse linear equations and sparse least squares, ACM Trans. Math.
        Software 8 (1982) 43-71, sections 3 to 5; damping as in their LSQR for damped least squares, 8 (1982) 195-209.
    """
    operator = single(A, "lsqr")
    m, n = operator.shape
    finite(operator, b, m, "b")
    if not (math.isfinite(damp) and damp >= 0):
        raise ValueError(f"lsqr: damp is a finite number that is not negative, not {damp}")
    beta = norm(b)
    tol = tolerance(b.dtype, beta, rtol, atol)
    relative = max(tolerance(b.dtype, 1.0, rtol, 0.0), torch.finfo(b.dtype).eps)
    last = limit(maxiter, max(m, n))
    x = torch.zeros(n, dtype=b.dtype, device=b.device)
    if beta <= tol:
        return LinearSolution(x, Outcome.CONVERGED, 0, beta)
    # Bidiagonalisation (section 3): beta u = b, alpha v = Aᴴ u
    u = b / beta
    v = operator.rmatvec(u)
    alpha = finite_number(norm(v), operator, "lsqr", 0)
    if alpha == 0:
        return LinearSolution(x, Outcome.LEAST_SQUARES, 0, beta)
    v = v / alpha
    w, phi_bar, rho_bar, size, damped = v, beta, alpha, alpha, 0.0
    reached = beta
    for k in range(1, last + 1):
        u = operator.matvec(v) - alpha * u  # section 3
        beta = finite_number(norm(u), operator, "lsqr", k)
        u = u / beta if beta else u
        v_next = operator.rmatvec(u) - beta * v
        size = math.hypot(size, alpha, beta, damp)
        alpha = finite_number(norm(v_next), operator, "lsqr", k)
        v = v_next / alpha if alpha else v_next
        # The row of the damping is rotated away first, then the subdiagonal (section 4.1)
        rho_hat = math.hypot(rho_bar, damp)
        damped = math.hypot(damped, damp / rho_hat * phi_bar)
        phi_bar *= rho_bar / rho_hat
        rho = math.hypot(rho_hat, beta)
        c, s = rho_hat / rho, beta / rho
        theta, rho_bar = s * alpha, -c * alpha
        phi, phi_bar = c * phi_bar, s * phi_bar
        x = x + (phi / rho) * w
        w = v - (theta / rho) * w
        reached = math.hypot(phi_bar, damped)
        stop = callback is not None and callback(k, x, reached)
        if reached <= tol:
            return LinearSolution(x, Outcome.CONVERGED, k, reached)
        # ‖Aᴴ r‖ of the augmented system is |phi_bar c| alpha (section 5.1)
        if abs(phi_bar * c) * alpha <= relative * size * reached:
            return LinearSolution(x, Outcome.LEAST_SQUARES, k, reached)
        if stop:
            return LinearSolution(x, Outcome.STOPPED, k, reached)
    return LinearSolution(x, Outcome.MAXITER, last, reached)
