"""Shampoo, and Adam in its eigenbasis.

* Shampoo: a matrix along each axis in place of one for everything.
* The slowly moving eigenbasis of Shampoo's covariances. Shared by SOAP and SOAPBasis.
* SOAP: Adam in the eigenbasis of Shampoo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import Chainable, Follows, MatrixTransform, MatrixView, Objective, Setting, SettingsList, States
from ...optim import ranges as check
from ._adam import correct_bias
from ._axes import (
    accumulate,
    add_or_average,
    decay,
    merge_shape,
    multiply,
    power,
    work,
)
from ._eigenbasis import begin, follow, learn, matrices


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
        inner: Links that transform the update before it is preconditioned, after its covariances were updated.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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

    search_ranges = {"lr": UNIT_STEPS}

    counts = True
    static = ("precond_freq", "max_dim")
    follows = {"covariances": "factors", "roots": "factors"}
    ranges = {
        check.non_negative: ("reg", "adagrad_eps"),
        check.at_least_one: ("precond_freq", "max_dim"),
        check.allow(check.fraction, None): ("beta",),
    }

    reg: float = 1e-12
    precond_freq: int = 10
    matrix_power: float | None = None
    merge_small: bool = True
    max_dim: int = 10_000
    precondition_1d: bool = True
    adagrad_eps: float = 1e-8
    matrix_power_method: Literal["eigh_abs", "eigh"] = "eigh_abs"
    beta: float | None = None
    beta_debias: bool = True
    init: Literal["identity", "zeros"] = "identity"
    inner: Chainable | None = None

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
            # The product W W^H costs more than two multiplications by W if the axis is long and roots are used rarely.
            state["halves"] = [setting["precond_freq"] * tensor.numel() < shape[axis] ** 2 for axis in axes]
        else:
            state["squares"] = torch.zeros_like(x.abs())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x, beta = work(tensor), setting["beta"]
        if not state["axes"]:
            add_or_average(state["squares"], x.abs().square(), beta)
            return
        x = x.reshape(state["shape"])
        for axis, total in zip(state["axes"], state["covariances"], strict=True):
            accumulate(total, x, axis, 1.0 if beta is None else beta, 1.0 if beta is None else 1 - beta)
        if (state["step"] - 1) % setting["precond_freq"] == 0:
            exponent = setting["matrix_power"]
            if exponent is None:
                exponent = -1 / (2 * len(state["axes"]))
            scale = self._debias(state, setting)
            # Contiguous, as when loaded from a checkpoint: products round differently for other strides.
            state["roots"] = [
                power(
                    total if scale == 1 else total * scale,
                    exponent,
                    setting["reg"],
                    setting["matrix_power_method"],
                    half,
                ).contiguous()
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


class SOAP(MatrixTransform):
    r"""Runs Adam in the eigenbasis of Shampoo's covariances, which follows them slowly.

    With $Q_i$ the eigenvectors of $C_i$, $u' = u \times_i Q_i^T$, then Adam on $u'$ gives $n'$, then
    $u \leftarrow n' \times_i Q_i$, and with $U_i$ the unfolding of u along axis i,
    $C_i \leftarrow \beta_s C_i + (1-\beta_s) U_i U_i^T$.
    At every n-th step $Q_i$ makes one step of orthogonal iteration, the QR factor of $C_i Q_i$. The first step makes the
    basis of its update and moves nothing, as the authors' code does: in a basis of its own, an update is not scaled.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square, in the eigenbasis.
        shampoo_beta: Memory $\beta_s$ of the covariances.
        precond_freq: The basis follows at every n-th step.
        merge_small: Take neighbouring axes after the first as one while their product is at most `max_dim`.
        max_dim: Longer axes are not rotated.
        precondition_1d: Whether vectors are rotated; otherwise they are left to Adam.
        eps: Added to the denominator after bias correction, as in `Adam`.
        debias: Correct for the moments starting at zero.
        proj_exp_avg: Whether the mean is kept in the basis, which costs less where the basis seldom moves, or outside of it;
            None chooses by `precond_freq`. It is the same method.
        alpha: A factor; a step size is better given by a link of its own, `LR`.
        inner: Links that transform the update before Adam sees it, after the covariances have.
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.diag(torch.tensor([1.0, 8.0])))
        >>> opt = mo.Optimizer([w], m.SOAP(), m.LR(0.25))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([[0.7500, 0.0000],
                [0.0000, 7.7500]])

    References:
        N. Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024, Algorithms 3 and 4.
    """

    search_ranges = {"lr": UNIT_STEPS}

    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {
        check.fraction: ("beta1", "beta2", "shampoo_beta"),
        check.at_least_one: ("precond_freq", "max_dim"),
        check.non_negative: ("eps",),
    }

    attributes = ("proj_exp_avg",)
    member_settings = ("beta1", "beta2", "shampoo_beta")

    beta1: Setting = 0.95
    beta2: Setting = 0.95
    shampoo_beta: Setting = 0.95
    precond_freq: int = 10
    merge_small: bool = False
    max_dim: int = 4096
    precondition_1d: bool = True
    eps: float = 1e-8
    debias: bool = True
    proj_exp_avg: bool | None = None
    alpha: float = 1.0
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        if given["inner"] is not None and (self.batch is not None or self.matrix is not None):
            raise ValueError("SOAP: inner= and batch= or matrix= do not go together; put the links before SOAP")
        # Moments in the basis cost two rotations when it changes; moments outside of it cost one at each step.
        self.inside = given["precond_freq"] > 2 if self.proj_exp_avg is None else self.proj_exp_avg

    def find_view(self, param: Tensor) -> MatrixView | None:
        """Return the view of a parameter as matrices; with inner links None, since they get whole updates."""
        return None if "inner" in self.children else super().find_view(param)

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        # The covariances learn from the update, the moments from the result of the inner links.
        if "inner" not in self.children:
            super().update_states(objective, states, settings)
            return
        copy = objective.clone(clone_updates=True)
        copy = self.children["inner"].step(copy)
        objective.update_attrs_from_clone_(copy)
        started = [(state, update) for state, update in zip(states, copy.get_updates(), strict=True) if state]
        try:
            for state, update in started:
                state["inner"] = update
            super().update_states(objective, states, settings)
        finally:
            for state, _ in started:
                del state["inner"]

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with the step in the basis; the inner links ran when the moments were updated."""
        return self.apply_states(objective, *self._lists(objective))

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = begin(
            state,
            tensor,
            setting["shampoo_beta"],
            setting["max_dim"],
            setting["merge_small"],
            setting["precondition_1d"],
        )
        state["exp_avg"] = torch.zeros_like(x)
        state["exp_avg_sq"] = torch.zeros_like(x.abs())

    def find_follows(self, row: Mapping[str, Any]) -> Mapping[str, Follows]:
        """Return the rules for labels: moments stay in their basis, and the basis follows the parameter, with all axes or none."""
        if not row.get("axes"):
            return {}
        whole = len(row["axes"]) == len(row["shape"])
        rotated: Follows = "fixed" if whole else lambda axes: ()
        return {
            "covariances": "factors",
            "rows": "bases",
            "exp_avg_sq": rotated,
            **({"exp_avg": rotated} if self.inside else {}),
        }

    def _follow(self, state: Any) -> None:
        """Update the basis, and rotate the moments to the new one."""
        mean = multiply(state["exp_avg"], matrices(state)) if self.inside else None
        for axis, order in zip(state["axes"], follow(state), strict=True):
            state["exp_avg_sq"] = state["exp_avg_sq"].index_select(axis, order)
        if mean is not None:
            state["exp_avg"] = multiply(mean, matrices(state), adjoint=True)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        steps = state["step"] - 2  # earlier steps, without the one that computed the basis
        if steps < 0:
            return
        x = work(tensor).reshape(state["shape"])
        # Update the basis by the covariances of the last step: a step uses the basis computed before it.
        if state["axes"] and steps > 0 and steps % setting["precond_freq"] == 0:
            self._follow(state)
        inner = work(state["inner"]).reshape(state["shape"]) if "inner" in state else x
        rotated = multiply(inner, matrices(state), adjoint=True)
        decay(state["exp_avg"], rotated if self.inside else inner, setting["beta1"])
        decay(state["exp_avg_sq"], (rotated * rotated.conj()).real, setting["beta2"])
        learn(state, x, setting["shampoo_beta"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t = state["step"] - 1
        if t == 0:
            return torch.zeros_like(tensor)
        size, grow = correct_bias(setting["alpha"], t, setting)
        mean = state["exp_avg"] if self.inside else multiply(state["exp_avg"], matrices(state), adjoint=True)
        denominator = state["exp_avg_sq"].sqrt().mul_(grow).add_(setting["eps"])
        out = (mean / denominator).mul_(size)
        return multiply(out, matrices(state)).reshape(tensor.shape).to(tensor.dtype)
