"""Natural gradients with the empirical Fisher matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import AtA, LinearOperator
from ...optim import Closure, Evaluator, Need, Objective
from .._flat import unflat
from .._vector_link import HessianLink
from ..least_squares._jacobian import jacobian


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
    learnt = "G"

    def __init__(self, *, reg: float = 1e-8, sqrt: bool = False, batched: bool = True) -> None:
        if reg < 0:
            raise ValueError(f"NaturalGradient: reg is {reg}; it is not negative")
        super().__init__({"reg": reg, "sqrt": sqrt})
        self.batched = batched

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Evaluates the Jacobian, and puts the sum of the losses in place of the vector."""
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
        """Solves in the space of samples."""
        G = torch.stack(state["G"])
        gram = G @ G.T
        reg = float(setting["reg"])
        # Not lstsq, whose last bit depends on where its workspace lies: a resumed run would differ.
        values, vectors = torch.linalg.eigh(gram)
        ok = values > values.max() * torch.finfo(G.dtype).eps * len(values)
        # V Lambda^-1/2 V' G'1 with V = G' U / sqrt(lambda), or the shortest solution of (G G' + reg) w = 1.
        scale = values.clamp(min=0).sqrt() + reg if setting["sqrt"] else values + reg
        weights = vectors @ torch.where(ok, vectors.T.sum(1) / scale, torch.zeros_like(values))
        return G.T @ weights

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The Fisher matrix, by its factor."""
        return AtA(torch.stack(state["G"]))
