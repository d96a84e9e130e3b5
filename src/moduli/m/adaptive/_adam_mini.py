"""Adam-mini: one second moment per block of a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import fraction, non_negative
from .._transforms import MatrixTransform
from ._axes import work


class AdamMini(MatrixTransform):
    r"""Adam with one second moment, the mean over a block, for each output neuron or for each attention head.

    $v_b \leftarrow \beta_2 v_b + (1-\beta_2)\,\operatorname{mean}(u_b^2)$, otherwise as `Adam`. A matrix has a block for each
    index of its first axis, or for each of `blocks` equal runs of it (attention heads: give it for a group of query and
    key weights); a vector is one block. State memory is half of Adam's.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the denominator after bias correction.
        blocks: The number of blocks that the first axis is cut into; None for one block per index.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        >>> _ = mo.Optimizer([w], m.AdamMini(), m.LR(1.0)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([[2.1515, 2.8686],
                [5.1515, 6.8686]])

    References:
        Y. Zhang et al., "Adam-mini: use fewer learning rates to gain more", ICLR 2025, Algorithm 1.
    """

    differentiable = True

    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {fraction: ("beta1", "beta2"), non_negative: ("eps",)}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.999, eps: Any = 1e-8, blocks: int | None = None) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad", "exp_avg")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(_mean_squares(tensor, setting["blocks"]))

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_avg_sq"].lerp_(_mean_squares(tensor, setting["blocks"]), 1 - setting["beta2"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        t = state["step"]
        below = (state["exp_avg_sq"] / (1 - setting["beta2"] ** t)).sqrt() + setting["eps"]
        mean = state["exp_avg"] / (1 - setting["beta1"] ** t)
        out: Tensor = mean.reshape(*below.shape, -1) / below.unsqueeze(-1)
        return out.reshape(tensor.shape).to(tensor.dtype)


def _mean_squares(tensor: Tensor, blocks: int | None) -> Tensor:
    """One mean square per block."""
    if tensor.dim() < 2:
        count = 1
    elif blocks is None:
        count = tensor.shape[0]
    elif isinstance(blocks, int) and not isinstance(blocks, bool) and blocks > 0 and tensor.shape[0] % blocks == 0:
        count = blocks
    else:
        raise ValueError(
            f"AdamMini: blocks is {blocks!r}, but the first axis of a {tuple(tensor.shape)} parameter is cut into equal "
            "blocks; give a divisor of its size, or None"
        )
    square = tensor.abs().square()
    return square.reshape(count, -1).mean(1) if square.numel() else square.new_zeros(count)
