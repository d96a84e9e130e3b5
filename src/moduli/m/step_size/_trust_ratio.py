"""Layer-wise trust ratios: LARS and LAMB."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Across
from .._checks import allow_none, non_negative, positive
from .._transforms import UpdateTransform


class TrustRatio(UpdateTransform):
    r"""Rescales the update of each tensor to a fraction of the tensor's own norm.

    $u \leftarrow \eta\,\frac{\phi(\|x\|)}{\|u\| + \lambda\|x\| + \epsilon}\,(u + \lambda x)$ with
    $\phi(z) = \min(\max(z, l), h)$; where either norm is zero the ratio is one. After `Adam` and `WeightDecay` it is
    LAMB (`presets.lamb`), before momentum it is LARS (`presets.lars`).

    Args:
        trust: The fraction $\eta$.
        weight_decay: An L2 penalty $\lambda$ that takes part in the ratio, as in LARS.
        eps: Added to the denominator.
        low: The least norm that a tensor counts for, l.
        high: The largest norm that a tensor counts for, h; None for no limit.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.TrustRatio(), [torch.tensor([0.0, 8.0])], params=[torch.tensor([3.0, 4.0])])
        [tensor([0., 5.])]

    References:
        Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks", 2017 (LARS), equation (6).
        Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020 (LAMB),
        Algorithm 2.
    """

    members = "batched"
    across = Across.MATRICES
    differentiable = True
    ranges = {positive: ("trust",), non_negative: ("weight_decay", "eps", "low"), allow_none(positive): ("high",)}

    def __init__(
        self,
        *,
        trust: Any = 1.0,
        weight_decay: Any = 0.0,
        eps: Any = 0.0,
        low: Any = 0.0,
        high: float | None = None,
    ) -> None:
        super().__init__(locals())

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        x, u = param.to(wide), tensor.to(wide)
        size, step = torch.linalg.vector_norm(x), torch.linalg.vector_norm(u)
        decay = setting["weight_decay"]
        below = step + decay * size + setting["eps"]
        counted = size.clamp(min=setting["low"])
        if setting["high"] is not None:
            counted = counted.clamp(max=setting["high"])
        moves = (counted > 0) & (step > 0)
        ratio = torch.where(moves, counted * setting["trust"] / torch.where(moves, below, 1.0), 1.0)
        return ((u + x * decay) * ratio).to(tensor.dtype)
