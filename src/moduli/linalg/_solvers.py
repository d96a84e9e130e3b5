"""Krylov solvers of linear systems: conjugate gradients, minimal residuals, and least squares from products."""

import math
from typing import Any

import torch
from torch import Tensor

from ._checks import Callback, default_rtol, finite, finite_number, inner, norm, prepare, take_operator
from ._operator import LinearOperator
from ._results import LinearSolution, Outcome


def cg(
    A: LinearOperator | Tensor,
    b: Tensor,
    *,
    x0: Tensor | None = None,
    preconditioner: LinearOperator | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    maxiter: int | None = None,
    callback: Callback | None = None,
) -> LinearSolution:
    """Solve A x = b for a symmetric positive definite A, by preconditioned conjugate gradients.

    Each iteration takes one product with A. The iterate minimises ½ xᴴ A x - Re bᴴ x over the Krylov space. A direction
    p with pᴴ A p ≤ 0 proves that A is not positive definite: the iteration ends there, and returns the iterate before
    it and the direction. A semidefinite system that has solutions converges to one of them.

    Args:
        A: A symmetric (Hermitian) operator, or a matrix that is taken to be.
        b: The right-hand side, (n,).
        x0: Where to start; zero by default.
        preconditioner: An operator close to A⁻¹, symmetric positive definite: `Diagonal(A.diagonal()).inverse()`, say.
        rtol: Stop when ‖b - A x‖ ≤ max(rtol ‖b‖, atol); by default eps^(2/3) of the dtype.
        atol: See `rtol`.
        maxiter: The limit on iterations, 10 n by default.
        callback: Called with (iteration, iterate, residual norm); a true result ends the iteration.

    Returns:
        A `LinearSolution` that ended in `CONVERGED`, `NEGATIVE_CURVATURE`, `SINGULAR`, `STAGNATED`, `MAXITER` or `STOPPED`.

    Raises:
        TypeError: If A is not declared symmetric, or dtypes differ.
        ValueError: If shapes differ, b, x0 or a product is not finite, or the preconditioner is not positive definite.

    Example:
        >>> import torch
        >>> from moduli.linalg import cg
        >>> cg(torch.tensor([[4.0, 1.0], [1.0, 3.0]]), torch.tensor([5.0, 4.0])).x.round(decimals=3)
        tensor([1., 1.])
        >>> print(cg(torch.diag(torch.tensor([1.0, -2.0])), torch.ones(2)).outcome)
        The operator is not positive definite; a direction of negative or zero curvature was found.

    References:
        Hestenes and Stiefel, Methods of conjugate gradients for solving linear systems, J. Res. NBS 49 (1952) 409-436,
        equations (3:1); preconditioned as in Nocedal and Wright, Numerical Optimization, 2nd ed., algorithm 5.3.
    """
    operator, n, _, tol, last = prepare(A, b, "b", "cg", rtol, atol, maxiter)
    preconditioner = _take_preconditioner(preconditioner, operator)
    if x0 is None:
        x, r = torch.zeros_like(b), b
    else:
        x = finite(operator, x0, n, "x0")
        r = b - operator.matvec(x)  # (3:1a)
    eps = torch.finfo(b.dtype).eps
    size, reached = 0.0, finite_number(norm(r), operator, "cg", 0)
    if reached <= tol:
        return LinearSolution(x, Outcome.CONVERGED, 0, reached)
    # The recurrence runs on r / ‖r₀‖, so that the squares of tiny or huge residuals stay numbers.
    unit, r = reached, r / reached

    def direction(r: Tensor, size: float, k: int) -> tuple[Tensor, float]:
        if preconditioner is None:
            return r, size * size
        z = preconditioner.matvec(r)
        rz = inner(r, z)
        if not rz > 0:
            raise ValueError(f"the preconditioner of cg is not positive definite: rᴴ M r = {rz:.3g} in iteration {k}")
        return z, rz

    p, rz = direction(r, 1.0, 0)
    squared = inner(p, p)  # ‖p‖²
    for k in range(1, last + 1):
        Ap = operator.matvec(p)
        curvature = finite_number(inner(p, Ap), operator, "cg", k)
        if k == 1:
            size = finite_number(norm(Ap), operator, "cg", k) / math.sqrt(squared)
        size = max(size, curvature / squared)  # a lower bound of ‖A‖
        # Below this the sign of pᴴ A p is rounding.
        if curvature <= n * eps * size * squared:
            null = norm(Ap) <= n * eps * size * math.sqrt(squared)
            return LinearSolution(x, Outcome.SINGULAR if null else Outcome.NEGATIVE_CURVATURE, k, reached, p)
        alpha = rz / curvature  # (3:1b)
        x = torch.add(x, p, alpha=alpha * unit)  # (3:1c)
        r = torch.sub(r, Ap, alpha=alpha)  # (3:1d)
        left = norm(r)
        reached = left * unit
        stop = callback is not None and callback(k, x, reached)
        if reached <= tol:
            # The recurrence goes on falling when b - A x no longer does; near that point it is not believed.
            if reached <= 1e3 * eps * size * norm(x):
                reached = norm(b - operator.matvec(x))
                if reached > tol:
                    return LinearSolution(x, Outcome.STAGNATED, k, reached)
            return LinearSolution(x, Outcome.CONVERGED, k, reached)
        if stop:
            return LinearSolution(x, Outcome.STOPPED, k, reached)
        z, rz_next = direction(r, left, k)
        beta = rz_next / rz  # (3:1e)
        p = torch.add(z, p, alpha=beta)  # (3:1f)
        # r is orthogonal to p, so without a preconditioner the squares add up.
        squared = rz_next + beta * beta * squared if preconditioner is None else inner(p, p)
        rz = rz_next
    return LinearSolution(x, Outcome.MAXITER, last, reached)


def _take_preconditioner(preconditioner: Any, operator: LinearOperator) -> LinearOperator | None:
    """Return a preconditioner, if there is one, as an operator; raise ValueError if its shape is not that of the system."""
    if preconditioner is None:
        return None
    inverse = take_operator(preconditioner, "the preconditioner of cg")
    if inverse.shape != operator.shape:
        raise ValueError(f"the preconditioner is {inverse}, but A is {operator}; they need equal shapes")
    return inverse


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

    The residual r = b - A x of every iterate also gives the curvature rᴴ A r, at no cost: on request, the method ends with
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
    relative = default_rtol(b.dtype) if rtol is None else rtol
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
    operator, n, beta, tol, last = prepare(A, b, "b", "lsqr", rtol, atol, maxiter, symmetric=False)
    if not (math.isfinite(damp) and damp >= 0):
        raise ValueError(f"lsqr: damp is a finite number that is not negative, not {damp}")
    relative = max(default_rtol(b.dtype) if rtol is None else rtol, torch.finfo(b.dtype).eps)
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
