"""Weight decay, coupled or not by its place in the chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import non_negative, positive
from .._transforms import UpdateTransform


def penalty(param: Tensor, ord: Any) -> Tensor:
    """The direction in which a weight decays, the gradient of |x|^ord / ord."""
    if ord == 2:
        return param
    if ord == 1:
        return param.sgn()
    # The sign apart from the power: odd powers must not turn, nor fractional ones fail, for negative weights.
    return param.sgn() * param.abs() ** (ord - 1)


class _Decay(UpdateTransform):
    """Weight decay, element by element."""

    elementwise = True
    static = ("ord",)
    ranges = {non_negative: ("weight_decay",), positive: ("ord",)}

    def __init__(self, weight_decay: Any, *, ord: float = 2) -> None:
        super().__init__(locals())


class WeightDecay(_Decay):
    r"""Adds the weights to the update, $u \leftarrow u + \lambda x$, so that they shrink.

    Its place in the chain says how it is coupled: before a preconditioner it is an L2 penalty, between it and `LR` it is
    decoupled (`Adam(), WeightDecay(0.01), LR(1e-3)` is AdamW), after `LR` it does not depend on the step size.

    Args:
        weight_decay: The factor $\lambda$.
        ord: The penalty $|x|^p / p$ is that of this p: 2 adds the weights, 1 their signs, and so on.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.WeightDecay(0.5), m.LR(0.5)).step(mo.closure(lambda: (w * 0).sum()))
        >>> w.data
        tensor([0.7500])

    References:
        I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor + penalty(param, setting["ord"]) * setting["weight_decay"]


class CautiousWeightDecay(_Decay):
    r"""Weight decay where the step shrinks the weight anyway: $u_i \leftarrow u_i + \lambda x_i\,[u_i x_i > 0]$.

    Args:
        weight_decay: The factor $\lambda$.
        ord: The penalty $|x|^p / p$ is that of this p.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> x, u = torch.tensor([1.0, 1.0]), torch.tensor([2.0, -2.0])
        >>> optim.step_tensors(m.CautiousWeightDecay(0.5), [u], params=[x])
        [tensor([ 2.5000, -2.0000])]

    References:
        L. Chen et al., "Cautious weight decay", arXiv:2510.12402, 2025.
    """

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        shrinks = tensor * param > 0
        decay = penalty(param, setting["ord"]) * setting["weight_decay"]
        return torch.where(shrinks, tensor + decay, tensor)
