"""Any links in the eigenbasis of Shampoo's covariances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Need, Objective
from .._checks import check_at_least_one, fraction
from ..adaptive._axes import multiply, work
from ..adaptive._eigenbasis import begin, follow, learn, matrices
from ._projection import Projection


class SOAPBasis(Projection):
    r"""Runs links in the slowly moving eigenbasis of Shampoo's covariances: with `Adam` inside it is SOAP.

    With $U_i$ the unfolding of the update along axis i, $C_i \leftarrow \beta C_i + (1-\beta) U_i U_i^T$ and $Q_i$ its
    eigenvectors, the links see $u \times_i Q_i^T$ (and the parameters and the gradient in the same basis, so that decay and
    line searches inside mean what they say); what they make of it is rotated back. At every n-th step $Q_i$ makes one step of
    orthogonal iteration. What the links remember follows: means are rotated, mean squares change places with their axes.
    The first step of a parameter makes its basis and moves nothing, as in `SOAP`.

    Args:
        basis_opt: The links.
        shampoo_beta: Memory $\beta$ of the covariances.
        precond_freq: The basis follows at every n-th step.
        merge_small: Take neighbouring axes after the first as one while their product is at most `max_dim`.
        max_dim: Longer axes are not rotated.
        precondition_1d: Whether vectors are rotated.
        inner: Links that transform the update before it is rotated, after the covariances have seen it.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.diag(torch.tensor([1.0, 8.0])))
        >>> opt = mo.Optimizer([w], m.SOAPBasis([m.EMA(0.9), m.Sign()]), m.LR(0.25))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([[0.7500, 0.0000],
                [0.0000, 7.7500]])

    References:
        N. Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024.
    """

    needs = frozenset({Need.GRADIENT})

    def __init__(
        self,
        basis_opt: Chainable,
        *,
        shampoo_beta: float = 0.95,
        precond_freq: int = 10,
        merge_small: bool = False,
        max_dim: int = 4096,
        precondition_1d: bool = True,
        inner: Chainable | None = None,
    ) -> None:
        fraction("SOAPBasis", shampoo_beta=shampoo_beta)
        check_at_least_one("SOAPBasis", precond_freq=precond_freq, max_dim=max_dim)
        super().__init__(basis_opt)
        self.defaults["shampoo_beta"] = shampoo_beta
        self.precond_freq, self.merge_small = precond_freq, merge_small
        self.max_dim, self.precondition_1d = max_dim, precondition_1d
        self.set_child("inner", inner)
        self._rows: list[Any] = []

    # ------------------------------------------------------------------ learning

    def _learn(self, objective: Objective) -> None:
        names = self._names(objective.params)
        for i, (param, update) in enumerate(zip(objective.params, objective.peek_updates(), strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            state, beta = self.state[param], self.settings[param]["shampoo_beta"]
            if "rows" not in state:
                begin(state, update, beta, self.max_dim, self.merge_small, self.precondition_1d)
                state["step"] = 1
                continue
            made = state["step"] - 1  # without the step that made the basis
            if state["axes"] and made > 0 and made % self.precond_freq == 0:
                self._follow(state, f"modules {names[i]}")
            state["step"] += 1
            learn(state, work(update).reshape(state["shape"]), beta)

    def _follow(self, state: Any, key: str) -> None:
        """One step of orthogonal iteration; what the links inside remember moves to the new basis."""
        old = matrices(state)
        orders = follow(state)
        new = matrices(state)
        stand_ins = self._stand_ins.get(self._stand_in_key(key))
        fakes = [] if stand_ins is None else stand_ins.tensors
        for buffers in self.get_child_projected_buffers("modules", "grad", fakes):
            for buffer in buffers:
                if buffer.dim() >= len(state["shape"]):
                    # Pointwise links keep complex numbers as pairs.
                    pairs = not buffer.is_complex() and any(m is not None and m.is_complex() for m in new)
                    value = torch.view_as_complex(buffer.contiguous()) if pairs else buffer
                    value = multiply(multiply(value, old), new, adjoint=True)
                    buffer.copy_(torch.view_as_real(value) if pairs else value)
        for buffers in self.get_child_projected_buffers("modules", ["grad_sq", "grad_cu"], fakes):
            for buffer in buffers:
                if buffer.dim() >= len(state["shape"]):
                    value = buffer
                    for axis, order in zip(state["axes"], orders, strict=True):
                        value = value.index_select(axis, order)
                    buffer.copy_(value)

    # ------------------------------------------------------------------ the basis

    def prepare(self, params: list[Tensor]) -> list[str]:
        keys = super().prepare(params)
        self._rows = [self.state[params[i]] for i in self._order]
        return keys

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        return [
            multiply(work(tensor).reshape(row["shape"]), matrices(row), adjoint=True) if "rows" in row else work(tensor)
            for tensor, row in zip(tensors, self._rows, strict=True)
        ]

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        return [
            (multiply(tensor, matrices(row)) if "rows" in row else tensor).reshape(param.shape).to(param.dtype)
            for tensor, row, param in zip(tensors, self._rows, params, strict=True)
        ]

    def _find_fresh(self, objective: Objective) -> list[bool]:
        """For each parameter whether this step only made its basis."""
        return [self.state[param].get("step") == 1 for param in objective.params]

    def presence(self, objective: Objective) -> list[bool] | None:
        present, fresh = super().presence(objective), self._find_fresh(objective)
        if not any(fresh):
            return present
        return [(present is None or present[k]) and not fresh[i] for k, i in enumerate(self._order)]

    def _zero_fresh(self, objective: Objective) -> Objective:
        """Parameters whose basis this step made do not move."""
        fresh = self._find_fresh(objective)
        if any(fresh):
            updates = objective.get_updates()
            objective.updates = [torch.zeros_like(u) if new else u for u, new in zip(updates, fresh, strict=True)]
        return objective

    def update(self, objective: Objective) -> None:
        """The basis follows, and the links inside learn."""
        self._learn(objective)
        if "inner" in self.children:
            self.children["inner"].update(objective)
        if not all(self._find_fresh(objective)):
            super().update(objective)

    def apply(self, objective: Objective) -> Objective:
        """The links inside transform, in the basis."""
        if "inner" in self.children:
            objective = self.children["inner"].apply(objective)
        if not all(self._find_fresh(objective)):
            objective = super().apply(objective)
        return self._zero_fresh(objective)

    def step(self, objective: Objective) -> Objective:
        """The basis follows, and the links inside make their step."""
        self._learn(objective)
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        if not all(self._find_fresh(objective)):
            objective = super().step(objective)
        return self._zero_fresh(objective)
