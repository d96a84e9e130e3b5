"""Shampoo: a matrix along each axis in place of one for everything."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import allow_none, check_at_least_one, choice, fraction, non_negative
from .._transforms import MatrixTransform
from ._axes import accumulate, merge_shape, multiply, power, work


class Shampoo(MatrixTransform):
    r"""Preconditions each axis of a tensor by a root of the covariance of its slices.

    For a tensor with k axes, $C_i \leftarrow C_i + \operatorname{unfold}_i(u)\operatorname{unfold}_i(u)^T$ and
    $u \leftarrow u \times_1 (C_1 + rI)^{-1/2k} \cdots \times_k (C_k + rI)^{-1/2k}$; for a matrix $L^{-1/4}\, u\, R^{-1/4}$.

    Args:
        reg: Added to the diagonal of each covariance, r.
        precond_freq: The roots are computed at every n-th step (and at the first).
        matrix_power: The exponent, in place of $-1/2k$.
        merge_small: Take neighbouring axes after the first as one while their product is at most `max_dim` (a kernel of a
            convolution). Matrices stay matrices, axes of size one do not count.
        max_dim: Longer axes are not preconditioned; a tensor with only such axes is scaled as in Adagrad.
        precondition_1d: Whether vectors are preconditioned by a full matrix; otherwise as in Adagrad.
        adagrad_eps: Added to the denominator of Adagrad.
        matrix_power_method: What to do with eigenvalues below zero (rounding): "eigh_abs" takes their size, "eigh" zero.
        beta: Memory of the covariances; None to sum.
        beta_debias: Correct for the covariances starting at zero, where they have a memory.
        init: What the covariances start at: "identity", or "zeros" as a limit of the paper's small multiple of it. From
            zero, directions that were never seen are left out or blown up: use it with `precond_freq=1` or a large `reg`.
        inner: Links that transform the update before it is preconditioned, after its covariances were learnt.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.diag(torch.tensor([1.0, 8.0])))
        >>> _ = mo.Optimizer([w], m.Shampoo(init="zeros"), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([[0.7500, 0.0000],
                [0.0000, 7.7500]])

    References:
        V. Gupta, T. Koren, Y. Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018.
        R. Anil, V. Gupta, T. Koren, K. Regan, Y. Singer, "Scalable second order optimization for deep learning", 2020.
    """

    counts = True
    static = ("precond_freq", "max_dim")
    ranges = {
        non_negative: ("reg", "adagrad_eps"),
        check_at_least_one: ("precond_freq", "max_dim"),
        allow_none(fraction): ("beta",),
    }

    def __init__(
        self,
        *,
        reg: float = 1e-12,
        precond_freq: int = 10,
        matrix_power: float | None = None,
        merge_small: bool = True,
        max_dim: int = 10_000,
        precondition_1d: bool = True,
        adagrad_eps: float = 1e-8,
        matrix_power_method: Literal["eigh_abs", "eigh"] = "eigh_abs",
        beta: float | None = None,
        beta_debias: bool = True,
        init: Literal["identity", "zeros"] = "identity",
        inner: Chainable | None = None,
    ) -> None:
        choice("Shampoo", "matrix_power_method", matrix_power_method, ("eigh_abs", "eigh"))
        choice("Shampoo", "init", init, ("identity", "zeros"))
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = work(tensor)
        shape = merge_shape(tensor.shape, setting["max_dim"], setting["merge_small"])
        axes = [axis for axis, size in enumerate(shape) if size <= setting["max_dim"]]
        if len(shape) == 1 and not setting["precondition_1d"]:
            axes = []
        state["shape"] = shape
        state["axes"] = axes
        if axes:
            zeros = [x.new_zeros(shape[a], shape[a]) for a in axes]
            identity = setting["init"] == "identity"
            state["covariances"] = [
                matrix + torch.eye(len(matrix), dtype=x.dtype, device=x.device) if identity else matrix
                for matrix in zeros
            ]
            state["roots"] = []
            # The product W W^H costs more than to multiply by W twice where the axis is long and roots are not used often.
            state["halves"] = [setting["precond_freq"] * tensor.numel() < shape[axis] ** 2 for axis in axes]
        else:
            state["squares"] = torch.zeros_like(x.abs())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x, beta = work(tensor), setting["beta"]
        if not state["axes"]:
            squares = x.abs().square()
            if beta is None:
                state["squares"].add_(squares)
            else:
                state["squares"].lerp_(squares, 1 - beta)
            return
        x = x.reshape(state["shape"])
        for axis, total in zip(state["axes"], state["covariances"], strict=True):
            accumulate(total, x, axis, 1.0 if beta is None else beta, 1.0 if beta is None else 1 - beta)
        if (state["step"] - 1) % setting["precond_freq"] == 0:
            exponent = setting["matrix_power"]
            if exponent is None:
                exponent = -1 / (2 * len(state["axes"]))
            scale = self._debias(state, setting)
            state["roots"] = [
                power(
                    total if scale == 1 else total * scale,
                    exponent,
                    setting["reg"],
                    setting["matrix_power_method"],
                    half,
                )
                for total, half in zip(state["covariances"], state["halves"], strict=True)
            ]

    @staticmethod
    def _debias(state: Any, setting: Any) -> float:
        if setting["beta"] is None or not setting["beta_debias"] or (state["axes"] and setting["init"] == "identity"):
            return 1.0
        return float(1 / (1 - setting["beta"] ** state["step"]))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = work(tensor)
        if not state["axes"]:
            scale = self._debias(state, setting)
            out = x / ((state["squares"] * scale).sqrt() + setting["adagrad_eps"])
        else:
            roots: list[Tensor | None] = [None] * len(state["shape"])
            halves = list(roots)
            for axis, root, half in zip(state["axes"], state["roots"], state["halves"], strict=True):
                roots[axis] = root
                halves[axis] = root if half else None
            out = x.reshape(state["shape"])
            if any(state["halves"]):
                out = multiply(out, halves, adjoint=True)
            out = multiply(out, roots).reshape(tensor.shape)
        return out.to(tensor.dtype)
