"""Nonlinear conjugate gradients: `ConjugateGradient` with a rule, and each rule under its own name.

* The formulas for beta, in terms of gradients g, the last ones, y = g - g_last, and the last direction D (uphill).

  They are functions of tensors without branches on the host, so that `torch.vmap` can transform them.
* Nonlinear conjugate gradients: one implementation with a rule.
* The familiar names of conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, dot

from ..optim import Chainable, Objective
from ..optim import ranges as check
from ._vectors import VectorLink, gather_update

__all__ = [
    "DYHS",
    "ConjugateDescent",
    "ConjugateGradient",
    "DaiYuan",
    "FletcherReeves",
    "HagerZhang",
    "HestenesStiefel",
    "LiuStorey",
    "PolakRibiere",
]


def _divide(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below != 0, above / below, 0.0)


def _fletcher_reeves(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, g), dot(last, last))


def _polak_ribiere(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, y), dot(last, last))


def _hestenes_stiefel(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(-dot(g, y), dot(D, y))


def _dai_yuan(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(-dot(g, g), dot(D, y))


def _hager_zhang(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    # In terms of the downhill direction d = -D; the lower bound makes it globally convergent.
    dy = -dot(D, y)
    beta = _divide(dot(y, g) + 2 * _divide(dot(D, g) * dot(y, y), dy), dy)
    size = torch.linalg.vector_norm(D) * torch.linalg.vector_norm(last).clamp(max=0.01)
    return torch.where((dy != 0) & (size > 0), torch.maximum(beta, -1 / size), beta)


def _liu_storey(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, y), dot(last, D))


def _conjugate_descent(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, g), dot(last, D))


def _hybrid(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return torch.minimum(_dai_yuan(g, last, y, D), _hestenes_stiefel(g, last, y, D)).clamp(min=0.0)


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "fletcher-reeves": _fletcher_reeves,
    "polak-ribiere": _polak_ribiere,
    "hestenes-stiefel": _hestenes_stiefel,
    "dai-yuan": _dai_yuan,
    "hager-zhang": _hager_zhang,
    "liu-storey": _liu_storey,
    "conjugate-descent": _conjugate_descent,
    "dai-yuan-hestenes-stiefel": _hybrid,
}


class ConjugateGradient(VectorLink):
    r"""Adds to the update a multiple of the last direction, $D = u + \beta D_-$, with a rule for $\beta$.

    Follow it with a tight line search: `m.StrongWolfe(c2=0.1, a_init="first-order")`. Where $D$ would not point downhill
    the direction starts afresh from the update.

    Args:
        rule: "fletcher-reeves", "polak-ribiere", "hestenes-stiefel", "dai-yuan", "hager-zhang", "liu-storey",
            "conjugate-descent" or "dai-yuan-hestenes-stiefel".
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ConjugateGradient("dai-yuan"), m.StrongWolfe(c2=0.1))
        >>> for _ in range(20):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        W. W. Hager, H. Zhang, "A survey of nonlinear conjugate gradient methods", Pacific J. Optim. 2 (2006).
    """

    members = "batched"
    shared_settings = True

    ranges = {check.one_of(*RULES): ("rule",), check.allow(check.at_least_one, "auto", None): ("restart_interval",)}

    rule: str = field(default="polak-ribiere", kw_only=False)
    clip_beta: bool = False
    restart_interval: int | str | None = "auto"
    inner: Chainable | None = None

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        g = gather_update(objective)
        last, D = state.get("last"), state.get("direction")
        every = setting["restart_interval"]
        every = g.numel() + 1 if every == "auto" else every
        if last is None or D is None or last.shape != g.shape or last.dtype is not g.dtype:
            state["age"] = torch.ones((), dtype=torch.long, device=g.device)
            state["beta"] = torch.zeros((), dtype=g.dtype, device=g.device)
            D = torch.zeros_like(g)
        else:
            beta = RULES[setting["rule"]](g, last, g - last, D)
            beta = beta.clamp(min=0.0) if setting["clip_beta"] else beta
            goes_on = beta.isfinite() if every is None else beta.isfinite() & (state["age"] < every)
            state["beta"] = torch.where(goes_on, beta, 0.0)
            state["age"] = torch.where(state["beta"] != 0, state["age"] + 1, 1)
        state["last"] = g.clone()
        state["previous"] = D
        state["direction"] = self._combine(g, state)

    @staticmethod
    def _combine(g: Tensor, state: dict[str, Any]) -> Tensor:
        D = state.get("previous")
        if D is None or D.shape != g.shape:
            return g.clone()
        out = torch.where(state["beta"] != 0, g + state["beta"] * D, g)
        return torch.where(torch.dot(out, g) > 0, out, g)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        out = self._combine(u, state)
        if "inner" in self.children:  # their result is part of the direction
            state["direction"] = out
        return out.clone()

    def reset_for_online(self) -> None:
        """Clear the last gradient."""
        super().reset_for_online()
        self.clear_state_keys("last")


class FletcherReeves(ConjugateGradient):
    r"""Conjugate gradients with $\beta = g^Tg / g_-^Tg_-$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.FletcherReeves(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        R. Fletcher, C. M. Reeves, "Function minimization by conjugate gradients", Computer J. 7 (1964).
    """

    rule: str = field(default="fletcher-reeves", init=False)


class PolakRibiere(ConjugateGradient):
    r"""Conjugate gradients with $\beta = g^Ty / g_-^Tg_-$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.PolakRibiere(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        E. Polak, G. Ribiere, "Note sur la convergence de methodes de directions conjuguees", RIRO 3 (1969).
    """

    rule: str = field(default="polak-ribiere", init=False)

    clip_beta: bool = True


class HestenesStiefel(ConjugateGradient):
    r"""Conjugate gradients with $\beta = g^Ty / d_-^Ty$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.HestenesStiefel(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        M. R. Hestenes, E. Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. NBS 49 (1952).
    """

    rule: str = field(default="hestenes-stiefel", init=False)


class DaiYuan(ConjugateGradient):
    r"""Conjugate gradients with $\beta = g^Tg / d_-^Ty$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DaiYuan(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        Y. H. Dai, Y. Yuan, "A nonlinear conjugate gradient method with a strong global convergence property", SIAM J. Optim.
        10 (1999).
    """

    rule: str = field(default="dai-yuan", init=False)


class HagerZhang(ConjugateGradient):
    r"""Conjugate gradients with guaranteed descent (downhill directions $d$).

    $\beta = \max\big((y - 2 d_-\,y^Ty / d_-^Ty)^T g / d_-^Ty,\ -1 / (\|d_-\| \min(0.01, \|g_-\|))\big)$

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.HagerZhang(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        W. W. Hager, H. Zhang, "A new conjugate gradient method with guaranteed descent", SIAM J. Optim. 16 (2005).
    """

    rule: str = field(default="hager-zhang", init=False)


class LiuStorey(ConjugateGradient):
    r"""Conjugate gradients with $\beta = -g^Ty / g_-^Td_-$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.LiuStorey(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        Y. Liu, C. Storey, "Efficient generalized conjugate gradient algorithms", JOTA 69 (1991).
    """

    rule: str = field(default="liu-storey", init=False)


class ConjugateDescent(ConjugateGradient):
    r"""Conjugate gradients with $\beta = -g^Tg / g_-^Td_-$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ConjugateDescent(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        R. Fletcher, Practical Methods of Optimization, Wiley (1987).
    """

    rule: str = field(default="conjugate-descent", init=False)


class DYHS(ConjugateGradient):
    r"""Conjugate gradients with $\beta = \max(0, \min(\beta_{DY}, \beta_{HS}))$ (downhill directions $d$).

    Args:
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DYHS(), m.StrongWolfe(c2=0.1))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        Y. H. Dai, Y. Yuan, "An efficient hybrid conjugate gradient method", Ann. Oper. Res. 103 (2001).
    """

    rule: str = field(default="dai-yuan-hestenes-stiefel", init=False)
