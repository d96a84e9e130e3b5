"""Powell's symmetric Broyden update."""

from __future__ import annotations

from typing import Any, ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, psb


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

    def __init__(self, *, inverse: bool = False, **settings: Any) -> None:
        super().__init__(inverse=inverse, **settings)
