"""The method of Davidon, Fletcher and Powell."""

from __future__ import annotations

from typing import ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, bfgs, dfp


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
