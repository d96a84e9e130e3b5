"""SOAP: Adam in the eigenbasis of Shampoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Objective
from .._checks import check_at_least_one, collect_settings, fraction, non_negative
from .._transforms import MatrixTransform, Settings, States
from ._adam import correct_bias
from ._axes import multiply, work
from ._eigenbasis import begin, follow, learn, matrices


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

    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {
        fraction: ("beta1", "beta2", "shampoo_beta"),
        check_at_least_one: ("precond_freq", "max_dim"),
        non_negative: ("eps",),
    }

    def __init__(
        self,
        *,
        beta1: float = 0.95,
        beta2: float = 0.95,
        shampoo_beta: float = 0.95,
        precond_freq: int = 10,
        merge_small: bool = False,
        max_dim: int = 4096,
        precondition_1d: bool = True,
        eps: float = 1e-8,
        debias: bool = True,
        proj_exp_avg: bool | None = None,
        alpha: float = 1.0,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__(collect_settings(locals(), "proj_exp_avg"))
        # To follow the basis costs two rotations, to be outside of it one at each step.
        self.inside = precond_freq > 2 if proj_exp_avg is None else proj_exp_avg
        self._inner: dict[int, Tensor] = {}

    def update_states(self, objective: Objective, states: States, settings: Settings) -> None:
        """The covariances see the update, the moments what the inner links make of it."""
        if "inner" in self.children:
            copy = objective.clone(clone_updates=True)
            copy = self.children["inner"].step(copy)
            objective.update_attrs_from_clone_(copy)
            self._inner = {id(state): update for state, update in zip(states, copy.get_updates(), strict=True)}
        try:
            super().update_states(objective, states, settings)
        finally:
            self._inner = {}

    def apply(self, objective: Objective) -> Objective:
        """The step in the basis; the inner links have had their turn when the moments learnt."""
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

    def _follow(self, state: Any) -> None:
        """The basis makes its step; moments move to the new one."""
        mean = multiply(state["exp_avg"], matrices(state)) if self.inside else None
        for axis, order in zip(state["axes"], follow(state), strict=True):
            state["exp_avg_sq"] = state["exp_avg_sq"].index_select(axis, order)
        if mean is not None:
            state["exp_avg"] = multiply(mean, matrices(state), adjoint=True)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        made = state["step"] - 2  # steps before this one, without the one that made the basis
        if made < 0:
            return
        x = work(tensor).reshape(state["shape"])
        # The basis that the last step's covariances ask for: a step is made in the basis from before it.
        if state["axes"] and made > 0 and made % setting["precond_freq"] == 0:
            self._follow(state)
        given = work(self._inner[id(state)]).reshape(state["shape"]) if self._inner else x
        rotated = multiply(given, matrices(state), adjoint=True)
        state["exp_avg"].lerp_(rotated if self.inside else given, 1 - setting["beta1"])
        beta2 = setting["beta2"]
        if rotated.is_complex():
            state["exp_avg_sq"].lerp_(rotated.abs().square(), 1 - beta2)
        else:
            state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
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
