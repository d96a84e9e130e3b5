"""Preconditioners of whole matrices.

* Adagrad with the full matrix.
* GGT: the full matrix of the last updates, through its small side.
* KL-Shampoo: Kronecker factors that are estimated together.
* SPlus: signs in the eigenbasis of Shampoo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import BufferTransform, Chainable, MatrixTransform, Setting
from ...optim import ranges as check
from ._axes import add_or_average, eigh, power, work
from ._eigenbasis import eigenvectors
from ._orthogonalize import as_matrix


class FullMatrixAdagrad(BufferTransform):
    r"""Adagrad with the sum of outer products, $A \leftarrow A + u u^T,\quad u \leftarrow (A + rI)^{-1/2} u$.

    With `beta` it is the full-matrix RMSprop, with `inner=EMA(0.9)` besides the full-matrix Adam. For small problems: the
    matrix has as many rows as there are parameters.

    Args:
        reg: Added to the diagonal, r.
        precond_freq: The root is computed at every n-th step (and at the first).
        beta: Memory of the matrix; None to sum.
        beta_debias: Correct for the matrix starting at zero (where it starts there).
        init: What the matrix starts at: "identity" or "zeros".
        matrix_power: The exponent.
        matrix_power_method: What to do with eigenvalues below zero (rounding): "eigh_abs" takes their size, "eigh" zero.
        concat_params: One matrix for all parameters; False: one for each tensor.
        inner: Links that transform the update before it is preconditioned, after the matrix was updated.
        accumulator_tfm: Links that transform a copy of the matrix before its root is taken; with them that is at every step.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = mo.Optimizer([w], m.FullMatrixAdagrad(init="zeros"), m.LR(0.5))
        >>> _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.7000, 3.6000])

    References:
        J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization",
        JMLR 2011.
    """

    counts = True
    tfms = {"accumulator_tfm": ("accumulator",)}
    ranges = {
        check.non_negative: ("reg",),
        check.at_least_one: ("precond_freq",),
        check.allow(check.fraction, None): ("beta",),
    }

    projects = {"covariance": ("accumulator",)}

    reg: float = 1e-12
    precond_freq: int = 1
    beta: float | None = None
    beta_debias: bool = True
    init: Literal["identity", "zeros"] = "identity"
    matrix_power: float = -0.5
    matrix_power_method: Literal["eigh_abs", "eigh"] = "eigh_abs"
    concat_params: bool = True
    inner: Chainable | None = None
    accumulator_tfm: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = work(tensor).reshape(-1)
        zeros = torch.zeros(len(x), len(x), dtype=x.dtype, device=x.device)
        state["accumulator"] = zeros.fill_diagonal_(1.0) if setting["init"] == "identity" else zeros
        state["root"] = torch.zeros_like(zeros)  # the accumulator is written in place

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = work(tensor).reshape(-1)
        add_or_average(state["accumulator"], torch.outer(x, x.conj()), setting["beta"])
        if (state["step"] - 1) % setting["precond_freq"] == 0 and "accumulator_tfm" not in self.children:
            state["root"] = self._root(state, setting)

    @staticmethod
    def _root(state: Any, setting: Any) -> Tensor:
        scale, beta = 1.0, setting["beta"]
        if beta is not None and setting["beta_debias"] and setting["init"] == "zeros":
            scale = 1 / (1 - beta ** state["step"])
        return power(
            state["accumulator"] * scale, setting["matrix_power"], setting["reg"], setting["matrix_power_method"]
        )

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        # The matrix as transformed by links is only available here.
        root = self._root(state, setting) if "accumulator_tfm" in self.children else state["root"]
        out = root @ work(tensor).reshape(-1)
        return out.reshape(tensor.shape).to(tensor.dtype)


class GGT(BufferTransform):
    r"""Full-matrix adaptation from the last r updates, $u \leftarrow (M M^T + \epsilon I)^{-1/2} u$ with M their matrix.

    Only the r by r matrix $M^T M = V \Lambda V^T$ is decomposed. With $U = M V \Lambda^{-1/2}$ the result is
    $U (\Lambda + \epsilon)^{-1/2} U^T u + \epsilon^{-1/2}(u - U U^T u)$: the part of the update outside the last ones is
    kept. To run any links in that basis, `GGTBasis`.

    Args:
        history_size: How many updates are kept, r.
        update_freq: Keep every n-th update.
        eig_tol: Eigenvalues below this times the largest count as zero.
        truncate: Use only this many of the largest eigenvalues.
        damping: The number $\epsilon$, above zero.
        rdamping: Added to $\epsilon$, relative to the largest eigenvalue.
        matrix_power: The exponent.
        concat_params: One history for all parameters; False: one for each tensor.
        inner: Links that transform the update before it is preconditioned, after it entered the history.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> _ = mo.Optimizer([w], m.GGT(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.7000, 3.6000])

    References:
        N. Agarwal et al., "Efficient full-matrix adaptive regularization", ICML 2019.
    """

    decides_on_host = True
    ranges = {
        check.at_least_one: ("history_size",),
        check.allow(check.at_least_one, None): ("truncate",),
        check.positive: ("damping",),
        check.non_negative: ("rdamping", "eig_tol"),
    }

    projects = {"grad": ("history",)}

    history_size: int = 100
    update_freq: int = 1
    eig_tol: float = 1e-7
    truncate: int | None = None
    damping: float = 1e-4
    rdamping: float = 0.0
    matrix_power: float = -0.5
    concat_params: bool = True
    inner: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["history"] = deque(maxlen=setting["history_size"])

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = work(tensor).reshape(-1)
        history = state["history"]
        history.append(x.clone())
        state["values"], state["basis"], top = find_span(history, setting["eig_tol"], setting["truncate"])
        state["damping"] = setting["damping"] + setting["rdamping"] * top

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = work(tensor).reshape(-1)
        basis, eps, p = state["basis"], state["damping"], setting["matrix_power"]
        inside = basis.mH @ x
        outside = x - basis @ inside
        out = basis @ (inside * (state["values"] + eps) ** p) + outside * eps**p
        return out.reshape(tensor.shape).to(tensor.dtype)


def find_span(history: Iterable[Tensor], eig_tol: float, truncate: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nonzero eigenvalues of a history's second moment with their vectors, ascending, and the largest of all.

    Args:
        history: Vectors.
        eig_tol: Eigenvalues up to this fraction of the largest count as zero.
        truncate: The most eigenvalues; None for all.
    """
    matrix = torch.stack(list(history), dim=1)
    values, vectors = eigh(matrix.mH @ matrix)
    top = values[-1].clamp(min=0)
    significant = values > eig_tol * top
    if truncate is not None:
        significant[:-truncate] = False
    return values[significant], (matrix @ vectors[:, significant]) / values[significant].sqrt(), top


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
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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

    search_ranges = {"lr": UNIT_STEPS}

    counts = True
    follows = {
        **dict.fromkeys(("left", "left_inverse", "left_root"), lambda axes: (0, 0)),
        **dict.fromkeys(("right", "right_inverse", "right_root"), lambda axes: (axes - 1, axes - 1)),
    }
    ranges = {check.fraction: ("beta",), check.positive: ("eps",), check.at_least_one: ("precond_freq",)}

    beta: Setting = 0.95
    eps: Setting = 1e-8
    precond_freq: int = 1

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


