"""SPlus: signs in the eigenbasis of Shampoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_at_least_one, fraction
from .._transforms import MatrixTransform
from ._axes import work
from ._eigenbasis import eigenvectors
from ._orthogonalize import as_matrix


class SPlus(MatrixTransform):
    r"""The sign of the momentum in Shampoo's eigenbasis, rotated back: whitening that stays bounded between bases.

    $L \leftarrow \beta_2 L + (1-\beta_2) U U^T$, R likewise, $M \leftarrow \beta_1 M + (1-\beta_1) U$; at every T-th step
    $Q_L, Q_R$ become the eigenvectors of L and R; and
    $u \leftarrow \frac{2}{m+n}\, Q_L \operatorname{sign}(Q_L^T M Q_R)\, Q_R^T$. Vectors, and matrices with an axis above
    `max_dim`, take $10^{-3}\operatorname{sign}(M)$. The authors evaluate at an average of the parameters over steps
    (`torch.optim.swa_utils.AveragedModel` makes one) and take a step size of 0.1.

    Args:
        beta1: Memory of the momentum.
        beta2: Memory of the covariances.
        precond_freq: Steps between two eigendecompositions, T.
        max_dim: The longest axis that is rotated.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.diag(torch.tensor([1.0, 8.0])))
        >>> _ = mo.Optimizer([w], m.SPlus(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([[0.7500, 0.0000],
                [0.0000, 7.7500]])

    References:
        K. Frans, S. Levine, P. Abbeel, "A stable whitening optimizer for efficient neural network training", 2025,
        Algorithm 1.
    """

    counts = True
    ranges = {fraction: ("beta1", "beta2"), check_at_least_one: ("precond_freq", "max_dim")}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.999, precond_freq: int = 100, max_dim: int = 10_000) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"] = torch.zeros_like(tensor)
        matrix = as_matrix(tensor)
        if matrix is not None and max(matrix.shape) <= setting["max_dim"]:
            for key, size in zip(("left", "right"), matrix.shape, strict=True):
                state[f"{key}_covariance"] = tensor.new_zeros(size, size)
                state[f"{key}_basis"] = torch.eye(size, dtype=tensor.dtype, device=tensor.device)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        if "left_basis" not in state:
            return
        x = tensor.reshape(tensor.shape[0], -1)
        state["left_covariance"].lerp_(x @ x.mH, 1 - setting["beta2"])
        state["right_covariance"].lerp_(x.mH @ x, 1 - setting["beta2"])
        if (state["step"] - 1) % setting["precond_freq"] == 0:
            for key in ("left", "right"):
                state[f"{key}_basis"] = eigenvectors(state[f"{key}_covariance"]).contiguous()

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        mean = state["exp_avg"]
        if "left_basis" not in state:
            out: Tensor = mean.sgn() * 1e-3
            return out.to(tensor.dtype)
        left, right = state["left_basis"], state["right_basis"]
        rotated = left.mH @ mean.reshape(len(left), -1) @ right
        # In a basis of its own the momentum is diagonal: what is beside it is rounding, which has no sign.
        size = rotated.abs()
        floor = size.amax() * (sum(size.shape) * torch.finfo(size.dtype).eps)
        out = left @ torch.where(size > floor, rotated.sgn(), 0.0) @ right.mH * (2 / (len(left) + len(right)))
        return out.reshape(tensor.shape).to(tensor.dtype)
