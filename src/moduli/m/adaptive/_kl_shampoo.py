"""KL-Shampoo: Kronecker factors that are estimated together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_at_least_one, fraction, positive
from .._transforms import MatrixTransform
from ._axes import eigh, work
from ._orthogonalize import as_matrix


class KLShampoo(MatrixTransform):
    r"""Shampoo whose two factors minimise the Kullback-Leibler divergence to the second moment of the update.

    For an m x n matrix U, with memory $\beta$,
    $L \leftarrow \beta L + \frac{1-\beta}{n}\, U R^{-1} U^T,\quad R \leftarrow \beta R + \frac{1-\beta}{m}\, U^T L^{-1} U$
    (both from the factors of before), and $u \leftarrow L^{-1/2} U R^{-1/2}$. Inverses are renewed at every T-th step. Both
    factors start as the identity times the mean square of the first update's numbers to the power one half. Tensors that
    are no matrices are divided by the root of their mean square, number by number.

    Args:
        beta: Memory of the factors.
        eps: Added to eigenvalues, relative to their mean.
        precond_freq: Steps between two eigendecompositions, T.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.diag(torch.tensor([1.0, 8.0])))
        >>> opt = mo.Optimizer([w], m.KLShampoo(beta=0.5), m.LR(0.05))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.5)
        True

    References:
        W. Lin et al., "Understanding and improving Shampoo and SOAP via Kullback-Leibler minimization", 2025, section 3.
    """

    counts = True
    ranges = {fraction: ("beta",), positive: ("eps",), check_at_least_one: ("precond_freq",)}

    def __init__(self, *, beta: Any = 0.95, eps: Any = 1e-8, precond_freq: int = 1) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        matrix = as_matrix(tensor)
        if matrix is None:
            state["mean_sq"] = torch.zeros_like(tensor.abs())
            return
        size = matrix.abs().square().mean().sqrt()
        size = torch.where(size > 0, size, 1.0)
        for key, length in zip(("left", "right"), matrix.shape, strict=True):
            identity = torch.eye(length, dtype=tensor.dtype, device=tensor.device)
            state[key] = identity * size
            state[f"{key}_inverse"] = identity / size
            state[f"{key}_root"] = identity * size**-0.5

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor, beta = work(tensor), setting["beta"]
        if "left" not in state:
            state["mean_sq"].lerp_(tensor.abs().square(), 1 - beta)
            return
        x = tensor.reshape(tensor.shape[0], -1)
        rows, columns = x.shape
        left = x @ state["right_inverse"] @ x.mH / columns
        right = x.mH @ state["left_inverse"] @ x / rows
        state["left"].lerp_(left, 1 - beta)
        state["right"].lerp_(right, 1 - beta)
        if (state["step"] - 1) % setting["precond_freq"] == 0:
            for key in ("left", "right"):
                values, vectors = eigh(state[key])
                values = values.clamp(min=0) + setting["eps"] * values.mean().clamp(min=torch.finfo(values.dtype).tiny)
                state[f"{key}_inverse"] = (vectors / values) @ vectors.mH
                state[f"{key}_root"] = (vectors * values**-0.5) @ vectors.mH

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if "left" not in state:
            below = (state["mean_sq"] / (1 - setting["beta"] ** state["step"])).sqrt()
            return (work(tensor) / torch.where(below > 0, below, 1.0)).to(tensor.dtype)
        x = work(tensor).reshape(tensor.shape[0], -1)
        out: Tensor = state["left_root"] @ x @ state["right_root"]
        return out.reshape(tensor.shape).to(tensor.dtype)
