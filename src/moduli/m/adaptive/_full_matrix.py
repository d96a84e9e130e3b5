"""Adagrad with the full matrix."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import allow_none, check_at_least_one, choice, fraction, non_negative
from .._transforms import BufferTransform
from ._axes import power, work


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
        inner: Links that transform the update before it is preconditioned, after the matrix was learnt.
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
    ranges = {non_negative: ("reg",), check_at_least_one: ("precond_freq",), allow_none(fraction): ("beta",)}

    def __init__(
        self,
        *,
        reg: float = 1e-12,
        precond_freq: int = 1,
        beta: float | None = None,
        beta_debias: bool = True,
        init: Literal["identity", "zeros"] = "identity",
        matrix_power: float = -0.5,
        matrix_power_method: Literal["eigh_abs", "eigh"] = "eigh_abs",
        concat_params: bool = True,
        inner: Chainable | None = None,
        accumulator_tfm: Chainable | None = None,
    ) -> None:
        choice("FullMatrixAdagrad", "init", init, ("identity", "zeros"))
        choice("FullMatrixAdagrad", "matrix_power_method", matrix_power_method, ("eigh_abs", "eigh"))
        super().__init__(locals())
        self.add_projected_keys("covariance", "accumulator")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = work(tensor).reshape(-1)
        zeros = torch.zeros(len(x), len(x), dtype=x.dtype, device=x.device)
        state["accumulator"] = zeros.fill_diagonal_(1.0) if setting["init"] == "identity" else zeros
        state["root"] = torch.zeros_like(zeros)  # the accumulator is written in place

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x, beta = work(tensor).reshape(-1), setting["beta"]
        outer = torch.outer(x, x.conj())
        if beta is None:
            state["accumulator"].add_(outer)
        else:
            state["accumulator"].lerp_(outer, 1 - beta)
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
        # What the links make of the matrix is only seen here.
        root = self._root(state, setting) if "accumulator_tfm" in self.children else state["root"]
        out = root @ work(tensor).reshape(-1)
        return out.reshape(tensor.shape).to(tensor.dtype)
