"""Methods that stretch space, project gradients out, or use a second matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...optim import ranges as check
from ._dense import Pair, QuasiNewton, Rule, dilation, rank_one


class ShorR(QuasiNewton):
    r"""Shor's r-algorithm: space is stretched along differences of gradients, which suits non-smooth functions.

    $H \leftarrow H - (1 - \alpha^2) H y y^T H / y^THy$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ShorR(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        N. Z. Shor, Minimization Methods for Non-Differentiable Functions, Springer (1985); J. V. Burke, A. S. Lewis,
        M. L. Overton, "The speed of Shor's r-algorithm", IMA J. Numer. Anal. 28 (2008).
    """

    rules: ClassVar[dict[str, Rule]] = {"inverse": dilation}

    ranges = {check.once(check.fraction): ("alpha",)}

    alpha: float = 0.5
    init_scale: float | str = 1


class _Projected(QuasiNewton):
    """Differences of gradients are projected out, one after another, until a restart."""

    rules: ClassVar[dict[str, Rule]] = {"inverse": dilation}

    init_scale: float | str = 1
    restart_interval: int | str | None = "auto"
    ptol_restart: bool = True

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect({**given, "alpha": 0.0})

    def learn(self, matrix: Tensor, pair: Pair, state: Any, setting: Any) -> bool | Tensor:
        pairs = state["pairs"]
        used = super().learn(matrix, pair, state, setting)
        # A rule rejects a pair where everything is projected out.
        if state["pairs"] == pairs and setting["restart_interval"] is not None:
            self._start(state, pair.s, setting)
        return used


class ProjectedGradientMethod(_Projected):
    r"""Pearson's projected gradients: every difference of gradients is projected out, until a restart.

    $H \leftarrow H - H y y^T H / y^THy$, from the identity again after n + 1 pairs, and where nothing is left to project: a
    pair that the rule refuses, or a step that went nowhere.

    Args:
        restart_interval: Start from the identity again after this many pairs; "auto" for n + 1, None for never.
        ptol_restart: Start from the identity again after a step that went nowhere.
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ProjectedGradientMethod(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. D. Pearson, "Variable metric methods of minimisation", Computer J. 12 (1969), algorithm 5.
    """


class ProjectedNewtonRaphson(_Projected):
    r"""Pearson's projected Newton method: one matrix projects gradients out, another learns the inverse Hessian meanwhile.

    $R \leftarrow R + (s - Ry)(Hy)^T / y^THy,\quad H \leftarrow H - Hy(Hy)^T / y^THy$, and after
    n + 1 pairs $H \leftarrow R$. Directions are $Hu$; on a quadratic R is the inverse Hessian after n pairs.

    Args:
        init_scale: Both matrices start as this multiple of the identity.
        restart_interval: After how many pairs R takes the place of H; "auto" for n + 1.
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ProjectedNewtonRaphson(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. D. Pearson, "Variable metric methods of minimisation", Computer J. 12 (1969), algorithm 7.
    """

    symmetric = False

    def _start(self, state: Any, like: Tensor, setting: Any) -> Tensor:
        # Continue with the second matrix; if it has no pairs since the last restart, reset to the identity.
        second: Tensor | None = state.pop("learnt", None) if state.get("pairs") else None
        matrix = super()._start(state, like, setting)
        if second is not None and second.shape == matrix.shape and bool(torch.isfinite(second).all()):
            matrix.copy_(second)
        state["learnt"] = matrix.clone()
        return matrix

    def learn(self, matrix: Tensor, pair: Pair, state: Any, setting: Any) -> bool | Tensor:
        # R is updated first, from the projection before the pair.
        projected = matrix @ pair.y
        rank_one(lambda H, p: projected)(state["learnt"], pair)
        return super().learn(matrix, pair, state, setting)


class ThomasOptimalMethod(QuasiNewton):
    r"""Thomas' optimal update: a rank-one update along a direction that a second matrix chooses.

    $d = (R + \tfrac12 \|s\| I) s,\quad R \leftarrow (1 + \|s\|)(\|s\| I + R - d d^T / d^Ts)$, and with $c = H^Td$,
    $H \leftarrow H + (s - Hy) c^T / c^Ty$. It keeps the inverse only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ThomasOptimalMethod(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        S. W. Thomas, Sequential Estimation Techniques for Quasi-Newton Algorithms, Cornell University (1975).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: H.T @ pair.setting["direction"])}

    def _start(self, state: Any, like: Tensor, setting: Any) -> Tensor:
        matrix = super()._start(state, like, setting)
        state["other"] = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return matrix

    def learn(self, matrix: Tensor, pair: Pair, state: Any, setting: Any) -> bool | Tensor:
        s, R = pair.s, state["other"]
        length = float(torch.linalg.vector_norm(s))
        d = R @ s + 0.5 * length * s
        ds = torch.dot(d, s).item()
        if not ds > pair.tiny:
            return False
        R = R - torch.outer(d / ds, d)
        R.diagonal().add_(length)
        R.mul_(1 + length)
        if float(R.diagonal().abs().max()) > 1e30:  # it grows with every step, and is reset before it overflows
            R = torch.eye(len(R), dtype=R.dtype, device=R.device)
        state["other"] = R
        chosen = Pair(s, pair.y, pair.before, pair.after, pair.tol, {**pair.setting, "direction": d})
        return super().learn(matrix, chosen, state, setting)
