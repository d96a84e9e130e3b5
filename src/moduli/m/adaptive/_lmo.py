"""Linear minimisation oracles: the steepest direction in a norm. Scion's links."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .._checks import check_at_least_one, choice, positive
from .._transforms import MatrixTransform
from ._orthogonalize import as_matrix, from_matrix, orthogonalize

BALLS = ("spectral", "sign", "column", "row", "rms")


class LMO(MatrixTransform):
    r"""Replaces the update by the point of a norm's ball that it points to.

    $u \leftarrow \rho\,\arg\max_{\|z\| \le 1}\langle u, z\rangle$. For an m x n matrix (outputs by inputs): "spectral"
    $\sqrt{m/n}\,U V^T$; "sign" $\frac1n \operatorname{sign}(u)$; "column" each column $\sqrt m\,c/\|c\|$; "row" each row
    $\sqrt{1/n}\,r/\|r\|$; "rms" $\sqrt{\text{size}}\,u/\|u\|$ for any tensor. A vector under a matrix's ball takes "rms",
    for "sign" its sign. Momentum before it and `LR` after it make Scion (`presets.scion`).

    Args:
        ball: The norm.
        radius: The radius $\rho$.
        steps: Iterations of the orthogonalisation.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.LMO("rms", radius=2.0), [torch.tensor([3.0, 4.0])])
        [tensor([1.6971, 2.2627])]

    References:
        T. Pethick et al., "Training deep learning models with norm-constrained LMOs", ICML 2025, Tables 2 and 3.
    """

    ranges = {positive: ("radius",), check_at_least_one: ("steps",)}

    def __init__(
        self,
        ball: Literal["spectral", "sign", "column", "row", "rms"] = "spectral",
        *,
        radius: Any = 1.0,
        steps: int = 5,
    ) -> None:
        choice("LMO", "ball", ball, BALLS)
        super().__init__(locals())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        ball, wide = setting["ball"], torch.promote_types(tensor.dtype, torch.float32)
        x = as_matrix(tensor.to(wide))
        if ball == "sign":
            out = tensor.to(wide).sgn() / (tensor[0].numel() if tensor.dim() > 1 and tensor.numel() else 1)
        elif x is None or ball == "rms":
            out = _unit(tensor.to(wide), None) * tensor.numel() ** 0.5
        elif ball == "spectral":
            rows, columns = x.shape[-2:]
            out = from_matrix(orthogonalize(x, "newtonschulz", setting["steps"]), tensor) * (rows / columns) ** 0.5
        elif ball == "column":
            out = from_matrix(_unit(x, -2), tensor) * x.shape[-2] ** 0.5
        else:
            out = from_matrix(_unit(x, -1), tensor) / x.shape[-1] ** 0.5
        return (out * setting["radius"]).to(tensor.dtype)


def _unit(tensor: Tensor, dim: int | None) -> Tensor:
    norm = torch.linalg.vector_norm(tensor, dim=dim, keepdim=dim is not None)
    return tensor / torch.where(norm > 0, norm, 1.0)
