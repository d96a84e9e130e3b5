"""The symmetric rank-one update."""

from __future__ import annotations

from typing import Any, ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, sr1


class SR1(QuasiNewton):
    r"""The symmetric rank-one update, which may become indefinite as the Hessian is; best in a trust region.

    $H \leftarrow H + z z^T / z^Ty,\ z = s - Hy$, unless $|z^Ty|$ is below $10^{-8}\|z\|\|y\|$ (or `tol`).

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

    # Scaled with the first pair, the inverse would have the right curvature along y already, and the pair be lost.
    def __init__(self, *, init_scale: float | str = 1.0, **settings: Any) -> None:
        super().__init__(init_scale=init_scale, **settings)
