"""Adafactor: second moments of matrices from those of their rows and columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import allow_none, positive
from .._transforms import MatrixTransform
from ._axes import work


class Adafactor(MatrixTransform):
    r"""Divides the update by the root of a second moment that is kept as a vector of rows and one of columns.

    With $\hat\beta_t = 1 - t^{-\gamma}$, $R_t = \hat\beta_t R_{t-1} + (1-\hat\beta_t)\,(u^2 + \epsilon_1)\,1_n$,
    $C_t$ likewise over rows, $\hat V_t = R_t C_t / (1_m^T R_t)$, $\hat u = u/\sqrt{\hat V_t}$ and
    $u \leftarrow \hat u / \max(1, \mathrm{RMS}(\hat u)/d)$; with `relative_step` also times
    $\max(\epsilon_2, \mathrm{RMS}(x))\,\rho_t$, $\rho_t = \min(10^{-2}, 1/\sqrt t)$. Vectors keep a whole second moment.
    Leading axes of tensors with more than two are a batch of matrices.

    Args:
        decay: The power $\gamma$ of the memory.
        eps: Added to the square of the update, $\epsilon_1$.
        clip: The largest root mean square of a scaled update, d; None for no limit.
        relative_step: Scale steps by the size of the parameters and by a schedule of the paper, so that no step size is
            needed; put `LR(1.0)` after it, if anything.
        scale_eps: The least size of a parameter that counts, $\epsilon_2$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(64, 32))
        >>> link = m.Adafactor()
        >>> _ = mo.Optimizer([w], link, m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data.mean(), sum(t.numel() for t in link.state[w].values() if isinstance(t, torch.Tensor))
        (tensor(0.7500), 96)

    References:
        N. Shazeer, M. Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018, Algorithms 4 and 5.
    """

    uses_params = True

    counts = True
    ranges = {positive: ("decay", "eps", "scale_eps"), allow_none(positive): ("clip",)}

    def __init__(
        self,
        *,
        decay: Any = 0.8,
        eps: Any = 1e-30,
        clip: float | None = 1.0,
        relative_step: bool = False,
        scale_eps: Any = 1e-3,
    ) -> None:
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        factor(state, work(tensor).abs())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        memory = 1 - state["step"] ** -setting["decay"]
        update_factors(state, work(tensor).abs().square() + setting["eps"], memory)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        if not tensor.numel():
            return tensor
        out = work(tensor) * rebuild(state).rsqrt()
        if setting["clip"] is not None:
            out = out / (root_mean_square(out) / setting["clip"]).clamp(min=1.0)
        if setting["relative_step"]:
            size = root_mean_square(work(param)).clamp(min=setting["scale_eps"])
            out = out * size * min(1e-2, state["step"] ** -0.5)
        return out.to(tensor.dtype)


def factor(state: Any, like: Tensor, prefix: str = "") -> None:
    """Zeros for the second moment of a real tensor: rows and columns of a matrix, the whole of a vector."""
    if like.dim() >= 2:
        state[f"{prefix}rows"] = like.new_zeros(like.shape[:-1])
        state[f"{prefix}columns"] = like.new_zeros((*like.shape[:-2], like.shape[-1]))
    else:
        state[f"{prefix}whole"] = torch.zeros_like(like)


def update_factors(state: Any, square: Tensor, memory: Any, prefix: str = "") -> None:
    """One more square for the running means."""
    if not square.numel():
        return
    if square.dim() >= 2:
        state[f"{prefix}rows"].lerp_(square.mean(-1), 1 - memory)
        state[f"{prefix}columns"].lerp_(square.mean(-2), 1 - memory)
    else:
        state[f"{prefix}whole"].lerp_(square, 1 - memory)


def rebuild(state: Any, prefix: str = "") -> Tensor:
    """The second moment of a tensor, from its factors where it has them."""
    if f"{prefix}whole" in state:
        return state[f"{prefix}whole"]
    rows, columns = state[f"{prefix}rows"], state[f"{prefix}columns"]
    # Means instead of sums: rows / mean(rows) times columns is R C / (1^T R) of the paper.
    return (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)


def root_mean_square(tensor: Tensor) -> Tensor:
    """The root of the mean square of a tensor's numbers."""
    return torch.linalg.vector_norm(tensor) / max(tensor.numel(), 1) ** 0.5
