"""Dion: orthonormal updates of low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_at_least_one, fraction
from .._transforms import BufferTransform
from ._orthogonalize import as_matrix


class Dion(BufferTransform):
    r"""Momentum, orthonormalised along r directions that one step of power iteration follows, with error feedback.

    $B = M + U,\quad P = \operatorname{orth}(B Q),\quad R = B^T P,\quad M \leftarrow B - (1-\mu) P R^T,\quad
    Q \leftarrow R$ with columns of length one, and $u \leftarrow \sqrt{m/n}\, P Q^T$ for an m x n matrix. What the r
    directions did not take stays in M whole. Tensors that are no matrices keep momentum $\mu$.

    Args:
        momentum: The part of the followed directions that stays in the buffer, $\mu$.
        rank: How many directions, r; a fraction is taken of the shorter side.
        seed: Draws the first directions from a generator of its own.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.eye(4))
        >>> opt = mo.Optimizer([w], m.Dion(rank=4, seed=0), m.LR(0.1))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool((w - 0.9 * torch.eye(4)).abs().max() < 1e-5)
        True

    References:
        K. Ahn et al., "Dion: distributed orthonormalized updates", 2025, Algorithm 1.
    """

    members = "batched"
    buffers = {"momentum": None}
    ranges = {fraction: ("momentum",)}

    def __init__(self, *, momentum: Any = 0.95, rank: int | float = 0.25, seed: int | None = None) -> None:
        if not isinstance(rank, float):
            check_at_least_one("Dion", rank=rank)
        elif not 0 < rank <= 1:
            raise ValueError(
                f"Dion: rank is {rank!r}; give a whole number, or a fraction of the shorter side up to 1.0"
            )
        super().__init__({"momentum": momentum, "rank": rank})
        self.seed = seed

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        matrix = as_matrix(tensor)
        if matrix is None:
            return
        short, rank = min(matrix.shape), setting["rank"]
        rank = max(1, round(rank * short)) if isinstance(rank, float) else min(rank, short)
        wide = torch.promote_types(tensor.dtype, torch.float32)
        generator = self.get_generator(tensor.device, self.seed)
        drawn = torch.randn(matrix.shape[1], rank, dtype=wide, device=tensor.device, generator=generator)
        state["right"] = torch.linalg.qr(drawn)[0]
        state["left"] = drawn.new_zeros(matrix.shape[0], rank)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        mu = setting["momentum"]
        if "right" not in state:
            state["momentum"].mul_(mu).add_(tensor)
            return
        total = (state["momentum"] + tensor).reshape(tensor.shape[0], -1).to(state["right"].dtype)
        left = torch.linalg.qr(total @ state["right"])[0]
        right = total.mH @ left
        rest = total - (1 - mu) * left @ right.mH
        state["momentum"].copy_(rest.reshape(tensor.shape))
        size = torch.linalg.vector_norm(right, dim=0, keepdim=True)
        # A direction in which nothing was found stays as it was, so that it can be followed later.
        state["right"] = torch.where(size > 0, right / torch.where(size > 0, size, 1.0), state["right"])
        state["left"] = torch.where(size > 0, left, 0.0)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if "right" not in state:
            return state["momentum"].clone()
        rows, columns = len(state["left"]), len(state["right"])
        found: Tensor = (rows / columns) ** 0.5 * state["left"] @ state["right"].mH
        return found.reshape(tensor.shape).to(tensor.dtype)
