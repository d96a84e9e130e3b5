"""Newton's method by products with the Hessian.

* Truncated Newton methods: products with the Hessian only.
* Newton's method with a low-rank sketch of the Hessian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ...linalg import Eigendecomposition, LinearOperator, LinearSolution, LowRankPlusDiagonal, Outcome, cg, minres
from ...optim import Chainable, Objective
from ...optim import ranges as check
from .._vectors import HessianLink, flat, refuse_complex
from ..trust_region import TrustCG
from ._newton import _SecondOrderLink, hessian_operator


class NewtonCG(_SecondOrderLink, HessianLink):
    r"""Solves $(H + \epsilon I)\,d = u$ by conjugate gradients (or MINRES), with products $Hz$ only.

    A direction of negative curvature ends the iteration with what was reached and a step along it, as long as its absolute
    curvature says, so that a line search belongs behind it; or with the update itself at the first.

    Args:
        maxiter: The largest number of products; n by default.
        tol: Stop when the residual has fallen to this part of the right-hand side; None for min(1/2, sqrt|u|).
        reg: $\epsilon$, added to the Hessian's diagonal.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        solver: "cg" or "minres" (which takes indefinite systems).
        h: The length of difference steps.
        warm_start: Start from the last solution.
        warm_beta: How much of the last start is mixed into the next.
        inner: Links that transform the right-hand side.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.NewtonCG()).step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> w.data.abs().round(decimals=4)
        tensor([0., 0.])

    References:
        R. S. Dembo, T. Steihaug, "Truncated-Newton algorithms for large-scale unconstrained optimization", Math.
        Programming 26 (1983); J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., algorithm 7.1.
    """

    shared_settings = True
    real_only = True
    hessian = "products"
    ranges = {check.one_of("cg", "minres"): ("solver",), check.non_negative: ("reg",), check.fraction: ("warm_beta",)}

    maxiter: int | None = None
    tol: float | None = 1e-8
    reg: float = 1e-8
    hvp_method: str = "autograd"
    solver: str = "cg"
    h: float = 1e-3
    warm_start: bool = False
    warm_beta: float = 0.0
    inner: Chainable | None = None

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        if not bool(torch.isfinite(u).all()) or not bool(u.any()):
            return None
        A = self.operator(objective, state, setting)
        tol = setting["tol"]
        tol = min(0.5, float(torch.linalg.vector_norm(u)) ** 0.5) if tol is None else tol
        start = state.get("start") if setting["warm_start"] else None
        most = setting["maxiter"] or u.numel()
        try:
            if setting["solver"] == "cg":
                out = _extend(A, u, cg(A, u, x0=start, rtol=tol, maxiter=most))
            else:  # MINRES starts at zero, so it solves for the correction of the start
                rest = u if start is None else u - A.matvec(start)
                out = minres(A, rest, rtol=tol, maxiter=most).x
                out = out if start is None else out + start
        except ValueError:
            out = u  # a product was not finite: there is no curvature to use here
        if not bool(out.any()) or not bool(torch.isfinite(out).all()):
            out = u.clone()
        if setting["warm_start"]:
            state["start"] = out.clone() if start is None else torch.lerp(out, start, setting["warm_beta"])
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        refuse_complex("NewtonCG", objective.params)
        H = hessian_operator(objective, setting)
        return H + setting["reg"] if setting["reg"] else H


def _extend(A: LinearOperator, b: Tensor, solution: LinearSolution) -> Tensor:
    """Return the result of conjugate gradients plus, for a direction of negative curvature, a step by its absolute curvature.

    The result before it may be the gradient alone, which is slow along a valley; p also descends, since pᵀb > 0.
    """
    out, p = solution.x, solution.direction
    if solution.outcome is not Outcome.NEGATIVE_CURVATURE or p is None or not bool(out.any()):
        return out
    squared, slope, curvature = float(p @ p), float(p @ b), float(p @ A.matvec(p))
    # Near the solution of a definite system the sign of pᵀAp is rounding; |b| / |x| is of the size of A.
    size = float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(out))
    if not slope > 0 or not -curvature > torch.finfo(b.dtype).eps ** 0.5 * size * squared:
        return out
    return out + p * (slope / -curvature)


class NewtonCGSteihaug(TrustCG):
    r"""The trust-region Newton method with products only: `TrustCG(NewtonCG())` under its own name.

    Args:
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        reg: Added to the Hessian's diagonal.
        **settings: Those of `TrustCG`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.NewtonCGSteihaug())
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        T. Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal. 20
        (1983).
    """

    ranges = {check.non_negative: ("h",)}
    attributes = ("hvp_method", "h")

    hess_module: Chainable = field(default=(), init=False)
    hvp_method: str = "autograd"
    h: float = 1e-3
    reg: float = 0.0

    def collect(self, given: Mapping[str, Any]) -> None:
        # Checked here, so that the error names this link and not the inner one.
        if isinstance(given["reg"], float) and math.isnan(given["reg"]):
            raise ValueError(f"{type(self).__name__}: reg is NaN; give a number")
        link = NewtonCG(hvp_method=given["hvp_method"], h=given["h"], reg=given["reg"])
        super().collect({**given, "reg": 0.0, "hess_module": link})


def nystrom(
    objective: Objective, rank: int, method: str, h: float, generator: torch.Generator | None
) -> Eigendecomposition:
    """Return the eigenvalues (not negative) and vectors of the Nystrom approximation of the Hessian, largest first.

    Args:
        objective: The objective.
        rank: How many there are.
        method: The kind of products with the Hessian.
        h: The length of differences, where products are differences.
        generator: Draws the test vectors.
    """
    like = flat(objective.params)
    n = like.numel()
    rank = min(rank, n)
    draw = torch.randn(n, rank, dtype=like.dtype, device=like.device, generator=generator)
    omega = torch.linalg.qr(draw).Q
    Y = objective.hessian_matrix_product(omega, hvp_method=method, h=h)[0].to(like.dtype)
    # A shift keeps the small Gram matrix positive definite (Frangella, Tropp and Udell, algorithm 2.1).
    shift = (
        math.sqrt(n)
        * torch.finfo(like.dtype).eps
        * max(float(torch.linalg.matrix_norm(Y)), torch.finfo(like.dtype).tiny)
    )
    shifted = Y + shift * omega
    core = omega.T @ shifted
    factor, failed = torch.linalg.cholesky_ex(0.5 * (core + core.T))
    if int(failed):
        # An indefinite Hessian has no such factor: its Ritz values, clipped at zero, are used instead.
        values, vectors = torch.linalg.eigh(0.5 * (core + core.T))
        return Eigendecomposition(values.clamp(min=0).flip(0), (omega @ vectors).flip(1))
    B = torch.linalg.solve_triangular(factor, shifted.T, upper=False).T
    U, s, _ = torch.linalg.svd(B, full_matrices=False)
    return Eigendecomposition((s * s - shift).clamp(min=0), U)


class _Sketch(_SecondOrderLink, HessianLink):
    real_only = True
    required_state = "values"
    ranges = {check.allow(check.positive, None): ("reg",)}

    seed: int | None

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        generator = self.get_generator(objective.params[0].device, self.seed)
        sketch = nystrom(objective, setting["rank"], setting["hvp_method"], setting["h"], generator)
        # Lists, so that no axis of the sketch is permuted like the parameters when a saved state is reordered.
        state["values"] = sketch.values.tolist()
        state["vectors"] = list(sketch.vectors.unbind(1))

    def _sketch(self, state: Any, setting: Any) -> Eigendecomposition:
        Q = torch.stack(state["vectors"], 1)
        values = torch.tensor(state["values"], dtype=Q.dtype, device=Q.device)
        # Largest first; at least one is used, so that there is a sketch.
        rank = max(1, int((values >= setting["eigv_tol"] * values[0]).sum()))
        rank = min(rank, setting.get("truncate") or rank)
        more = setting.get("damping", 0.0) + setting.get("rdamping", 0.0) * values[0]
        return Eigendecomposition(values[:rank] + more, Q[:, :rank])


class NystromSketchAndSolve(_Sketch):
    r"""Solves $(\hat H + \rho I)\,d = u$ with a Nystrom sketch $\hat H = Q \Lambda Q^T$ of the Hessian.

    $d = Q (\Lambda + \rho)^{-1} Q^T u + \tfrac1\rho (u - QQ^Tu)$.

    Args:
        rank: How many products are made.
        reg: $\rho$; None for the pseudo-inverse on the span of the sketch.
        eigv_tol: Leave out eigenvalues of the sketch below this fraction of the largest.
        truncate: Keep only this many of its largest eigenvalues.
        damping: Added to those that are kept.
        rdamping: Added to them, relative to the largest.
        update_freq: Sketch at every n-th step only.
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        inner: Links that transform the right-hand side.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.NystromSketchAndSolve(rank=2, seed=0))
        >>> for _ in range(5):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        Z. Frangella, P. Rathore, S. Zhao, M. Udell, "SketchySGD: reliable stochastic optimization via randomized curvature
        estimates", arXiv:2211.08597 (2022).
    """

    rank: int = 100
    reg: float | None = 1e-2
    eigv_tol: float = 0.0
    truncate: int | None = None
    damping: float = 0.0
    rdamping: float = 0.0
    update_freq: int = 1
    hvp_method: str = "batched_autograd"
    h: float = 1e-3
    inner: Chainable | None = None
    seed: int | None = None

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        sketch, reg = self._sketch(state, setting), setting["reg"]
        if reg is None:
            inside = sketch.vectors.T @ u
            tiny = torch.finfo(u.dtype).eps * sketch.values.max()
            return sketch.vectors @ torch.where(sketch.values > tiny, inside / sketch.values, torch.zeros_like(inside))
        return sketch.solve_plus_diag(u, float(reg))

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        sketch = self._sketch(state, setting)
        diag = torch.full(sketch.shape[-1:], float(setting["reg"] or 0.0), dtype=sketch.dtype)
        return LowRankPlusDiagonal(diag, sketch.vectors, sketch.values)


class NystromPCG(_Sketch):
    r"""Solves $(H + \rho I)\,d = u$ by conjugate gradients, preconditioned with a Nystrom sketch of the Hessian.

    $P^{-1} = (\lambda_r + \rho)\,Q (\Lambda + \rho)^{-1} Q^T + I - QQ^T$, of which no matrix is formed.

    Args:
        rank: How many products the sketch takes.
        maxiter: The largest number of further products; n by default.
        tol: Stop when the residual has fallen to this part of the right-hand side.
        reg: $\rho$.
        eigv_tol: Leave out eigenvalues of the sketch below this fraction of the largest.
        update_freq: Sketch at every n-th step only.
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        inner: Links that transform the right-hand side.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.NystromPCG(rank=1, seed=0)).step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-5)
        True

    References:
        Z. Frangella, J. A. Tropp, M. Udell, "Randomized Nystrom preconditioning", SIAM J. Matrix Anal. Appl. 44 (2023).
    """

    hessian = "products"
    ranges = {check.positive: ("reg",)}

    rank: int = 100
    maxiter: int | None = None
    tol: float = 1e-8
    reg: float = 1e-6
    eigv_tol: float = 0.0
    update_freq: int = 1
    hvp_method: str = "batched_autograd"
    h: float = 1e-3
    inner: Chainable | None = None
    seed: int | None = None

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        if not bool(torch.isfinite(u).all()) or not bool(u.any()):
            return None
        sketch, reg = self._sketch(state, setting), float(setting["reg"])
        values = (sketch.values.min() + reg) / (sketch.values + reg) - 1
        P = LowRankPlusDiagonal(torch.ones_like(u), sketch.vectors, values)
        A = self.operator(objective, state, setting)
        try:
            out: Tensor = cg(A, u, preconditioner=P, rtol=setting["tol"], maxiter=setting["maxiter"] or u.numel()).x
        except ValueError:
            out = u
        return out if bool(out.any()) else u.clone()

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        return hessian_operator(objective, setting) + float(setting["reg"])
