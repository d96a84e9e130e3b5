"""Newton's method with a low-rank sketch of the Hessian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linalg import Eigendecomposition, LinearOperator, LowRankPlusDiagonal, cg
from ...optim import Chainable, Need, Objective, Transform
from .._flat import flat, mask_absent, unflat
from ._newton_cg import check_hvp, hessian_operator, product_needs
from ._solve import refuse_complex


def nystrom(
    objective: Objective, rank: int, method: str, h: float, generator: torch.Generator | None
) -> Eigendecomposition:
    """The eigenvalues (not negative) and vectors of the Nystrom approximation of the Hessian, largest first."""
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
        # An indefinite Hessian has no such factor: its Ritz values, cut at zero, are what the subspace knows.
        values, vectors = torch.linalg.eigh(0.5 * (core + core.T))
        return Eigendecomposition(values.clamp(min=0).flip(0), (omega @ vectors).flip(1))
    B = torch.linalg.solve_triangular(factor, shifted.T, upper=False).T
    U, s, _ = torch.linalg.svd(B, full_matrices=False)
    return Eigendecomposition((s * s - shift).clamp(min=0), U)


class _Sketch(Transform):
    decides_on_host = True
    needs = frozenset({Need.GRADIENT, Need.PRODUCTS})
    vector_state = True

    def __init__(self, defaults: dict[str, Any], update_freq: int, seed: int | None, inner: Chainable | None) -> None:
        check_hvp(type(self).__name__, defaults["hvp_method"])
        if defaults["rank"] < 1:
            raise ValueError(f"{type(self).__name__}: rank is {defaults['rank']}; sketch at least one direction")
        if not 0 <= defaults["eigv_tol"] < 1:
            raise ValueError(
                f"{type(self).__name__}: eigv_tol is {defaults['eigv_tol']}; it is a fraction of the largest eigenvalue"
            )
        super().__init__(defaults, update_freq=update_freq, inner=inner)
        self.seed = seed

    def all_needs(self) -> frozenset[Need]:
        """Products with the Hessian, or evaluations elsewhere."""
        return product_needs(super().all_needs(), self.defaults["hvp_method"])

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Sketches the Hessian."""
        setting = settings[0]
        refuse_complex(type(self).__name__, objective.params)
        generator = self.get_generator(objective.params[0].device, self.seed)
        found = nystrom(objective, setting["rank"], setting["hvp_method"], setting["h"], generator)
        # Lists, so that no axis of the sketch is taken for the parameters when a saved state is reordered.
        states[0]["values"] = found.values.tolist()
        states[0]["vectors"] = list(found.vectors.unbind(1))

    def _sketch(self, objective: Objective, state: Any, setting: Any) -> Eigendecomposition:
        if "values" not in state:
            self.update_states(objective, [state], [setting])
        Q = torch.stack(state["vectors"], 1)
        values = torch.tensor(state["values"], dtype=Q.dtype, device=Q.device)
        # Largest first; one is always kept, so that there is a sketch.
        kept = max(1, int((values >= setting["eigv_tol"] * values[0]).sum()))
        kept = min(kept, setting.get("truncate") or kept)
        more = setting.get("damping", 0.0) + setting.get("rdamping", 0.0) * values[0]
        return Eigendecomposition(values[:kept] + more, Q[:, :kept])


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

    hessian = "matrix"

    def __init__(
        self,
        *,
        rank: int = 100,
        reg: float | None = 1e-2,
        eigv_tol: float = 0.0,
        truncate: int | None = None,
        damping: float = 0.0,
        rdamping: float = 0.0,
        update_freq: int = 1,
        hvp_method: str = "batched_autograd",
        h: float = 1e-3,
        inner: Chainable | None = None,
        seed: int | None = None,
    ) -> None:
        if reg is not None and not reg > 0:
            raise ValueError(f"NystromSketchAndSolve: reg is {reg}; it is positive, or None")
        if truncate is not None and truncate < 1:
            raise ValueError(f"NystromSketchAndSolve: truncate is {truncate}; keep at least one eigenvalue")
        if damping < 0 or rdamping < 0:
            raise ValueError(
                f"NystromSketchAndSolve: damping is {damping} and rdamping {rdamping}; neither is negative"
            )
        super().__init__(
            {
                "rank": rank,
                "reg": reg,
                "eigv_tol": eigv_tol,
                "truncate": truncate,
                "damping": damping,
                "rdamping": rdamping,
                "hvp_method": hvp_method,
                "h": h,
            },
            update_freq,
            seed,
            inner,
        )

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Solves with the sketch."""
        u = flat(mask_absent(objective.peek_updates(), objective.present))
        sketch, reg = self._sketch(objective, states[0], settings[0]), settings[0]["reg"]
        if reg is None:
            inside = sketch.vectors.T @ u
            tiny = torch.finfo(u.dtype).eps * sketch.values.max()
            out = sketch.vectors @ torch.where(sketch.values > tiny, inside / sketch.values, torch.zeros_like(inside))
        else:
            out = sketch.solve_plus_diag(u, float(reg))
        objective.updates = unflat(out, objective.params)
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The sketch, plus its regularisation."""
        param = objective.params[0]
        sketch = self._sketch(objective, self.state[param], self.settings[param])
        reg = self.settings[param]["reg"]
        n = sketch.shape[-1]
        return LowRankPlusDiagonal(
            torch.full((n,), float(reg or 0.0), dtype=sketch.dtype), sketch.vectors, sketch.values
        )


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

    def __init__(
        self,
        *,
        rank: int = 100,
        maxiter: int | None = None,
        tol: float = 1e-8,
        reg: float = 1e-6,
        eigv_tol: float = 0.0,
        update_freq: int = 1,
        hvp_method: str = "batched_autograd",
        h: float = 1e-3,
        inner: Chainable | None = None,
        seed: int | None = None,
    ) -> None:
        if not reg > 0:
            raise ValueError(f"NystromPCG: reg is {reg}; it is positive")
        super().__init__(
            {
                "rank": rank,
                "maxiter": maxiter,
                "tol": tol,
                "reg": reg,
                "eigv_tol": eigv_tol,
                "hvp_method": hvp_method,
                "h": h,
            },
            update_freq,
            seed,
            inner,
        )

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Solves for the update."""
        setting = settings[0]
        b = flat(mask_absent(objective.peek_updates(), objective.present))
        if not bool(torch.isfinite(b).all()) or not bool(b.any()):
            return objective
        sketch, reg = self._sketch(objective, states[0], setting), float(setting["reg"])
        values = (sketch.values.min() + reg) / (sketch.values + reg) - 1
        P = LowRankPlusDiagonal(torch.ones_like(b), sketch.vectors, values)
        A = hessian_operator(objective, setting["hvp_method"], setting["h"]) + reg
        try:
            out: Tensor = cg(A, b, preconditioner=P, rtol=setting["tol"], maxiter=setting["maxiter"] or b.numel()).x
        except ValueError:
            out = b
        objective.updates = unflat(out if bool(out.any()) else b.clone(), objective.params)
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The Hessian, by its products."""
        setting = self.settings[objective.params[0]]
        return hessian_operator(objective, setting["hvp_method"], setting["h"]) + float(setting["reg"])
