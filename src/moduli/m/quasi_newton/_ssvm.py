"""Self-scaling variable metric updates."""

from __future__ import annotations

from typing import Any, ClassVar

from ._dense import QuasiNewton
from ._rules import Rule, ssvm


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

    def __init__(self, *, switch: int = 3, **settings: Any) -> None:
        if switch not in (1, 2, 3, 4):
            raise ValueError(f"SSVM: switch is {switch!r}; the strategies are 1, 2, 3 and 4")
        super().__init__(_more={"switch": switch}, **settings)
