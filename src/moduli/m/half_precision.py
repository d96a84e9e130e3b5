"""Parameters of half precision with updates smaller than their rounding: links for the end of a chain.

In bfloat16 the numbers below 1 are 1/256 apart, so that a step of 1e-4 rounds to no step at all. Three remedies, by their memory:

* stochastic rounding, right on average, needs none;
* Kahan's compensated sum stores the rounding error, in the dtype of the parameter;
* master weights store the parameter in single precision.

Each is pointwise, so that it is part of the pass that moves the parameters, and leaves parameters in single precision unmodified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..optim import MasterWeights, RoundingTransform
from ..optim import ranges as check

__all__ = ["Kahan", "MasterWeights", "StochasticRounding"]
_SEEDS = 2**24


class StochasticRounding(RoundingTransform):
    r"""Rounds parameters of half precision up or down by chance, so that they are right on average.

    $x \leftarrow x - u$ lies between two numbers of the dtype, $a \le x - u \le b$, and becomes $b$ with the probability
    $(x - u - a) / (b - a)$, otherwise $a$. It is the last link of a chain. Chance is a hash of the seed, of the number of the
    step, of the position in the tensor and of the parameter: it needs no memory, and a resumed run draws as an uninterrupted one.

    Args:
        seed: Another seed is another run.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        >>> opt = mo.Optimizer([w], m.Adam(), m.LR(1e-4), m.StochasticRounding())
        >>> for _ in range(200):
        ...     w.grad = torch.ones_like(w)
        ...     _ = opt.step()
        >>> round(w.double().mean().item(), 2)
        0.98

    References:
        S. Gupta et al., "Deep learning with limited numerical precision", ICML 2015, section 3.
        P. Zamirai et al., "Revisiting bfloat16 training", arXiv 2010.06192.
    """

    counts = True
    ranges = {check.non_negative: ("seed",)}

    seed: int = 0

    def round_update(self, tensor: Tensor, param: Tensor, state: Any, setting: Any) -> Tensor:
        seed, step = setting["seed"] % _SEEDS, state["step"] % _SEEDS
        return param - kernels.round_stochastically(param - tensor, param, seed, step, setting["dtype"])


class Kahan(RoundingTransform):
    r"""Adds what parameters of half precision lost by rounding to their next step (a compensated sum).

    $x' = \mathrm{round}(x + (c - u)),\quad c' = (c - u) - (x' - x)$. It is the last link of a chain. The compensation c has the
    dtype of the parameter: two bytes for each number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> opt = mo.Optimizer([w], m.Adam(), m.LR(1e-4), m.Kahan())
        >>> for _ in range(200):
        ...     w.grad = torch.ones_like(w)
        ...     _ = opt.step()
        >>> round(w.item(), 2)
        0.98

    References:
        W. Kahan, "Further remarks on reducing truncation errors", Communications of the ACM 8, 1965.
        P. Zamirai et al., "Revisiting bfloat16 training", arXiv 2010.06192.
    """

    narrow_states = ("compensation",)

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        if setting["dtype"].itemsize == 2:
            state["compensation"] = torch.zeros_like(tensor, dtype=setting["dtype"])

    def round_update(self, tensor: Tensor, param: Tensor, state: Any, setting: Any) -> Tensor:
        step = state["compensation"] - tensor
        moved = (param + step).to(setting["dtype"]).float()
        state["compensation"] = step - (moved - param)
        return param - moved
