"""Links run in a basis computed from earlier updates.

* Any links in the space of the last updates.
* Any links in the eigenbasis of Shampoo's covariances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, ChainError, DeclaredLink, Need, Objective, StandIns, map_alike, step_tensors
from ...optim import ranges as check
from ...optim.module import ProjectedBuffer
from .._vectors import flat, unflat
from ..adaptive._axes import multiply, work
from ..adaptive._eigenbasis import begin, follow, learn, matrices
from ..adaptive._full_matrix import find_span
from ._projection import Projection

# The power of a change of the basis by which buffers are multiplied; covariances are multiplied from both sides.
_POWERS: dict[ProjectedBuffer, int] = {"grad": 1, "grad_sq": 2, "grad_cu": 3, "covariance": 1}


class GGTBasis(DeclaredLink):
    r"""Runs links on the coordinates of the update in the space that the last r updates span.

    With M their matrix, $M^T M = V \Lambda V^T$ and $U = M V \Lambda^{-1/2}$, the links see the numbers $c = U^T u$ and make
    $c'$ of them; the result is $U c' + \frac{\|c'\|}{\|c\|}(u - U c)$: what is outside of the space (there is something only
    where eigenvectors are left out, updates are not kept, or `inner` changes them) is not lost, and gets the size that the
    links give to the rest. When the space moves, what the links remember follows with $C = U_{new}^T U_{old}$: means as
    $Cb$, mean squares as $(C \odot C) b$, covariances as $C b C^T$. There are always r numbers, zeros while fewer are used.

    Args:
        basis_opt: The links. They can't evaluate anything: r numbers are not a point.
        history_size: How many updates are kept, r.
        update_freq: Keep every n-th update.
        eig_tol: Eigenvalues below this times the largest count as zero.
        truncate: Use only this many of the largest eigenvalues.
        inner: Links that transform the update before it is projected, after it entered the history.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> _ = mo.Optimizer([w], m.GGTBasis(m.Sign()), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.7000, 3.6000])

    References:
        N. Agarwal et al., "Efficient full-matrix adaptive regularization", ICML 2019.
    """

    decides_on_host = True

    vector_state = True

    ranges = {
        check.at_least_one: ("history_size", "update_freq"),
        check.allow(check.at_least_one, None): ("truncate",),
        check.non_negative: ("eig_tol",),
    }
    attributes = ("history_size", "update_freq", "truncate")

    basis_opt: Chainable = field(kw_only=False)
    history_size: int = 100
    update_freq: int = 1
    eig_tol: float = 1e-7
    truncate: int | None = None
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect({key: value for key, value in given.items() if key != "basis_opt"})
        self.set_child("modules", given["basis_opt"])

    def check(self) -> None:
        far = {need for need in self.children["modules"].all_needs() if need not in (Need.GRADIENT, Need.LOSS)}
        if far:
            wanted = " and ".join(sorted(need.value for need in far))
            raise ChainError(
                f"GGTBasis shows its links coordinates of the update, where nothing can be evaluated, but they need {wanted}"
            )

    def update(self, objective: Objective) -> None:
        """Store the update, and rotate the basis; the state of the inner links is rotated with it."""
        if self.increment_counter("seen", 0) % self.update_freq:
            return
        vector = flat(objective.peek_updates())
        history = self.global_state.setdefault("history", deque(maxlen=self.history_size))
        history.append(vector.clone())
        _, vectors, _ = find_span(history, self.settings[objective.params[0]]["eig_tol"], self.truncate)
        # Columns are stored separately, since of a square matrix it is unknown which axis is the parameters.
        basis = vectors.flip(-1)
        new = list(basis.unbind(1))
        old = self.global_state.get("basis", [])
        if old and new:
            self._turn(_pad(basis.mT @ torch.stack(old, 1), self.history_size))
        self.global_state["basis"] = new

    def _turn(self, turn: Tensor) -> None:
        for kind, power in _POWERS.items():
            for (buffer,) in self.get_child_projected_buffers("modules", kind):
                if buffer.shape[:1] == turn.shape[:1]:
                    turned = turn.to(buffer.dtype) ** power @ buffer
                    buffer.copy_(turned @ turn.to(buffer.dtype).mT if kind == "covariance" else turned)

    def apply(self, objective: Objective) -> Objective:
        """Transform the coordinates by the inner links."""
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        updates = objective.get_updates()
        vector = flat(updates)
        columns = self.global_state.get("basis", [])
        basis = torch.stack(columns, 1) if columns else vector.new_zeros(vector.numel(), 0)
        inside = basis.mT @ vector
        outside = vector - basis @ inside
        coordinates = vector.new_zeros(self.history_size)
        coordinates[: len(columns)] = inside
        stand_ins = self._stand_ins.setdefault("modules", StandIns())
        self.children["modules"].check_shared(objective.params, every=True)
        with stand_ins.point_at([coordinates.clone()], self.settings.binding, objective.params[:1]) as fakes:
            transformed = step_tensors(
                self.children["modules"], [coordinates], fakes, [coordinates.clone()], objective.loss
            )[0]
        transformed = transformed[: len(columns)]
        size = inside.norm()
        ratio = torch.where(size > 0, transformed.norm() / torch.where(size > 0, size, 1.0), 1.0)
        out = basis @ transformed + ratio * outside
        objective.updates = unflat(out, objective.params)
        return objective


def _pad(matrix: Tensor, size: int) -> Tensor:
    out = matrix.new_zeros(size, size)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out


def _rotate(buffer: Tensor, old: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> Tensor:
    """Return a mean in the new basis; pointwise links store complex numbers as pairs."""
    pairs = not buffer.is_complex() and any(matrix is not None and matrix.is_complex() for matrix in new)
    value = torch.view_as_complex(buffer.contiguous()) if pairs else buffer
    value = multiply(multiply(value, old), new, adjoint=True)
    return torch.view_as_real(value) if pairs else value


def _reorder(buffer: Tensor, axes: Sequence[int], orders: Sequence[Tensor]) -> Tensor:
    """Return mean squares in the new order of the eigenvectors."""
    for axis, order in zip(axes, orders, strict=True):
        buffer = buffer.index_select(axis, order)
    return buffer


class SOAPBasis(Projection):
    r"""Runs links in the slowly moving eigenbasis of Shampoo's covariances: with `Adam` inside it is SOAP.

    With $U_i$ the unfolding of the update along axis i, $C_i \leftarrow \beta C_i + (1-\beta) U_i U_i^T$ and $Q_i$ its
    eigenvectors, the links see $u \times_i Q_i^T$ (and the parameters and the gradient in the same basis, so that decay and
    line searches inside mean what they say); what they make of it is rotated back. At every n-th step $Q_i$ makes one step of
    orthogonal iteration. The state of the links follows: means are rotated, mean squares are reordered with their axes.
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

    ranges = {check.fraction: ("shampoo_beta",), check.at_least_one: ("precond_freq", "max_dim")}
    attributes = ("precond_freq", "merge_small", "max_dim", "precondition_1d")

    basis_opt: Chainable = field(kw_only=False)
    modules: Chainable = field(default=(), init=False)
    shampoo_beta: float = 0.95
    precond_freq: int = 10
    merge_small: bool = False
    max_dim: int = 4096
    precondition_1d: bool = True
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        others = {key: value for key, value in given.items() if key != "basis_opt"}
        super().collect({**others, "modules": given["basis_opt"]})

    # ------------------------------------------------------------------ learning

    def _learn(self, objective: Objective) -> None:
        names, params, updates = self._names(objective.params), objective.params, objective.peek_updates()
        states, settings = self.find_rows(params), [self.settings[param] for param in params]
        started, following = [], []
        for i, state in enumerate(states):
            if objective.present is not None and not objective.present[i]:
                continue
            if "rows" not in state:
                beta = settings[i]["shampoo_beta"]
                begin(state, updates[i], beta, self.max_dim, self.merge_small, self.precondition_1d)
                state["step"] = 1
                continue
            steps = state["step"] - 1  # without the step that computed the basis
            if state["axes"] and steps > 0 and steps % self.precond_freq == 0:
                following.append(i)
            state["step"] += 1
            started.append(i)
        if following:
            self._follow([states[i] for i in following], [f"modules {names[i]}" for i in following])
        map_alike(
            lambda k, item, state: learn(
                state, work(item[0]).reshape(state["shape"]), settings[started[k]]["shampoo_beta"]
            ),
            [(updates[i],) for i in started],
            [states[i] for i in started],
            [settings[i] for i in started],
        )

    def _follow(self, states: list[dict[str, Any]], keys: list[str]) -> None:
        """Make one step of orthogonal iteration; the state of the inner links is moved to the new basis."""
        buffers, kinds = [], []
        follows: tuple[tuple[ProjectedBuffer, ...], ...] = (("grad",), ("grad_sq", "grad_cu"))
        for state, key in zip(states, keys, strict=True):
            stand_ins = self._stand_ins.get(key)
            fakes = [] if stand_ins is None else stand_ins.tensors
            means, squares = (
                [
                    buffer
                    for column in self.get_child_projected_buffers("modules", kind, fakes)
                    for buffer in column
                    if buffer.dim() >= len(state["shape"])
                ]
                for kind in follows
            )
            buffers.append([*means, *squares])
            kinds.append(len(means))

        def move(i: int, item: Sequence[Any], state: dict[str, Any]) -> list[Tensor]:
            old, orders, new = matrices(state), follow(state), matrices(state)
            means = [_rotate(tensor, old, new) for tensor in item[: kinds[i]]]
            return [*means, *(_reorder(tensor, state["axes"], orders) for tensor in item[kinds[i] :])]

        moved = map_alike(move, buffers, states, [{}] * len(states), kinds)
        for tensors, values in zip(buffers, moved, strict=True):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    # ------------------------------------------------------------------ the basis

    def prepare(self, params: list[Tensor]) -> list[str]:
        keys = super().prepare(params)
        self._rows = [self.state[params[i]] for i in self._order]
        return keys

    def project(self, tensors: list[Tensor]) -> list[Tensor]:
        def rotate(i: int, item: Sequence[Any], row: dict[str, Any]) -> Tensor:
            tensor = work(item[0])
            return multiply(tensor.reshape(row["shape"]), matrices(row), adjoint=True) if "rows" in row else tensor

        return map_alike(rotate, [(tensor,) for tensor in tensors], self._rows, [{}] * len(tensors))

    def unproject(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        def rotate(i: int, item: Sequence[Any], row: dict[str, Any]) -> Tensor:
            out = multiply(item[0], matrices(row)) if "rows" in row else item[0]
            return out.reshape(params[i].shape).to(params[i].dtype)

        shapes = [(param.shape, param.dtype) for param in params]
        return map_alike(rotate, [(tensor,) for tensor in tensors], self._rows, [{}] * len(tensors), shapes)

    def _find_fresh(self, objective: Objective) -> list[bool]:
        """Return for each parameter whether this step only computed its basis."""
        return [self.state[param].get("step") == 1 for param in objective.params]

    def presence(self, objective: Objective) -> list[bool] | None:
        present, fresh = super().presence(objective), self._find_fresh(objective)
        if not any(fresh):
            return present
        return [(present is None or present[k]) and not fresh[i] for k, i in enumerate(self._order)]

    def _zero_fresh(self, objective: Objective) -> Objective:
        """Set the update to zero for parameters whose basis was computed in this step."""
        fresh = self._find_fresh(objective)
        if any(fresh):
            updates = objective.get_updates()
            objective.updates = [torch.zeros_like(u) if new else u for u, new in zip(updates, fresh, strict=True)]
        return objective

    def update(self, objective: Objective) -> None:
        """Update the basis, and let the inner links learn."""
        self._learn(objective)
        if "inner" in self.children:
            self.children["inner"].update(objective)
        if not all(self._find_fresh(objective)):
            super().update(objective)

    def apply(self, objective: Objective) -> Objective:
        """Transform the update by the inner links, in the basis."""
        if "inner" in self.children:
            objective = self.children["inner"].apply(objective)
        if not all(self._find_fresh(objective)):
            objective = super().apply(objective)
        return self._zero_fresh(objective)

    def step(self, objective: Objective) -> Objective:
        """Update the basis, and run the step of the inner links."""
        self._learn(objective)
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        if not all(self._find_fresh(objective)):
            objective = super().step(objective)
        return self._zero_fresh(objective)
