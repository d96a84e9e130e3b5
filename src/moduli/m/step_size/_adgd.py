"""Adaptive gradient descent without a line search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from ...optim import Chainable
from .._checks import choice
from .._lists import norm
from .._scalars import choose, divide, larger, root, smaller
from ._step_scale import DifferenceStep


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
        super().__init__(locals())

    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        last, theta = self.global_state["alpha"], self.global_state.get("theta", math.inf)
        first = not isinstance(theta, Tensor) and math.isinf(theta)
        curvature = divide(norm(y), norm(s), 0.0)
        safe = 2.0 if setting["variant"] == 1 and not setting["sqrt"] else math.sqrt(2.0)
        if setting["variant"] == 1 or first:
            bound = divide(1.0, safe * curvature, math.inf)
            grown = root(1 + theta) * last
        else:
            over = 2 * (last * curvature) ** 2 - 1
            bound = divide(last, root(larger(over, 0.0)), math.inf)
            grown = root(2 / 3 + theta) * last
        alpha = smaller(bound, grown)
        measured = alpha < math.inf
        if not isinstance(measured, Tensor) and not measured:
            return last
        restart = first and setting["variant"] == 2
        self.global_state["theta"] = choose(measured, 1 / 3 if restart else alpha / last, theta)
        return choose(measured, alpha, last)
