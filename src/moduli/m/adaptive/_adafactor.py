"""Moments in less memory: of rows and columns, of blocks, of low rank.

* Adafactor: second moments of matrices from those of their rows and columns.
* CAME: Adafactor with momentum that is trusted where it is stable.
* Adam-mini: one second moment per block of a parameter.
* Dion: orthonormal updates of low rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import BufferTransform, MatrixLink, MatrixTransform, Setting
from ...optim import ranges as check
from ._axes import without_last, without_second_last, work
from ._orthogonalize import as_matrix


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
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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

    search_ranges = {"lr": UNIT_STEPS}

    uses_params = True

    counts = True
    follows = {"rows": without_last, "columns": without_second_last}
    ranges = {check.positive: ("decay", "eps", "scale_eps"), check.allow(check.positive, None): ("clip",)}

    decay: Setting = 0.8
    eps: Setting = 1e-30
    clip: float | None = 1.0
    relative_step: bool = False
    scale_eps: Setting = 1e-3

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        factor(state, work(tensor).abs())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        memory = 1 - state["step"] ** -setting["decay"]
        update_factors(state, work(tensor).abs().square() + setting["eps"], memory)

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
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
    """Start the second moment of a real tensor as zeros: rows and columns of a matrix, the whole of a vector.

    Args:
        state: Where it is stored.
        like: The tensor.
        prefix: The start of the keys.
    """
    if like.dim() >= 2:
        state[f"{prefix}rows"] = like.new_zeros(like.shape[:-1])
        state[f"{prefix}columns"] = like.new_zeros((*like.shape[:-2], like.shape[-1]))
    else:
        state[f"{prefix}whole"] = torch.zeros_like(like)


def update_factors(state: Any, square: Tensor, memory: Any, prefix: str = "") -> None:
    """Update the running means with one more square.

    Args:
        state: Where they are stored.
        square: The square.
        memory: How much of the means is kept.
        prefix: The start of the keys.
    """
    if not square.numel():
        return
    # A mean that overflows would stay infinite, so that rows / mean(rows) would stay NaN.
    limit = torch.finfo(square.dtype).max / square.numel()
    if square.dim() >= 2:
        state[f"{prefix}rows"].lerp_(square.mean(-1).clamp(max=limit), 1 - memory)
        state[f"{prefix}columns"].lerp_(square.mean(-2).clamp(max=limit), 1 - memory)
    else:
        state[f"{prefix}whole"].lerp_(square.clamp(max=limit), 1 - memory)


def rebuild(state: Any, prefix: str = "") -> Tensor:
    """Return the second moment of a tensor, from its factors if it has them."""
    if f"{prefix}whole" in state:
        return state[f"{prefix}whole"]
    rows, columns = state[f"{prefix}rows"], state[f"{prefix}columns"]
    # Means instead of sums: rows / mean(rows) times columns is R C / (1^T R) of the paper.
    return (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)


def root_mean_square(tensor: Tensor) -> Tensor:
    """Return the root of the mean square of a tensor's elements."""
    return torch.linalg.vector_norm(tensor) / max(tensor.numel(), 1) ** 0.5


