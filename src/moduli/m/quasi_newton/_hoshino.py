"""Hoshino's update."""

from __future__ import annotations

from typing import ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, hoshino


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
