"""The base of trust regions: a model, a radius, and the ratio of actual to predicted reduction."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...linalg import Eigendecomposition, LinearOperator, ScaledIdentity, SingularError
from ...optim import Chainable, ChainError, DeclaredLink, Module, Need, Objective
from ...optim import ranges as check
from .._vectors import flat, mask_absent, unflat
from ..line_search._base import Line


def provider(link: Module) -> Module | None:
    """Return the link inside (or this one) that gives a Hessian."""
    providers = [part for _, part in link.links() if type(part).get_H is not Module.get_H and hasattr(part, "hessian")]
    other = [part for _, part in link.links() if type(part).get_H is not Module.get_H]
    chosen = providers or other
    return chosen[0] if chosen else None


class TrustRegionBase(DeclaredLink):
    r"""Minimises the model $f - u^Td + \tfrac12 d^TBd$ where it can be trusted; override `trust_solve`.

    $B$ comes from a link with `get_H`, any of them. The step is accepted where the ratio $\rho$ of the decrease to the
    model's exceeds `eta`; the radius shrinks where the ratio is bad and grows where it is good.
    A subclass declares more settings as annotated attributes.

    Args:
        hess_module: The link that gives the Hessian.
        eta: Accept where the ratio is above this.
        nplus: How much the radius grows.
        nminus: How much it shrinks.
        rho_good: The ratio above which it grows.
        rho_bad: The ratio below which it shrinks.
        boundary_tol: Grow only where the step came this near to the boundary, relative to the radius; None for always.
        init: The first radius.
        max_attempts: How many radii to try in one step; after that no step is made.
        update_freq: Let the Hessian learn at every n-th step only.
        inner: Links that transform the gradient before the model is made.
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.LOSS, Need.CLOSURE})
    solves: ClassVar[bool] = False
    """Whether systems are solved with the Hessian, for which products alone are not enough."""
    norm_radius: ClassVar[bool] = True

    ranges = {
        check.above_one: ("nplus",),
        check.once(check.positive): ("init",),
        check.positive: ("nminus",),
        check.fraction: ("nminus",),
        check.at_least_one: ("max_attempts", "update_freq"),
    }
    attributes: ClassVar[tuple[str, ...]] = ("update_freq",)

    hess_module: Chainable = field(kw_only=False)
    eta: float = 0.0
    nplus: float = 3.5
    nminus: float = 0.25
    rho_good: float = 0.99
    rho_bad: float = 1e-4
    boundary_tol: float | None = 1e-6
    init: float = 1.0
    max_attempts: int = 10
    update_freq: int = 1
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        """Also raise ValueError for ratios that contradict each other."""
        super().collect(given)
        eta, bad, good = given["eta"], given["rho_bad"], given["rho_good"]
        if not 0 <= eta <= bad < good:
            name = type(self).__name__
            raise ValueError(f"{name}: the ratios obey 0 <= eta <= rho_bad < rho_good, not {eta}, {bad}, {good}")

    def check(self) -> None:
        """Raise ChainError for a link without a Hessian, or without the required kind."""
        name = type(self).__name__
        child = self.children["hess_module"]
        source = provider(child)
        if source is None:
            raise ChainError(
                f"{name} needs a link that gives a Hessian, and {child!r} gives none; "
                f"write {name}(m.Newton()) or {name}(m.LBFGS())"
            )
        other = type(source).__name__
        if self.solves and getattr(source, "hessian", "matrix") == "products":
            raise ChainError(
                f"{name} solves systems with the Hessian, but {other} gives products with it only; "
                f"use TrustCG({other}(...)), or {name}(m.Newton())"
            )
        if not getattr(source, "symmetric", True):
            raise ChainError(
                f"{name} minimises a quadratic model, but {other} keeps a matrix that is not symmetric; "
                f"follow {other} by a line search, or use {name}(m.BFGS())"
            )

    @abstractmethod
    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """The vector d that is subtracted from the parameters.

        Args:
            H: The Hessian.
            u: The gradient.
            radius: The bound of its norm (or, for methods that penalise instead, the inverse of the penalty).
            setting: The settings in force.
        """

    def prepare(self, H: LinearOperator, setting: Any) -> LinearOperator:
        """Return data that is computed once for all radii."""
        return H

    def extra(self, d: Tensor, radius: float) -> float:
        """Return the terms of the model beyond the quadratic."""
        return 0.0

    def update(self, objective: Objective) -> None:
        """Let the Hessian learn, at every n-th step."""
        if self.increment_counter("update_calls", 0) % self.update_freq == 0:
            self.children["hess_module"].update(objective)

    def apply(self, objective: Objective) -> Objective:
        """Search for a radius whose step is accepted, and return the objective with that step."""
        setting = self.settings[objective.params[0]]
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        H = self.children["hess_module"].get_H(objective)
        if H is None:
            raise ChainError(f"{type(self).__name__}: {self.children['hess_module']!r} gave no Hessian")
        loss = float(objective.get_loss(backward=True))
        u = flat(mask_absent(objective.peek_updates(), objective.present)).to(H.dtype)
        if not bool(torch.isfinite(u).all()) or not math.isfinite(loss) or not bool(u.any()):
            objective.updates = [torch.zeros_like(param) for param in objective.params]
            return objective
        H = self.prepare(H, setting)
        radius = float(self.global_state.get("radius", setting["init"]))
        floor = torch.finfo(u.dtype).eps
        for _ in range(setting["max_attempts"]):
            try:
                d = self.trust_solve(H, u, radius, setting)
            except SingularError:
                # A quasi-Newton model can become singular (on a kink, say). It is reset, and until then the model is that of
                # gradient descent.
                self.children["hess_module"].reset()
                H = ScaledIdentity(u.numel(), dtype=u.dtype, device=u.device)
                d = u * min(1.0, radius / float(torch.linalg.vector_norm(u)))
            length = float(torch.linalg.vector_norm(d))
            if not 0.0 < length < math.inf:
                radius = self._check_radius(radius * setting["nminus"], setting)
                continue
            predicted = float(torch.dot(u, d)) - 0.5 * float(torch.dot(d, H.matvec(d))) - self.extra(d, radius)
            line = Line(objective, unflat(d, objective.params))
            value = line.value(1.0)
            rounding = 10 * floor * max(abs(loss), abs(value) if math.isfinite(value) else 0.0)
            ratio = _measure_ratio(loss, value, predicted, rounding)
            radius = self._adapt_radius(radius, ratio, length, setting)
            if value == -math.inf or (ratio > setting["eta"] and value <= loss + rounding):
                self.global_state["radius"] = radius
                return line.finish(1.0)
            line.finish(None)
        self.global_state["radius"] = radius
        objective.updates = [torch.zeros_like(param) for param in objective.params]
        return objective

    def _adapt_radius(self, radius: float, ratio: float, length: float, setting: Any) -> float:
        """Return a smaller radius for a bad ratio, a larger one for a good ratio of a step to the boundary.

        Args:
            radius: The radius of the step.
            ratio: The ratio of its reduction to the predicted one.
            length: Its length.
            setting: The settings in force.
        """
        bound = length if self.norm_radius else radius
        if ratio < setting["rho_bad"]:
            return self._check_radius(setting["nminus"] * bound, setting)
        if ratio > setting["rho_good"] and self._is_at_boundary(length, radius, setting):
            return self._check_radius(max(radius, setting["nplus"] * bound), setting)
        return radius

    def _is_at_boundary(self, length: float, radius: float, setting: Any) -> bool:
        tol = setting["boundary_tol"]
        return tol is None or not self.norm_radius or length >= radius * (1 - tol)

    def _check_radius(self, radius: float, setting: Any) -> float:
        """Return the radius; the first one again if it has overflowed or underflowed."""
        return radius if 1e-150 < radius < 1e150 else float(setting["init"])

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """Return the Hessian of the model."""
        return self.children["hess_module"].get_H(objective)


def _measure_ratio(loss: float, value: float, predicted: float, rounding: float) -> float:
    """Return the ratio of the actual reduction to the predicted one; minus infinity where there is none.

    Args:
        loss: The value before the step.
        value: The value after it.
        predicted: The reduction of the model.
        rounding: The size of rounding errors of values.
    """
    gained = loss - value
    if abs(gained) <= rounding and abs(predicted) <= rounding:
        # At the end both are rounding: then the model is as good as the function (Conn, Gould, Toint, 17.4.2).
        return 1.0
    ratio = gained / max(predicted, torch.finfo(torch.float64).tiny)
    return ratio if math.isfinite(ratio) or value == -math.inf else -math.inf


class _SpectralRegion(TrustRegionBase):
    """A trust region whose problem is solved by the eigenvalues of the Hessian."""

    solves = True

    def prepare(self, H: LinearOperator, setting: Any) -> LinearOperator:
        """Compute the eigenvalues, once for all radii."""
        if isinstance(H, Eigendecomposition):
            return Eigendecomposition.of(H)
        dense = H.to_dense()
        return Eigendecomposition.of(0.5 * (dense + dense.mT))