class SPlus(MatrixTransform):
    r"""The sign of the momentum in Shampoo's eigenbasis, rotated back: whitening that stays bounded between bases.

    $L \leftarrow \beta_2 L + (1-\beta_2) U U^T$, R likewise, $M \leftarrow \beta_1 M + (1-\beta_1) U$ and
    $u \leftarrow \frac{2}{m+n}\, Q_L \operatorname{sign}(Q_L^T M Q_R)\, Q_R^T$; after the first step and after every T-th,
    $Q_L, Q_R$ become the eigenvectors of L and R. They begin as identities, as in the authors' code: in a basis of its own an
    update is diagonal, and its signs are a much smaller step. Vectors, and matrices with an axis above
    `max_dim`, take $10^{-3}\operatorname{sign}(M)$. The authors evaluate at an average of the parameters over steps
    (`torch.optim.swa_utils.AveragedModel` makes one) and take a step size of 0.1.

    Args:
        beta1: Memory of the momentum.
        beta2: Memory of the covariances.
        precond_freq: Steps between two eigendecompositions, T.
        max_dim: The longest axis that is rotated.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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
    follows = {
        "left_covariance": lambda axes: (0, 0),
        "left_basis": lambda axes: (0, None),
        "right_covariance": lambda axes: (axes - 1, axes - 1),
        "right_basis": lambda axes: (axes - 1, None),
    }
    ranges = {check.fraction: ("beta1", "beta2"), check.at_least_one: ("precond_freq", "max_dim")}

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    precond_freq: int = 100
    max_dim: int = 10_000

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
        before = state["step"] - 1
        if before == 1 or (before > 0 and before % setting["precond_freq"] == 0):
            for key in ("left", "right"):
                state[f"{key}_basis"] = eigenvectors(state[f"{key}_covariance"]).contiguous()
        x = tensor.reshape(tensor.shape[0], -1)
        state["left_covariance"].lerp_(x @ x.mH, 1 - setting["beta2"])
        state["right_covariance"].lerp_(x.mH @ x, 1 - setting["beta2"])

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
