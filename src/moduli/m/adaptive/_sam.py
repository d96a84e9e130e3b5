"""Sharpness-aware minimisation: the gradient at the worst point nearby."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...optim import Across, Chainable, Objective, Reformulation
from .._checks import above_one, non_negative
from .._scalars import read


class SAM(Reformulation):
    r"""Replaces the loss by about the largest one within a ball, $\max_{\|\epsilon\|_p \le \rho} f(x + \epsilon)$.

    The gradient is taken at $x + \epsilon$ with, for $1/p + 1/q = 1$,
    $\epsilon = \rho\,\operatorname{sign}(g)\,|g|^{q-1} / \|g\|_q^{q-1}$, that is $\rho g / \|g\|$ for p = 2, with one norm over
    all parameters. Every evaluation costs two gradients, and the loss that later links see is that at $x + \epsilon$.

    Args:
        rho: The radius $\rho$.
        p: The norm of the ball, above 1; infinity for a box.
        eps: Added to the norm of the gradient.
        asam: Measure the radius relative to the size of each weight, see `ASAM`.
        modules: Links that see the new loss; by default all that follow.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> _ = mo.Optimizer([w], m.SAM(rho=1.0), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([1.])

    References:
        P. Foret, A. Kleiner, H. Mobahi, B. Neyshabur, "Sharpness-aware minimization for efficiently improving
        generalization", ICLR 2021.
        J. Kwon, J. Kim, H. Park, I. K. Choi, "ASAM: adaptive sharpness-aware minimization", ICML 2021.
    """

    across = Across.SUMS

    shared_settings = ("p", "eps")

    def __init__(
        self,
        *,
        rho: Any = 0.05,
        p: float = 2.0,
        eps: float = 1e-10,
        asam: bool = False,
        modules: Chainable | None = None,
    ) -> None:
        non_negative(type(self).__name__, rho=rho, eps=eps)
        above_one(type(self).__name__, p=p)
        super().__init__({"rho": rho, "p": p, "eps": eps, "asam": asam}, modules=modules)

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, Sequence[Tensor] | None]:
        """The loss, and its gradient, at the worst point nearby."""
        closure(True)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        present = [p.grad is not None for p in params]
        with objective.counting(range(len(params))):
            shifts = self._shifts(params, grads)
        for param, shift in zip(params, shifts, strict=True):
            param.add_(shift)
        loss = closure(backward)
        if not backward:
            return loss, None
        found = [
            (torch.zeros_like(p) if p.grad is None else p.grad.clone()) if here else None
            for p, here in zip(params, present, strict=True)
        ]
        return loss, found  # type: ignore[return-value]

    def _shifts(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        settings = [self.settings[param] for param in params]
        p, eps = settings[0]["p"], settings[0]["eps"]
        q = 1.0 if p == float("inf") else p / (p - 1)
        weights = [param.abs() if s["asam"] else None for param, s in zip(params, settings, strict=True)]
        scaled = [g if w is None else g * w for g, w in zip(grads, weights, strict=True)]
        size = read(_norm(scaled, q) ** (q - 1)) + eps
        out = []
        for g, w, s in zip(scaled, weights, settings, strict=True):
            direction = torch.sgn(g) if q == 1 else g if q == 2 else torch.sgn(g) * g.abs() ** (q - 1)
            step = direction * (s["rho"] / size)
            out.append(step if w is None else step * w)
        return out


def _norm(tensors: list[Tensor], q: float) -> Tensor:
    """The q-norm of all tensors as one vector, over all processes where they hold pieces."""
    if q in (1, 2):
        return kernels.norm(tensors, q)
    return kernels.sum([tensor.abs().double() ** q for tensor in tensors]) ** (1 / q)


class ASAM(SAM):
    r"""`SAM` with a ball that is relative to the size of each weight: $\epsilon = \rho\, x^2 g / \||x| g\|$ for p = 2.

    Rescaling weights so that the function stays the same does not change its sharpness.

    Args:
        rho: The radius.
        p: The norm of the ball, above 1.
        eps: Added to the norm of the gradient.
        modules: Links that see the new loss; by default all that follow.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> _ = mo.Optimizer([w], m.ASAM(rho=0.5), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])

    References:
        J. Kwon, J. Kim, H. Park, I. K. Choi, "ASAM: adaptive sharpness-aware minimization for scale-invariant learning
        of deep neural networks", ICML 2021.
    """

    def __init__(self, *, rho: Any = 0.5, p: float = 2.0, eps: float = 1e-10, modules: Chainable | None = None) -> None:
        super().__init__(rho=rho, p=p, eps=eps, asam=True, modules=modules)