class CAME(MatrixTransform):
    r"""Scales by a factored second moment, takes a running mean, and divides by how unstable that mean is.

    $\hat u = u/\sqrt{\hat V}$ clipped as in `Adafactor`, with memory $\beta_2$;
    $m = \beta_1 m + (1-\beta_1)\hat u$; the instability $(\hat u - m)^2 + \epsilon_2$ has factored running means of memory
    $\beta_3$, rebuilt as S, and $u \leftarrow m/\sqrt S$. Of vectors the step is m.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the second moment.
        beta3: Memory of the instability.
        eps1: Added to the square of the update.
        eps2: Added to the instability.
        clip: The largest root mean square of a scaled update, d.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(8, 8))
        >>> opt = mo.Optimizer([w], m.CAME(), m.LR(0.01))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        Y. Luo et al., "CAME: confidence-guided adaptive memory efficient optimization", ACL 2023, Algorithm 2.
    """

    search_ranges = {"lr": UNIT_STEPS}

    follows = {
        **Adafactor.follows,
        "instability_rows": without_last,
        "instability_columns": without_second_last,
    }
    ranges = {check.fraction: ("beta1", "beta2", "beta3"), check.positive: ("eps1", "eps2", "clip")}

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    beta3: Setting = 0.9999
    eps1: Setting = 1e-30
    eps2: Setting = 1e-16
    clip: Setting = 1.0

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"] = torch.zeros_like(tensor)
        factor(state, tensor.abs())
        if tensor.dim() >= 2:
            factor(state, tensor.abs(), "instability_")

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        if not tensor.numel():
            return
        u = work(tensor)
        update_factors(state, u.abs().square() + setting["eps1"], setting["beta2"])
        scaled = u * rebuild(state).rsqrt()
        scaled = scaled / (root_mean_square(scaled) / setting["clip"]).clamp(min=1.0)
        state["exp_avg"].lerp_(scaled, 1 - setting["beta1"])
        if tensor.dim() >= 2:
            away = (scaled - state["exp_avg"]).abs().square() + setting["eps2"]
            update_factors(state, away, setting["beta3"], "instability_")

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        out: Tensor = state["exp_avg"]
        if tensor.dim() >= 2 and tensor.numel():
            out = out * rebuild(state, "instability_").rsqrt()
        return out.to(tensor.dtype, copy=True)


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
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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

    search_ranges = {"lr": UNIT_STEPS}

    differentiable = True

    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    follows = {"exp_avg_sq": lambda axes: (0,)}
    ranges = {check.fraction: ("beta1", "beta2"), check.non_negative: ("eps",)}

    projects = {"grad": ("exp_avg",)}

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    eps: Setting = 1e-8
    blocks: int | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(_mean_squares(tensor, setting["blocks"]))

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        # Not lerp_: of a mean that has overflowed it is inf - inf.
        beta2 = setting["beta2"]
        state["exp_avg_sq"].mul_(beta2).add_(_mean_squares(tensor, setting["blocks"]) * (1 - beta2))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        t = state["step"]
        below = (state["exp_avg_sq"] / (1 - setting["beta2"] ** t)).sqrt() + setting["eps"]
        mean = state["exp_avg"] / (1 - setting["beta1"] ** t)
        out: Tensor = mean.reshape(*below.shape, -1) / below.unsqueeze(-1)
        return out.reshape(tensor.shape).to(tensor.dtype)


def _mean_squares(tensor: Tensor, blocks: int | None) -> Tensor:
    """Return one mean square per block."""
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


def _check_rank(link: str, key: str, rank: Any) -> None:
    (check.probability if isinstance(rank, float) else check.at_least_one)(link, key, rank)


class Dion(MatrixLink, BufferTransform):
    r"""Momentum, orthonormalised along r directions that one step of power iteration follows, with error feedback.

    $B = M + U,\quad P = \operatorname{orth}(B Q),\quad R = B^T P,\quad M \leftarrow B - (1-\mu) P R^T,\quad
    Q \leftarrow R$ with columns of length one, and $u \leftarrow \sqrt{m/n}\, P Q^T$ for an m x n matrix. What the r
    directions did not take stays in M whole. Tensors that are no matrices keep momentum $\mu$.

    Args:
        momentum: The part of the followed directions that stays in the buffer, $\mu$.
        rank: How many directions, r; a fraction is taken of the shorter side.
        seed: Draws the first directions from a generator of its own.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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
    follows = {"left": lambda axes: (0, None), "right": lambda axes: (axes - 1, None)}
    ranges = {
        check.fraction: ("momentum",),
        _check_rank: ("rank",),
        check.positive: ("rank",),
    }

    attributes = ("seed", "batch", "matrix")

    momentum: Setting = 0.95
    rank: int | float = 0.25
    seed: int | None = None
    batch: str | tuple[str, ...] | None = None
    matrix: str | None = None

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
        # A direction without a component of the update is not changed, so that it can be followed later.
        state["right"] = torch.where(size > 0, right / torch.where(size > 0, size, 1.0), state["right"])
        state["left"] = torch.where(size > 0, left, 0.0)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if "right" not in state:
            return state["momentum"].clone()
        rows, columns = len(state["left"]), len(state["right"])
        update: Tensor = (rows / columns) ** 0.5 * state["left"] @ state["right"].mH
        return update.reshape(tensor.shape).to(tensor.dtype)
