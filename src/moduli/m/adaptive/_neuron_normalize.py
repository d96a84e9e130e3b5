"""Rows of orthogonalised updates brought to one size: NorMuon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import fraction, positive
from .._transforms import MatrixTransform
from ._orthogonalize import as_matrix, from_matrix


class NeuronNormalize(MatrixTransform):
    r"""Divides each row of a matrix, the weights of one neuron, by a running root mean square of that row.

    $v_i \leftarrow \beta v_i + (1-\beta)\,\operatorname{mean}_j(u_{ij}^2)$, $\hat u_{ij} = u_{ij}/(\sqrt{v_i} + \epsilon)$ and
    $u \leftarrow 0.2\sqrt{mn}\;\hat u/\|\hat u\|$, the size of a step of Adam. After momentum and `Orthogonalize` it is
    NorMuon (`presets.normuon`). Tensors that are no matrices are left as they are.

    Args:
        beta: Memory of the mean squares.
        eps: Added to the denominator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.NeuronNormalize(), [torch.tensor([[3.0, 3.0], [1.0, -1.0]])])
        [tensor([[ 0.2000,  0.2000],
                [ 0.2000, -0.2000]])]

    References:
        Z. Li et al., "NorMuon: making Muon more efficient and scalable", 2025, Algorithm 1.
    """

    differentiable = True
    ranges = {fraction: ("beta",), positive: ("eps",)}

    def __init__(self, *, beta: Any = 0.95, eps: Any = 1e-8) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = as_matrix(tensor)
        wide = torch.promote_types(tensor.abs().dtype, torch.float32)
        state["mean_sq"] = tensor.new_zeros(0 if x is None else x.shape[0], dtype=wide)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = as_matrix(tensor)
        if x is not None:
            square = x.to(torch.promote_types(x.dtype, torch.float32)).abs().square().mean(-1)
            state["mean_sq"].lerp_(square, 1 - setting["beta"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = as_matrix(tensor)
        if x is None:
            return tensor
        out = x / (state["mean_sq"].sqrt() + setting["eps"]).unsqueeze(-1)
        norm = torch.linalg.vector_norm(out)
        out = out * (0.2 * x.numel() ** 0.5 / torch.where(norm > 0, norm, 1.0))
        return from_matrix(out, tensor).to(tensor.dtype)
