"""Links for constrained problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim import Closure, Objective, Reformulation
from ._vectors import copy_gradients

__all__ = ["AugmentedLagrangian"]


class AugmentedLagrangian(Reformulation):
    r"""Optimizes the loss under $c(x) = 0$, or under $c(x) \ge 0$ with `inequality=True`, by an augmented Lagrangian.

    For equalities $f + \lambda^Tc + \tfrac{\mu}{2}\|c\|^2$; for inequalities
    $f + \tfrac{1}{2\mu}\sum (\max(0, \lambda - \mu c)^2 - \lambda^2)$. After `every` steps the multipliers follow,
    $\lambda \leftarrow \lambda + \mu c$ or $\max(0, \lambda - \mu c)$, and $\mu$ grows where the constraint is violated by
    more than `tol`, and not by a quarter less than before. It comes before the links that it is for: gradients, line
    searches and trust regions see the augmented loss, and so does what `step` returns.

    Args:
        constraint: A function of the model that the optimizer was given, or of nothing; a number or several.
        inequality: Whether the constraint is to be at least zero instead of equal to it.
        mu: The first penalty.
        growth: The factor of the penalty.
        mu_max: Its limit.
        tol: A violation up to this does not make the penalty grow.
        every: How many steps the multipliers stay.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.AugmentedLagrangian(lambda: w.sum() - 1, every=5), m.BFGS(), m.StrongWolfe())
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data.round(decimals=4)
        tensor([0.5000, 0.5000], dtype=torch.float64)

    References:
        M. R. Hestenes, "Multiplier and gradient methods", JOTA 4 (1969); R. T. Rockafellar, "The multiplier method of Hestenes
        and Powell applied to convex programming", JOTA 12 (1973); J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed.,
        section 17.3.
    """

    decides_on_host = True

    def __init__(
        self,
        constraint: Callable[..., Any],
        *,
        inequality: bool = False,
        mu: float = 10.0,
        growth: float = 2.0,
        mu_max: float = 1e3,
        tol: float = 1e-3,
        every: int = 50,
    ) -> None:
        if not callable(constraint):
            raise TypeError(f"AugmentedLagrangian: constraint is a {type(constraint).__name__}; give a function")
        if not 0 < mu <= mu_max or not growth >= 1 or every < 1:
            raise ValueError(
                f"AugmentedLagrangian: mu={mu}, mu_max={mu_max}, growth={growth}, every={every}; they obey "
                "0 < mu <= mu_max, growth >= 1 and every >= 1"
            )
        super().__init__({"mu": mu, "growth": growth, "mu_max": mu_max, "tol": tol})
        self.inequality, self.every = inequality, every
        self._asked = Closure(constraint)

    @staticmethod
    def term(c: Tensor, multiplier: Tensor, mu: float, inequality: bool) -> Tensor:
        """Return the term that is added to the loss (Nocedal and Wright, equations 17.36 and 17.65).

        Args:
            c: The values of the constraint.
            multiplier: Their multipliers.
            mu: The penalty.
            inequality: Whether the values have to be non-negative, instead of zero.
        """
        if not inequality:
            return (multiplier * c).sum() + 0.5 * mu * c.square().sum()
        return ((multiplier - mu * c).clamp(min=0).square() - multiplier.square()).sum() / (2 * mu)

    @staticmethod
    def next_multiplier(c: Tensor, multiplier: Tensor, mu: float, inequality: bool) -> Tensor:
        """Return the next multipliers (equations 17.39 and 17.64).

        Args:
            c: The values of the constraint.
            multiplier: Their multipliers.
            mu: The penalty.
            inequality: As for `term`.
        """
        return (multiplier - mu * c).clamp(min=0) if inequality else multiplier + mu * c

    @staticmethod
    def violation(c: Tensor, inequality: bool) -> float:
        """Return the violation of the constraint."""
        return float((-c).clamp(min=0).max() if inequality else c.abs().max()) if c.numel() else 0.0

    def _values(self, objective: Objective) -> Tensor:
        self._asked.model = objective.model
        values = self._asked.value()
        data = values if isinstance(values, Tensor) else getattr(values, "data", values)
        if not isinstance(data, Tensor):
            raise TypeError(f"AugmentedLagrangian: the constraint returned a {type(values).__name__}; return a tensor")
        return data.reshape(-1)

    def _read_multiplier(self, like: Tensor, setting: Any) -> tuple[Tensor, float]:
        multiplier = self.global_state.get("multiplier")
        if multiplier is None:
            multiplier = self.global_state["multiplier"] = torch.zeros_like(like)
            self.global_state["mu"] = float(setting["mu"])
        return multiplier, float(self.global_state["mu"])

    def pre_step(self, objective: Objective) -> None:
        """Update the multipliers, at every n-th step."""
        if self.increment_counter("steps", 0) % self.every or self.global_state.get("multiplier") is None:
            return
        setting = self.settings[objective.params[0]]
        with torch.no_grad():
            c = self._values(objective)
        multiplier, mu = self._read_multiplier(c, setting)
        violation = self.violation(c, self.inequality)
        self.global_state["multiplier"] = self.next_multiplier(c, multiplier, mu, self.inequality)
        if violation > max(float(setting["tol"]), 0.75 * self.global_state.get("violation", torch.inf)):
            self.global_state["mu"] = min(mu * float(setting["growth"]), float(setting["mu_max"]))
        self.global_state["violation"] = violation

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor, Sequence[Tensor] | None]:
        loss = closure(backward)
        grads = copy_gradients(params)
        setting = self.settings[objective.params[0]]
        with torch.enable_grad():
            c = self._values(objective)
            multiplier, mu = self._read_multiplier(c.detach(), setting)
            more = self.term(c, multiplier, mu, self.inequality)
            extra_grads: Sequence[Tensor | None] = [None] * len(params)
            if backward and more.requires_grad:
                extra_grads = torch.autograd.grad(more, params, allow_unused=True)
        total = loss + more.detach()
        if not backward:
            return total, None
        return total, [g if extra is None else g + extra for g, extra in zip(grads, extra_grads, strict=True)]
