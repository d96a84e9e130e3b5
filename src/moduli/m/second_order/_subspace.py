"""Curvature along some directions.

* Newton's method in a subspace.
* Natural gradients with the empirical Fisher matrix.
* Momentum with the curvature along the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ...linalg import AtA, Eigendecomposition, LinearOperator
from ...optim import Chainable, Closure, Evaluator, Need, Objective, Setting
from ...optim import ranges as check
from .._measures import divide, read
from .._vectors import HessianLink, flat, gather_update, jacobian, mask_absent, refuse_complex, unflat
from ._newton import _SecondOrderLink, _SpectralLink

_TYPES = ("common_directions", "orthonormal", "rademacher", "rows", "topk", "mixed")


class SubspaceNewton(_SpectralLink):
    r"""Solves $(S^THS + \lambda I)\,z = S^Tu$ in a subspace with orthonormal columns $S$, and goes along $Sz$.

    Args:
        sketch_size: The dimension of the subspace, k; as many products with the Hessian per step.
        sketch_type: "common_directions" (the last gradients), "orthonormal" and "rademacher" (random), "rows" (random
            coordinates), "topk" (coordinates with the largest gradients), "mixed" (gradient, its slow and fast means, the
            last step, and random ones).
        damping: $\lambda$.
        eigval_fn: A function of the eigenvalues in the subspace, applied before they are inverted (`torch.abs`: saddle-free).
        eigv_tol: Leave out eigenvalues below this fraction of the largest (by magnitude).
        truncate: Keep only this many eigenvalues, the largest by magnitude.
        use_lstsq: Always take the shortest least-squares solution.
        update_freq: Evaluate the Hessian in the subspace at every n-th step only.
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        inner: Links that transform the right-hand side.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SubspaceNewton(sketch_size=2))
        >>> for _ in range(5):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        R. M. Gower, D. Kovalev, F. Lieder, P. Richtarik, "RSN: randomized subspace Newton", NeurIPS 2019; P.-W. Wang,
        C.-P. Lee, C.-J. Lin, "The common-directions method for regularized empirical risk minimization", JMLR 20 (2019).
    """

    required_state = "basis"

    ranges = {check.one_of(*_TYPES): ("sketch_type",)}

    sketch_size: int = 100
    sketch_type: str = "common_directions"
    damping: float = 0.0
    eigval_fn: Callable[[Tensor], Tensor] | None = None
    eigv_tol: float | None = None
    truncate: int | None = None
    use_lstsq: bool = False
    update_freq: int = 1
    hvp_method: str = "batched_autograd"
    h: float = 1e-2
    seed: int | None = None
    inner: Chainable | None = None

    def _columns(self, g: Tensor, x: Tensor, state: Any, setting: Any) -> Tensor:
        """Return columns that span the subspace."""
        kind, n = setting["sketch_type"], g.numel()
        k = min(setting["sketch_size"], n)
        generator = self.get_generator(g.device, self.seed)
        if kind == "common_directions":
            state.setdefault("gradients", []).append(g.clone())
            del state["gradients"][:-k]
            return torch.stack(state["gradients"][::-1], 1)
        if kind == "rows":
            return _unit(torch.randperm(n, generator=generator, device=g.device)[:k], g)
        if kind == "topk":
            return _unit(g.abs().topk(k).indices, g)
        if kind == "rademacher":
            return torch.randint(0, 2, (n, k), generator=generator, device=g.device).to(g) * 2 - 1
        draw = torch.randn(n, k, dtype=g.dtype, device=g.device, generator=generator)
        if kind == "orthonormal":
            return draw
        columns = [g]
        for name, beta in (("fast", 0.9), ("slow", 0.99)):
            state[name] = g.clone() if name not in state else torch.lerp(g, state[name], beta)
            columns.append(state[name])
        if "point" in state:
            columns.append(x - state["point"])
        state["point"] = x.clone()
        return torch.cat([torch.stack(columns, 1), draw], 1)[:, : max(k, 1)]

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        g = gather_update(objective)
        columns = self._columns(g, flat(objective.params), state, setting)
        columns = columns / torch.linalg.vector_norm(columns, dim=0).clamp(min=torch.finfo(g.dtype).tiny)
        Q, R = torch.linalg.qr(columns)
        keep = R.diagonal().abs() > 1e-10
        S = Q[:, keep] if bool(keep.any()) else Q[:, :1]
        HS = objective.hessian_matrix_product(S, hvp_method=setting["hvp_method"], h=setting["h"])[0].to(S.dtype)
        small = S.T @ HS
        state["basis"] = list(S.unbind(1))
        state["small"] = [row.tolist() for row in 0.5 * (small + small.T)]

    def _parts(self, state: Any, setting: Any) -> tuple[Tensor, Tensor]:
        S = torch.stack(state["basis"], 1)
        small = torch.tensor(state["small"], dtype=S.dtype, device=S.device)
        small.diagonal().add_(setting["damping"])
        return S, small

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        S, small = self._parts(state, setting)
        out = S @ self.solve(small, S.T @ u, setting)
        if torch.dot(out, u).item() <= 0:
            out = S @ (S.T @ u)  # indefinite there: the gradient's part in the subspace goes downhill
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        S, small = self._parts(state, setting)
        spectrum = self.decompose(small, setting) or Eigendecomposition.of(small)
        return Eigendecomposition(spectrum.values, S @ spectrum.vectors)


def _unit(index: Tensor, like: Tensor) -> Tensor:
    out = torch.zeros(like.numel(), index.numel(), dtype=like.dtype, device=like.device)
    out[index, torch.arange(index.numel(), device=like.device)] = 1.0
    return out


class NaturalGradient(HessianLink):
    r"""The shortest step that changes every sample's loss alike: $d = G^T (GG^T + \epsilon I)^{-1} 1$.

    The closure returns one loss per sample; $G$ is their Jacobian, $G^TG$ the empirical Fisher matrix. The links that follow
    see the sum of the losses.

    Args:
        reg: $\epsilon$.
        sqrt: Divide by the root of the Fisher matrix instead, $d = V \Lambda^{-1/2} V^T G^T 1$.
        batched: Compute all rows of the Jacobian in one vectorised pass.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.NaturalGradient(), m.LR(0.5)).step(mo.closure(lambda: w**2))
        >>> w.data
        tensor([2.9167, 0.7500], dtype=torch.float64)

    References:
        S. Amari, "Natural gradient works efficiently in learning", Neural Computation 10 (1998).
    """

    decides_on_host = False

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.RESIDUALS})
    real_only = True
    required_state = "G"

    ranges = {check.non_negative: ("reg",)}
    attributes = ("batched",)

    reg: float = 1e-8
    sqrt: bool = False
    batched: bool = True

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        losses = objective.get_residuals()
        G = jacobian(losses, objective.params, self.batched)
        state["G"] = list(G.unbind(0))
        total = losses.detach().sum()
        objective.loss = objective.loss_approx = total
        objective.grads = unflat(G.sum(0), objective.params)
        objective._graph = None
        evaluator = objective.evaluator
        if evaluator is not None:
            objective.evaluator = Evaluator(Closure(lambda: evaluator.ask().sum(), fixed=evaluator.fixed))
        objective.needs = objective.needs - {Need.RESIDUALS}

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        G = torch.stack(state["G"])
        gram = G @ G.T
        reg = float(setting["reg"])
        # Not lstsq, whose last bit depends on the address of its workspace: a resumed run would differ.
        values, vectors = torch.linalg.eigh(gram)
        ok = values > values.max() * torch.finfo(G.dtype).eps * len(values)
        # V Lambda^-1/2 V' G'1 with V = G' U / sqrt(lambda), or the shortest solution of (G G' + reg) w = 1.
        scale = values.clamp(min=0).sqrt() + reg if setting["sqrt"] else values + reg
        weights = vectors @ torch.where(ok, vectors.T.sum(1) / scale, torch.zeros_like(values))
        return G.T @ weights

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        return AtA(torch.stack(state["G"]))


class MatrixMomentum(_SecondOrderLink):
    r"""Heavy ball with the matrix $I - \mu H$ as momentum: $u \leftarrow \eta u - (s - \mu Hs)$ with s the last step.

    Along directions of large curvature the ball slows down, along others it rolls on, so that $\mu$ is below
    $1 / \lambda_{max}$. One product with the Hessian per step. It has a step size of its own: do not add `LR`.

    Args:
        lr: The step size $\eta$.
        mu: The factor $\mu$ of the Hessian.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        h: The length of difference steps.
        adaptive: Multiply $\mu$ by $\|s\| / \|y\|$, with y the change of the gradient: one over the curvature last seen.
        adapt_freq: Find that number at every n-th step only.
        inner: Links that transform the update first.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.MatrixMomentum(0.02, mu=0.1))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: 4 * w[0] ** 2 + 0.5 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-2)
        True

    References:
        G. B. Orr, T. K. Leen, "Using curvature information for fast stochastic search", NeurIPS 1996.
    """

    shared_settings = True
    vector_state = True
    ranges = {check.non_negative: ("lr", "mu"), check.positive: ("h",)}

    lr: Setting = field(kw_only=False)
    mu: Setting = 0.1
    hvp_method: str = "autograd"
    h: float = 1e-3
    adaptive: bool = False
    adapt_freq: int | None = None
    inner: Chainable | None = None

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        state, setting = states[0], settings[0]
        refuse_complex("MatrixMomentum", objective.params)
        x, u = flat(objective.params), gather_update(objective)
        state["momentum"] = torch.zeros_like(x)
        if "x" in state:
            s = x - state["x"]
            tensors = [part.clone() for part in unflat(s, objective.params)]
            product = objective.hessian_vector_product(tensors, hvp_method=setting["hvp_method"], h=setting["h"])[0]
            mu = setting["mu"]
            if setting["adaptive"]:
                due = state["steps"] % (setting["adapt_freq"] or 1) == 0
                if due or "radius" not in state:
                    bend = read(torch.linalg.vector_norm(u - state["u"]))
                    length = read(torch.linalg.vector_norm(s))
                    state["radius"] = divide(length, bend, state.get("radius", 1.0))
                mu = mu * state.get("radius", 1.0)
            state["momentum"] = s - mu * flat(product).to(s.dtype)
        state["x"], state["u"], state["steps"] = x.clone(), u.clone(), state.get("steps", 0) + 1

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        on = unflat(states[0]["momentum"], objective.params)
        objective.updates = [
            setting["lr"] * u - part.to(u.dtype)
            for u, part, setting in zip(
                mask_absent(objective.peek_updates(), objective.present), on, settings, strict=True
            )
        ]
        return objective

    def reset_for_online(self) -> None:
        """Clear the last point."""
        super().reset_for_online()
        self.state.clear()
