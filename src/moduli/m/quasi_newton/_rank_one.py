"""Rank-one updates with a choice of direction; their matrices are not symmetric."""

from __future__ import annotations

from typing import ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, column, rank_one

# The directions c of H += (s - Hy) c' / c'y that serve the inverse of one method and the Hessian of another.
_PULLED_STEP = rank_one(lambda H, pair: H.T @ pair.s)
_CHANGE = rank_one(lambda H, pair: pair.y)
_STEP = rank_one(lambda H, pair: pair.s)
_PULLED_CHANGE = rank_one(lambda H, pair: H.T @ pair.y)


class BroydenGood(QuasiNewton):
    r"""Broyden's first update: the Hessian nearest to the last one that maps s to y.

    $H \leftarrow H + (s - Hy) c^T / c^Ty,\ c = H^Ts$; for the Hessian $B \leftarrow B + (y - Bs) s^T / s^Ts$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.BroydenGood(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        C. G. Broyden, "A class of methods for solving nonlinear simultaneous equations", Math. Comp. 19 (1965).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": _PULLED_STEP, "hessian": _CHANGE}


class BroydenBad(QuasiNewton):
    r"""Broyden's second update: the inverse nearest to the last one that maps y to s.

    $H \leftarrow H + (s - Hy) y^T / y^Ty$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.BroydenBad(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        C. G. Broyden, "A class of methods for solving nonlinear simultaneous equations", Math. Comp. 19 (1965).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": _CHANGE, "hessian": _PULLED_STEP}


class McCormick(QuasiNewton):
    r"""The rank-one update along the step.

    $H \leftarrow H + (s - Hy) s^T / s^Ty$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.McCormick(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. D. Pearson, "Variable metric methods of minimisation", Computer J. 12 (1969), algorithm 2.
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": _STEP, "hessian": _PULLED_CHANGE}


class Pearson(QuasiNewton):
    r"""The rank-one update along Hy.

    $H \leftarrow H + (s - Hy) (Hy)^T / y^THy$. It keeps the inverse only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.Pearson(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. D. Pearson, "Variable metric methods of minimisation", Computer J. 12 (1969).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: H @ pair.y)}


class Greenstadt1(QuasiNewton):
    r"""The rank-one update along the gradient before the step.

    $H \leftarrow H + (s - Hy) c^T / c^Ty,\ c = g_-$. It keeps the inverse only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.Greenstadt1(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        E. Spedicato, Z. Huang, "Numerical experience with Newton-like methods for nonlinear
        algebraic systems", Computing 58 (1997).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: pair.before)}


class Greenstadt2(QuasiNewton):
    r"""The rank-one update along H(Hy).

    $H \leftarrow H + (s - Hy) c^T / c^Ty,\ c = H(Hy)$. It keeps the inverse only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.Greenstadt2(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        E. Spedicato, Z. Huang, "Numerical experience with Newton-like methods for nonlinear
        algebraic systems", Computing 58 (1997).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: H @ (H @ pair.y))}


class ICUM(QuasiNewton):
    r"""The inverse column update: one column changes, the one of y's largest component.

    $H_{:j} \leftarrow H_{:j} + (s - Hy) / y_j,\ j = \arg\max |y_j|$. It keeps the inverse only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ICUM(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        V. L. R. Lopes, J. M. Martinez, "Convergence properties of the inverse column-updating method", OMS 6 (1995).
    """

    symmetric = False
    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(column)}
