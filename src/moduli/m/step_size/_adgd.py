"""Adaptive gradient descent without a line search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from ...optim import Chainable
from .._checks import choice
from .._lists import norm
from ._differences import DifferenceStep

__all__ = ["AdGD"]


class AdGD(DifferenceStep):
    r"""Descent whose step follows the local curvature $L = \|y\| / \|s\|$ and grows no faster than the theory allows.

    With $\theta$ the ratio of the last two steps, variant 1 takes
    $\alpha = \min(\sqrt{1+\theta}\,\alpha_-,\ 1/(\sqrt2 L))$ (1/(2L) without `sqrt`), variant 2
    $\alpha = \min(\sqrt{2/3+\theta}\,\alpha_-,\ \alpha_- / \sqrt{[2\alpha_-^2 L^2 - 1]_+})$. The first step is only there to
    measure L; the second is $1/(\sqrt2 L)$.

    Args:
        variant: 1 (2020) or 2 (2023, longer steps).
        alpha_0: The first step.
        sqrt: The longer step of variant 1.
        use_grad: Differences of the gradient; False: of the update.
        inner: Links that transform the update before it is scaled.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.AdGD())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-3
        True

    References:
        Y. Malitsky, K. Mishchenko, "Adaptive gradient descent without descent", ICML 2020.
        Y. Malitsky, K. Mishchenko, "Adaptive proximal gradient method for convex optimization", 2023.
    """

    def __init__(
        self,
        *,
        variant: Literal[1, 2] = 2,
        alpha_0: float = 1e-7,
        sqrt: bool = True,
        use_grad: bool = True,
        inner: Chainable | None = None,
    ) -> None:
        choice("AdGD", "variant", variant, (1, 2))
        super().__init__({"variant": variant, "sqrt": sqrt}, alpha_0, use_grad, inner)

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> float:
        last: float = self.global_state["alpha"]
        theta: float = self.global_state.get("theta", math.inf)
        moved, changed = norm(s), norm(y)
        curvature = changed / moved if moved > 0 else 0.0
        safe = 2.0 if setting["variant"] == 1 and not setting["sqrt"] else math.sqrt(2.0)
        if setting["variant"] == 1 or math.isinf(theta):
            bound = 1 / (safe * curvature) if curvature > 0 else math.inf
            grown = math.sqrt(1 + theta) * last
        else:
            over = 2 * (last * curvature) ** 2 - 1
            bound = last / math.sqrt(over) if over > 0 else math.inf
            grown = math.sqrt(2 / 3 + theta) * last
        alpha = min(grown, bound)
        if math.isinf(alpha):  # nothing measured yet
            return last
        restart = math.isinf(theta) and setting["variant"] == 2
        self.global_state["theta"] = 1 / 3 if restart else alpha / last
        return alpha
