"""Quasi-Newton links by their rule.

* Quasi-Newton methods whose matrix stays symmetric: a rule under its name, with its own defaults.
* Rank-one updates with a choice of direction; their matrices are not symmetric.
"""

from __future__ import annotations

from typing import ClassVar

from ...optim import ranges as check
from ._dense import QuasiNewton, Rule, bfgs, column, dfp, hoshino, psb, rank_one, sr1, ssvm


class BFGS(QuasiNewton):
    r"""The quasi-Newton method that keeps its matrix positive definite under Wolfe's conditions.

    $H \leftarrow (I - \rho s y^T) H (I - \rho y s^T) + \rho s s^T,\ \rho = 1/s^Ty$; for the Hessian
    $B \leftarrow B + y y^T / s^Ty - B s s^T B / s^TBs$. Pairs with $s^Ty \le$ `tol` are skipped.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.BFGS(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 6.1.
    """

    members = "batched"
    rules: ClassVar[dict[str, Rule]] = {"inverse": bfgs, "hessian": dfp}


class FletcherVMM(QuasiNewton):
    r"""Fletcher's variable metric method, which is `BFGS` for the inverse, under the name of its first author.

    $H \leftarrow (I - \rho s y^T) H (I - \rho y s^T) + \rho s s^T,\ \rho = 1/s^Ty$. It keeps the inverse only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.FletcherVMM(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        R. Fletcher, "A new approach to variable metric algorithms", Computer J. 13 (1970).
    """

    members = "batched"
    rules: ClassVar[dict[str, Rule]] = {"inverse": bfgs}


class DFP(QuasiNewton):
    r"""The first quasi-Newton method, the dual of BFGS.

    $H \leftarrow H + s s^T / s^Ty - H y y^T H / y^THy$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DFP(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        R. Fletcher, M. J. D. Powell, "A rapidly convergent descent method for minimization", Computer J. 6 (1963).
    """

    members = "batched"
    rules: ClassVar[dict[str, Rule]] = {"inverse": dfp, "hessian": bfgs}


class Horisho(QuasiNewton):
    r"""Hoshino's member of Broyden's family (under the name that is in use for it).

    $H \leftarrow H + \frac{(1 + 2 y^THy/s^Ty) s s^T - s y^TH - H y s^T - H y y^T H}{s^Ty + y^THy}$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.Horisho(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        S. Hoshino, "A formulation of variable metric methods", J. Inst. Maths Applics 10 (1972).
    """

    rules: ClassVar[dict[str, Rule]] = {"inverse": hoshino}


class PSB(QuasiNewton):
    r"""The symmetric matrix nearest to the last one that maps s to y.

    $B \leftarrow B + (r s^T + s r^T)/s^Ts - (r^Ts) s s^T/(s^Ts)^2,\ r = y - Bs$. It keeps the Hessian only.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.PSB(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        M. J. D. Powell, "A new algorithm for unconstrained optimization", Nonlinear Programming (1970).
    """

    rules: ClassVar[dict[str, Rule]] = {"hessian": psb}

    inverse: bool = False


class SR1(QuasiNewton):
    r"""The symmetric rank-one update, which may become indefinite as the Hessian is; best in a trust region.

    $H \leftarrow H + z z^T / z^Ty,\ z = s - Hy$, unless $|z^Ty|$ is below $10^{-8}\|z\|\|y\|$ (or `tol`, or rounding).

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SR1(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 6.2.
    """

    rules: ClassVar[dict[str, Rule]] = {"inverse": sr1, "hessian": sr1}

    # Scaled with the first pair, the inverse would have the right curvature along y already, and the pair would have no effect.
    init_scale: float | str = 1.0


class SSVM(QuasiNewton):
    r"""A member of Broyden's family that scales its matrix at each step; `switch` chooses the strategy.

    $H \leftarrow \mu\,(H - H y y^T H / y^THy + \theta\,y^THy\,v v^T) + s s^T / s^Ty$, with
    $v = s / s^Ty - Hy / y^THy$ and $\mu, \theta$ from $s^TH^{-1}s$, $s^Ty$ and $y^THy$.

    Args:
        **settings: Those of `QuasiNewton`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SSVM(), m.StrongWolfe())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        S. S. Oren, E. Spedicato, "Optimal conditioning of self-scaling variable metric algorithms", Math. Prog. 10 (1976).
    """

    rules: ClassVar[dict[str, Rule]] = {"inverse": ssvm}

    ranges = {check.one_of(1, 2, 3, 4): ("switch",)}

    switch: int = 3


# The directions c of H += (s - Hy) c' / c'y, used for the inverse by one method and for the Hessian by another.
class _Nonsymmetric(QuasiNewton):
    """A method whose update of rank one does not keep the matrix symmetric."""

    symmetric = False


_PULLED_STEP = rank_one(lambda H, pair: H.T @ pair.s)
_CHANGE = rank_one(lambda H, pair: pair.y)
_STEP = rank_one(lambda H, pair: pair.s)
_PULLED_CHANGE = rank_one(lambda H, pair: H.T @ pair.y)


class BroydenGood(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": _PULLED_STEP, "hessian": _CHANGE}


class BroydenBad(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": _CHANGE, "hessian": _PULLED_STEP}


class McCormick(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": _STEP, "hessian": _PULLED_CHANGE}


class Pearson(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: H @ pair.y)}


class Greenstadt1(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: pair.before)}


class Greenstadt2(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(lambda H, pair: H @ (H @ pair.y))}


class ICUM(_Nonsymmetric):
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

    rules: ClassVar[dict[str, Rule]] = {"inverse": rank_one(column)}
