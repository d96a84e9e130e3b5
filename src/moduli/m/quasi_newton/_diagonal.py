"""Diagonal quasi-Newton methods: a vector in place of the matrix; one implementation, many rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...linalg import Diagonal, LinearOperator
from ...optim import Chainable, Objective
from ...optim import ranges as check
from .._vectors import HessianLink, vector_like
from ._pairs import _PairLink, count_skipped, take_tensors


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item()


class DiagonalQuasiNewton(_PairLink, HessianLink):
    r"""Keeps a diagonal Hessian $b$ over all parameters and divides the update by it; override `rule`.

    Entries that are not positive, or outside of the bounds, are used as 1. The optimizer's `attrs` have the number of pairs
    that carried no information and were skipped, as `"DNRTR.skipped_pairs"`.

    Args:
        init_scale: The diagonal starts as this; "auto" scales it with the first pair.
        ptol: A step whose largest component is not above this gives no pair.
        gtol: A change of the gradient whose largest component is not above this gives no pair.
        lb: The smallest entry that is used.
        ub: The largest entry that is used.
        update_freq: Learn at every n-th step only.
        inner: Links between learning and the product.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DiagonalQuasiCauchi(), m.StrongWolfe())
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        M. Zhu, J. L. Nazareth, H. Wolkowicz, "The quasi-Cauchy relation and diagonal updating", SIAM J. Optim. 9 (1999).
    """

    @staticmethod
    def rule(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
        """Return the next diagonal; None if the pair is of no use.

        The pair is divided by the largest component of s, so that powers of it do not underflow.

        Args:
            b: The diagonal.
            s: The step.
            y: The difference of gradients.
        """
        return _quasi_cauchy(b, s, y)

    ranges = {check.once(check.allow(check.positive, "auto")): ("init_scale",)}

    init_scale: float | str = "auto"
    ptol: float = 1e-32
    gtol: float = 1e-32
    lb: float = 1e-10
    ub: float = 1e10
    update_freq: int = 1
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        lb, ub = given["lb"], given["ub"]
        if not 0 < lb < ub:
            raise ValueError(f"{type(self).__name__}: lb is {lb} and ub is {ub}; they obey 0 < lb < ub")

    def _diagonal(self, state: Any, like: Tensor, setting: Any) -> Tensor:
        diagonal: Tensor | None = state.get("diagonal")
        if diagonal is None or diagonal.shape != like.shape or diagonal.dtype is not like.dtype:
            scale = 1.0 if setting["init_scale"] == "auto" else float(setting["init_scale"])
            diagonal = state["diagonal"] = torch.full_like(like, scale)
            state["pairs"] = 0
        return diagonal

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        x, s, y, _ = take_tensors(self, objective, state, setting)
        b = self._diagonal(state, x, setting)
        if s is None or y is None:
            return
        if state["pairs"] == 0 and setting["init_scale"] == "auto" and _dot(s, y) > torch.finfo(s.dtype).tiny:
            b.fill_(min(_dot(y, y) / _dot(s, y), torch.finfo(s.dtype).max))
        new = self.rule(b, s, y)
        if new is not None and bool(torch.isfinite(new).all()):
            b.copy_(new)
            state["pairs"] += 1
        else:
            count_skipped(self, objective, state)

    def _keep_in_bounds(self, b: Tensor, setting: Any) -> Tensor:
        return torch.where((b > setting["lb"]) & (b < setting["ub"]), b, torch.ones_like(b))

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        return u / self._keep_in_bounds(self._diagonal(state, u, setting), setting)

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        return Diagonal(self._keep_in_bounds(self._diagonal(state, vector_like(objective), setting), setting))


def _bfgs(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    """Return the diagonal of the BFGS update of the inverse."""
    sy, h = _dot(s, y), 1 / b
    if not sy > torch.finfo(s.dtype).tiny:
        return None
    over = s / sy
    h = h + (sy + _dot(y, h * y)) * over * over - 2 * h * y * over
    return torch.where(h > 0, 1 / h, b)


def _sr1(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    z = y - b * s
    zs = _dot(z, s)
    size = float(torch.linalg.vector_norm(z)) * float(torch.linalg.vector_norm(s))
    limits = torch.finfo(s.dtype)
    return b + z * (z / zs) if abs(zs) > max(max(1e-8, limits.eps) * size, limits.tiny) else None


def _quasi_cauchy(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    s2 = s * s
    return b + s2 * ((_dot(s, y) - _dot(s2, b)) / _dot(s2, s2))


def _update_weighted(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    s2 = s * s
    e = s2 * b * b
    below = _dot(s2, e)
    return b + e / below * (_dot(s, y) - _dot(s2, b)) if below > torch.finfo(s.dtype).tiny else None


def _andrei(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    s2 = s * s
    return b + s2 * ((_dot(s, y) + _dot(s, s) - _dot(s2, b)) / _dot(s2, s2)) - 1


def _new(b: Tensor, s: Tensor, y: Tensor) -> Tensor | None:
    s2 = s * s
    return b + s2 * (_dot(s, y) / _dot(s2, s2))


class DiagonalBFGS(DiagonalQuasiNewton):
    r"""The diagonal of the BFGS update.

    $h \leftarrow h + (s^Ty + y^T(h \odot y))\,s^2/(s^Ty)^2 - 2\,h y s/s^Ty,\ b = 1/h$.

    Args:
        **settings: Those of `DiagonalQuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DiagonalBFGS(), m.StrongWolfe())
        >>> for _ in range(80):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 0.1)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 6.1.
    """

    rule = staticmethod(_bfgs)


class DiagonalSR1(DiagonalQuasiNewton):
    r"""The diagonal of the SR1 update.

    $b \leftarrow b + z^2/z^Ts,\ z = y - b \odot s$.

    Args:
        **settings: Those of `DiagonalQuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DiagonalSR1(), m.StrongWolfe())
        >>> for _ in range(80):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 0.1)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 6.2.
    """

    rule = staticmethod(_sr1)


class DiagonalQuasiCauchi(DiagonalQuasiNewton):
    r"""The diagonal nearest to the last one that has the curvature $s^Ty$ along the step.

    $b \leftarrow b + s^2\,(s^Ty - s^T(b \odot s))/\sum s^4$.

    Args:
        **settings: Those of `DiagonalQuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DiagonalQuasiCauchi(), m.StrongWolfe())
        >>> for _ in range(80):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 0.1)
        True

    References:
        M. Zhu, J. L. Nazareth, H. Wolkowicz, "The quasi-Cauchy relation and diagonal updating", SIAM J. Optim. 9 (1999).
    """

    rule = staticmethod(_quasi_cauchy)


class DiagonalWeightedQuasiCauchi(DiagonalQuasiNewton):
    r"""The same in a norm weighted by the diagonal.

    $b \leftarrow b + e\,(s^Ty - s^T(b \odot s))/\sum s^2 e,\ e = s^2 b^2$.

    Args:
        **settings: Those of `DiagonalQuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DiagonalWeightedQuasiCauchi(), m.StrongWolfe())
        >>> for _ in range(80):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 0.1)
        True

    References:
        W. J. Leong, S. Enshaei, S. L. Kek, "Diagonal quasi-Newton methods via least change updating", Numer. Algorithms 86
        (2021).
    """

    rule = staticmethod(_update_weighted)


class DNRTR(DiagonalQuasiNewton):
    r"""Andrei's diagonal, with bounds.

    $b \leftarrow b + s^2\,(s^Ty + s^Ts - s^T(b \odot s))/\sum s^4 - 1$.

    Args:
        **settings: Those of `DiagonalQuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DNRTR(), m.StrongWolfe())
        >>> for _ in range(80):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 0.1)
        True

    References:
        N. Andrei, "A new diagonal quasi-Newton updating method", Optimization 68 (2019).
    """

    rule = staticmethod(_andrei)

    lb: float = 0.01
    ub: float = 1e5


class NewDQN(DiagonalQuasiNewton):
    r"""A diagonal that only grows, with bounds.

    $b \leftarrow b + s^2\,s^Ty/\sum s^4$.

    Args:
        **settings: Those of `DiagonalQuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.NewDQN(), m.StrongWolfe())
        >>> for _ in range(80):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 0.1)
        True

    References:
        M. Nosrati, K. Amini, "A new diagonal quasi-Newton algorithm for unconstrained optimization", Appl. Math. 69 (2024).
    """

    rule = staticmethod(_new)

    lb: float = 0.01
    ub: float = 1e5
