"""Barzilai and Borwein's step sizes, plain and stabilised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from ...optim import Chainable
from .._checks import allow_none, check_at_least_one, choice, positive
from .._lists import dot, norm
from .._scalars import choose, divide, larger, root, smaller
from ._step_scale import DifferenceStep

Type = Literal["long", "short", "geom", "geom-fallback"]
TYPES = ("long", "short", "geom", "geom-fallback")


def _step(s: list[Tensor], y: list[Tensor], kind: str, otherwise: Any) -> Any:
    """The step size; another where the curvature along the last step is not positive."""
    ss, sy, yy = dot(s, s), dot(s, y), dot(y, y)
    if kind == "long":
        found = divide(ss, sy, 0.0)
    elif kind == "short":
        found = larger(divide(sy, yy, 0.0), 0.0)
    else:
        found = root(divide(ss, yy, 0.0))
        found = found if kind == "geom-fallback" else choose(sy > 0, found, 0.0)
    usable = (found > 0) & (found < math.inf)
    return choose(usable, found, otherwise)


class BarzilaiBorwein(DifferenceStep):
    r"""Multiplies the update by a step size from the last step s and the change y of the gradient along it.

    The long one is $\frac{s^T s}{s^T y}$, the short one $\frac{s^T y}{y^T y}$; their geometric mean is $\|s\| / \|y\|$.
    Its model of the Hessian, a multiple of the identity, can be used by trust regions.

    Args:
        type: "long", "short", "geom", or "geom-fallback", which takes the mean where the curvature is negative too.
        alpha_0: The first step, and that where the curvature is not positive.
        use_grad: Differences of the gradient; False: of the update.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.BarzilaiBorwein(alpha_0=0.1))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-6
        True

    References:
        J. Barzilai, J. M. Borwein, "Two-point step size gradient methods", IMA J. Numer. Anal. 1988.
    """

    def __init__(
        self, *, type: Type = "geom", alpha_0: float = 1e-7, use_grad: bool = True, inner: Chainable | None = None
    ) -> None:
        choice("BarzilaiBorwein", "type", type, TYPES)
        super().__init__(locals())

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        return _step(s, y, setting["type"], setting["alpha_0"])


class BBStab(DifferenceStep):
    r"""Barzilai and Borwein's step, cut so that no step is longer than $\Delta$: $\alpha = \min(\alpha_{BB}, \Delta / \|g\|)$.

    Args:
        c: Where `delta` is not given, $\Delta$ is c times the shortest of the first steps.
        delta: The longest step.
        type: "long", "short", "geom", or "geom-fallback".
        alpha_0: The first step, and that where the curvature is not positive.
        use_grad: Differences of the gradient; False: of the update.
        inf_iters: How many steps are made before $\Delta$ is known.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.BBStab(alpha_0=0.1, delta=0.5))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> round(w.item(), 4)
        2.7

    References:
        O. Burdakov, Y.-H. Dai, N. Huang, "Stabilized Barzilai-Borwein method", J. Comput. Math. 2019.
    """

    ranges = {positive: ("alpha_0", "c"), check_at_least_one: ("inf_iters",), allow_none(positive): ("delta",)}

    def __init__(
        self,
        *,
        c: float = 0.2,
        delta: float | None = None,
        type: Type = "geom",
        alpha_0: float = 1e-7,
        use_grad: bool = True,
        inf_iters: int = 3,
        inner: Chainable | None = None,
    ) -> None:
        choice("BBStab", "type", type, TYPES)
        super().__init__(locals())

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        alpha = _step(s, y, setting["type"], setting["alpha_0"])
        limit = setting["delta"]
        if limit is None:
            memory = self.global_state
            seen = memory.get("seen", 0)
            # The first difference is that of the given first step, which says nothing about the problem.
            if 0 < seen <= setting["inf_iters"]:
                memory["shortest"] = smaller(norm(s), memory.get("shortest", math.inf))
            memory["seen"] = seen + 1
            limit = setting["c"] * memory["shortest"] if seen >= setting["inf_iters"] else math.inf
        length = norm(grads)
        return smaller(alpha, divide(limit, length, math.inf))
