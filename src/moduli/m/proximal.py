r"""Proximal gradients: losses plus a penalty that has no gradient, or over a set, by the penalty's proximal operator.

The links take the gradient of the loss (or any update) and have a step size; `m.prox` has the operators. Put them last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..layout import Guard
from ..optim import Across, Setting, UpdateTransform
from ..optim import ranges as check
from . import prox as prox

__all__ = ["FISTA", "ProximalGradient"]


class ProximalGradient(UpdateTransform):
    r"""Steps along the update, then to the point that the penalty prefers: $x \leftarrow \operatorname{prox}_{th}(x - tu)$.

    Args:
        prox: A proximal operator of each parameter: one of `m.prox`, or a function of a tensor and a step.
        lr: The step t; at most the inverse of the largest curvature of the loss.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 0.5]))
        >>> opt = mo.Optimizer([w], m.ProximalGradient(m.prox.L1Penalty(1.0), lr=0.5))
        >>> _ = opt.step(mo.closure(lambda: 0.5 * ((w - torch.tensor([3.0, 0.5])) ** 2).sum()))
        >>> w.data
        tensor([2.5000, 0.0000])

    References:
        P. L. Combettes, V. R. Wajs, "Signal recovery by proximal forward-backward splitting", Multiscale Model. Simul. 4
        (2005), equation 3.8; N. Parikh, S. Boyd, "Proximal algorithms" (2014), section 4.2.
    """

    ranges = {check.non_negative: ("lr",)}
    attributes = ("prox",)
    across = Across.MATRICES

    prox: Callable[[Tensor, Any], Tensor] = field(kw_only=False)
    lr: Setting = 1e-2

    def collect(self, given: Mapping[str, Any]) -> None:
        """Raise TypeError if the operator is no function."""
        super().collect(given)
        operator: Any = self.prox
        if not callable(operator):
            what = type(operator).__name__
            raise TypeError(f"{type(self).__name__}: prox is a {what}; give m.prox.L1Penalty(0.1), or a function")

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        return param - self.move(tensor, param, setting)

    def move(self, tensor: Tensor, param: Tensor, setting: Any) -> Tensor:
        """Return the proximal point of a step along an update.

        Args:
            tensor: The update.
            param: The parameter.
            setting: Its settings.
        """
        return self.prox(param - tensor * setting["lr"], setting["lr"])


class FISTA(ProximalGradient):
    r"""Proximal gradients with Nesterov's momentum, which need the square root of the steps.

    $x_k = \operatorname{prox}_{th}(y_k - tu)$ and $y_{k+1} = x_k + \frac{s_k - 1}{s_{k+1}}(x_k - x_{k-1})$ with
    $s_{k+1} = \frac{1 + \sqrt{1 + 4s_k^2}}{2}$. The parameters are $y$, where gradients are taken; the result is $x$, which
    has exact zeros or is in the set: see `solved`.

    Args:
        prox: A proximal operator of each parameter: one of `m.prox`, or a function of a tensor and a step.
        lr: The step t; at most the inverse of the largest curvature of the loss.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 3.0]))
        >>> link = m.FISTA(m.prox.L1Penalty(1.0), lr=0.2)
        >>> opt = mo.Optimizer([w], link)
        >>> for _ in range(100):
        ...     _ = opt.step(mo.closure(lambda: 0.5 * ((w - torch.tensor([3.0, 0.5])) ** 2).sum()))
        >>> with link.solved([w]):
        ...     print(w.data.round(decimals=3))
        tensor([2., 0.])

    References:
        A. Beck, M. Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse problems", SIAM J.
        Imaging Sci. 2 (2009), equations 4.1 to 4.3.
    """

    points = ("x", "before")
    numbers = ("s",)

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["x"], state["before"] = param.clone(), param.clone()
        state["s"] = 1.0

    def advance(self, state: Any, setting: Any) -> None:
        """Compute the step number t (equation 4.2)."""
        state["s"] = (1 + (1 + 4 * state["s"] ** 2) ** 0.5) / 2

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["before"].copy_(state["x"])
        state["x"].copy_(self.move(tensor, param, setting))  # equation 4.1

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        after = state["s"]
        before = (after**2 - after) ** 0.5  # s_k, from equation 4.2
        x = state["x"]
        return param - x - (x - state["before"]) * ((before - 1) / after)  # to the extrapolated point, equation 4.3

    def solutions(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the point x of each of these parameters; for a parameter without a step, itself."""
        states = [(param, self.state.get(param)) for param in params]
        return [state["x"] if state else param.detach() for param, state in states]

    @contextmanager
    def solved(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Replace these parameters by the points x in a block, to evaluate or save; training continues after it."""
        chosen = list(params)
        with Guard() as guard:
            guard.tensors(chosen)
            with torch.no_grad():
                for param, value in zip(chosen, self.solutions(chosen), strict=True):
                    param.copy_(value)
            yield
            guard.restore()
