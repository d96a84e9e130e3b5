"""Newton's method.

* The base of second-order links: the computation of derivatives, and the truncation of the spectrum.
* Systems with a Hessian, which may be singular or indefinite.
* Newton's method.
* Newton's method without solving systems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._search_ranges import OWN_STEPS
from ...linalg import Dense, Eigendecomposition, FunctionOperator, LinearOperator
from ...optim import HESSIAN_METHODS, Chainable, DeclaredLink, Need, Objective, Ranges, Setting, Transform
from ...optim import ranges as check
from .._vectors import HessianLink, flat, size


class _SecondOrderLink(DeclaredLink, Transform):
    """A link that asks for second derivatives, by autograd or by differences of gradients.

    Args:
        update_freq: Learn at every n-th step only.
        inner: Links between learning and the transformation.
        seed: Of a generator of its own; None for torch's.
        **settings: The settings, whose `hvp_method`, `hessian_method`, `eigv_tol` and `truncate` are checked.
    """

    needs = frozenset({Need.GRADIENT, Need.PRODUCTS})
    ranges: ClassVar[Ranges] = {
        check.one_of("autograd", "batched_autograd", "fd_forward", "fd_central"): ("hvp_method",),
        check.one_of(*HESSIAN_METHODS): ("hessian_method",),
        check.one_of("rademacher", "normal", "gaussian", "uniform", "sphere"): ("distribution",),
        check.allow(check.at_least_one, None): ("truncate", "adapt_freq"),
        check.allow(check.fraction, None): ("eigv_tol",),
        check.non_negative: ("damping", "rdamping", "max_skew"),
        check.at_least_one: ("n_samples", "rank", "sketch_size", "max_dim"),
    }

    attributes = ("seed",)

    def all_needs(self) -> frozenset[Need]:
        """Return the second derivatives, and evaluations elsewhere for differences."""
        needs, own = super().all_needs(), self.defaults
        if "fd" in own.get("hvp_method", own.get("hessian_method", "")):
            return (needs - {Need.PRODUCTS, Need.HESSIAN}) | {Need.CLOSURE}
        return needs


def hessian_operator(objective: Objective, setting: Any) -> FunctionOperator:
    """Return the Hessian of the loss as an operator, in the precision of the parameters' vector."""
    like = flat(objective.params)
    _, vector, _ = objective.tensor_Hvp_function(setting["hvp_method"], setting["h"])

    def product(z: Tensor) -> Tensor:
        out = vector(z)
        return out.to(like.dtype)

    return FunctionOperator(product, size(objective.params), dtype=like.dtype, device=like.device, symmetric=True)


EigvalFn = Callable[[Tensor], Tensor]


def decompose(
    H: Tensor, eigval_fn: EigvalFn | None, eigv_tol: float | None, truncate: int | None
) -> Eigendecomposition:
    """Return the selected eigenvalues, after the function, and their vectors.

    Args:
        H: A symmetric matrix.
        eigval_fn: A function of the eigenvalues; None to keep them.
        eigv_tol: Eigenvalues up to this fraction of the largest are left out; None for none.
        truncate: The most eigenvalues; None for all.
    """
    values, vectors = torch.linalg.eigh(H)
    if eigval_fn is not None:
        values = eigval_fn(values)
    size = values.abs()
    keep = torch.isfinite(values) & (size > 0)
    if eigv_tol is not None and bool(keep.any()):
        keep &= size > eigv_tol * size[keep].max()
    if truncate is not None and int(keep.sum()) > truncate:
        order = torch.where(keep, size, torch.zeros_like(size)).argsort(descending=True)
        chosen = torch.zeros_like(keep)
        chosen[order[:truncate]] = True
        keep &= chosen
    return Eigendecomposition(values[keep], vectors[:, keep])


def solve(H: Tensor, b: Tensor) -> Tensor:
    """Return d with H d = b: by Cholesky if H is positive definite, else LU; the shortest least-squares solution if singular."""
    factor, failed = torch.linalg.cholesky_ex(H)
    if not int(failed):
        return torch.cholesky_solve(b.unsqueeze(-1), factor).squeeze(-1)
    solution, failed = torch.linalg.solve_ex(H, b)
    if not int(failed) and bool(torch.isfinite(solution).all()):
        residual = torch.linalg.vector_norm(H @ solution - b)
        if float(residual) <= 1e-3 * float(torch.linalg.vector_norm(b)):
            solved: Tensor = solution
            return solved
    return shortest(H, b)


def shortest(H: Tensor, b: Tensor) -> Tensor:
    """Return the shortest least-squares solution of a symmetric system."""
    values, vectors = torch.linalg.eigh(H)
    tiny = torch.finfo(H.dtype).eps * H.shape[0] * values.abs().max().clamp(min=torch.finfo(H.dtype).tiny)
    inverse = torch.where(values.abs() > tiny, 1 / values, torch.zeros_like(values))
    out: Tensor = vectors @ (inverse * (vectors.mT @ b))
    return out


