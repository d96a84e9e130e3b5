"""The familiar names of conjugate gradients."""

from __future__ import annotations

from typing import ClassVar

from ...optim import Chainable
from ._base import ConjugateGradient


class _Named(ConjugateGradient):
    """Conjugate gradients with the rule that the class is named for."""

    name: ClassVar[str]

    def __init__(
        self, *, clip_beta: bool = False, restart_interval: int | str | None = "auto", inner: Chainable | None = None
    ) -> None:
        super().__init__(self.name, clip_beta=clip_beta, restart_interval=restart_interval, inner=inner)


class FletcherReeves(_Named):
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

    name = "fletcher-reeves"


class PolakRibiere(_Named):
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

    name = "polak-ribiere"

    def __init__(
        self, *, clip_beta: bool = True, restart_interval: int | str | None = "auto", inner: Chainable | None = None
    ) -> None:
        super().__init__(clip_beta=clip_beta, restart_interval=restart_interval, inner=inner)


class HestenesStiefel(_Named):
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

    name = "hestenes-stiefel"


class DaiYuan(_Named):
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

    name = "dai-yuan"


class HagerZhang(_Named):
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

    name = "hager-zhang"


class LiuStorey(_Named):
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

    name = "liu-storey"


class ConjugateDescent(_Named):
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

    name = "conjugate-descent"


class DYHS(_Named):
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

    name = "dai-yuan-hestenes-stiefel"
