"""Conjugate gradients."""

import math

import torch
from torch import Tensor

from ._checks import Callback, finite, finite_number, inner, norm, prepare, symmetric_operator
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
    if preconditioner is not None:
        preconditioner = symmetric_operator(preconditioner, "the preconditioner of cg")
        if preconditioner.shape != operator.shape:
            raise ValueError(f"the preconditioner is {preconditioner}, but A is {operator}; they need equal shapes")
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