def solve_live(H: Tensor, b: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the solution for parameters that have curvature; the others (linear or unused ones) keep b unmodified.

    Args:
        H: The matrix.
        b: The right-hand side.
        how: Solves a system.
    """
    live = (H != 0).any(0)
    if bool(live.all()):
        return how(H, b)
    out = b.clone()
    index = live.nonzero().squeeze(-1)
    if index.numel():
        out[index] = how(H[index][:, index], b[index])
    return out


class _SpectralLink(_SecondOrderLink, HessianLink):
    """A link that solves with a matrix, or with what is kept of its eigenvalues.

    Args:
        eigval_fn: A function of the eigenvalues; None to keep them.
        **arguments: Those of `_SecondOrderLink`; of the settings it uses `eigv_tol`, `truncate` and `use_lstsq`.
    """

    shared_settings = True
    real_only = True

    attributes = ("eigval_fn",)  # a setting that can be called is a schedule

    eigval_fn: Callable[[Tensor], Tensor] | None

    def decompose(self, H: Tensor, setting: Any) -> Eigendecomposition | None:
        """Return the selected eigenvalues and their vectors; None if all are used unmodified."""
        if self.eigval_fn is None and setting["eigv_tol"] is None and setting["truncate"] is None:
            return None
        return decompose(H, self.eigval_fn, setting["eigv_tol"], setting["truncate"])

    def solve(self, H: Tensor, b: Tensor, setting: Any) -> Tensor:
        """Return the solution d of H d = b.

        Args:
            H: The matrix.
            b: The right-hand side.
            setting: The settings.
        """
        spectrum = self.decompose(H, setting)
        if spectrum is None:
            return (shortest if setting["use_lstsq"] else solve)(H, b)
        return spectrum.vectors @ ((spectrum.vectors.mT @ b) / spectrum.values)


class Newton(_SpectralLink):
    r"""Solves $(H + \lambda I)\,d = u$ with the Hessian $H$ of the loss.

    Where $H$ is indefinite this is the plain Newton step, which a line search or a trust region has to guard;
    `eigval_fn=torch.abs` is the saddle-free method. A singular system is solved in the least-squares sense; parameters
    without any curvature (unused or linear ones) keep their gradient.

    Args:
        damping: $\lambda$, added to the diagonal.
        eigval_fn: A function of the eigenvalues, applied before they are inverted.
        eigv_tol: Leave out eigenvalues below this fraction of the largest (by magnitude).
        truncate: Keep only this many eigenvalues, the largest by magnitude.
        update_freq: Evaluate the Hessian at every n-th step only.
        use_lstsq: Always take the shortest least-squares solution.
        hessian_method: How the Hessian is computed (see `Objective.hessian`).
        h: The length of difference steps, for the methods that use them.
        inner: Links between the Hessian's evaluation and the solution.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.Newton()).step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> w.data.abs().round(decimals=5)
        tensor([0., 0.])

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 3.3; Y. N. Dauphin et al., "Identifying and
        attacking the saddle point problem in high-dimensional non-convex optimization", NeurIPS 2014.
    """

    search_ranges = {"lr": OWN_STEPS}

    needs = frozenset({Need.GRADIENT, Need.HESSIAN})
    required_state = "H"

    damping: Setting = 0.0
    eigval_fn: Callable[[Tensor], Tensor] | None = None
    eigv_tol: float | None = None
    truncate: int | None = None
    update_freq: int = 1
    use_lstsq: bool = False
    hessian_method: str = "batched_autograd"
    h: float = 1e-3
    inner: Chainable | None = None

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        state["H"] = evaluate_hessian(objective, setting)

    def _damp(self, H: Tensor, setting: Any) -> Tensor:
        damping = setting["damping"]
        if damping:
            H = H.clone()
            H.diagonal().add_(damping)
        return H

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        H = self._damp(state["H"].to(u.dtype), setting)
        if not bool(torch.isfinite(H).all()):
            return None
        return solve_live(H, u, lambda A, b: self.solve(A, b, setting))

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        H = self._damp(state["H"], setting)
        spectrum = self.decompose(H, setting)
        return Dense(H, symmetric=True) if spectrum is None else spectrum


def evaluate_hessian(objective: Objective, setting: Any) -> Tensor:
    """Return the Hessian of the loss, exactly symmetric and at least in single precision."""
    H = objective.hessian(setting["hessian_method"], setting["h"])[2]
    H = H.float() if H.dtype in (torch.float16, torch.bfloat16) else H
    return 0.5 * (H + H.mT)


class InverseFreeNewton(_SecondOrderLink, HessianLink):
    r"""Multiplies the update by an inverse of the Hessian that one product improves at each step.

    $Y \leftarrow Y (2I - HY),\quad u \leftarrow Yu$, the iteration of Schulz, from $Y = H^T / (\|H\|_1 \|H\|_\infty)$. Y is
    carried over from step to step, and begun again where the Hessian has changed so much that $\|I - HY\| \ge 1$, from where
    the iteration would not return.

    Args:
        update_freq: Evaluate the Hessian, and improve Y, at every n-th step only.
        hessian_method: How the Hessian is computed (see `Objective.hessian`).
        h: The length of difference steps, for the methods that use them.
        inner: Links between the Hessian's evaluation and the product.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.InverseFreeNewton())
        >>> for _ in range(12):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        G. Schulz, "Iterative Berechnung der reziproken Matrix", ZAMM 13 (1933); M. Massalski, M. Nockowska-Rosiak,
        "Inverse-free Newton's method", 2025.
    """

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.HESSIAN})
    real_only = True
    required_state = "H"

    update_freq: int = 1
    hessian_method: str = "batched_autograd"
    h: float = 1e-3
    inner: Chainable | None = None

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        state["H"] = H = evaluate_hessian(objective, setting)
        Y = state.get("Y")
        if Y is not None:
            rest = -(H @ Y)
            rest.diagonal().add_(1.0)
            if float(torch.linalg.matrix_norm(rest, 2)) >= 1.0 + 1e-6:
                Y = None
        if Y is None:
            size = float(torch.linalg.matrix_norm(H, 1)) * float(torch.linalg.matrix_norm(H, float("inf")))
            state["Y"] = H.mT / size if 0 < size < float("inf") else torch.eye(len(H), dtype=H.dtype, device=H.device)
        else:
            state["Y"] = Y + Y @ rest

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        out: Tensor = state["Y"].to(u.dtype) @ u
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        return Dense(state["H"], symmetric=True)
