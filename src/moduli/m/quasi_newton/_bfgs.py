"""The method of Broyden, Fletcher, Goldfarb and Shanno."""

from __future__ import annotations

from typing import ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, bfgs, dfp


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
