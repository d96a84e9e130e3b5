"""Space dilation along differences of gradients."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ._dense import QuasiNewton
from ._rules import Pair, Rule, dilation


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

    def __init__(self, *, alpha: float = 0.5, init_scale: float | str = 1, **settings: Any) -> None:
        if not 0 <= alpha < 1:
            raise ValueError(f"ShorR: alpha is {alpha}; space is dilated by 1 / alpha, so it is in [0, 1)")
        super().__init__(_more={"alpha": alpha}, init_scale=init_scale, **settings)


class ProjectedGradientMethod(QuasiNewton):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": dilation}

    def __init__(
        self,
        *,
        init_scale: float | str = 1,
        restart_interval: int | str | None = "auto",
        ptol_restart: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(
            _more={"alpha": 0.0},
            init_scale=init_scale,
            restart_interval=restart_interval,
            ptol_restart=ptol_restart,
            **settings,
        )

    def learn(self, matrix: Tensor, pair: Pair, state: Any, setting: Any) -> None:
        """One pair; where the rule refuses it, everything is projected out already."""
        pairs = state["pairs"]
        super().learn(matrix, pair, state, setting)
        if state["pairs"] == pairs and setting["restart_interval"] is not None:
            self._start(state, pair.s, setting)
