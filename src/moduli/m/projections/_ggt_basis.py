"""Any links in the space of the last updates."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ...optim import (
    Chainable,
    ChainError,
    Module,
    Need,
    Objective,
    StandIns,
    as_real,
    from_vector,
    restore_complex,
    step_tensors,
    to_vector,
)
from ...optim.module import ProjectedBuffer
from .._checks import check_at_least_one, non_negative
from ..adaptive._axes import work
from ..adaptive._ggt import find_span

# By which power of a change of the basis buffers are multiplied; covariances from both sides.
_POWERS: dict[ProjectedBuffer, int] = {"grad": 1, "grad_sq": 2, "grad_cu": 3, "covariance": 1}


class GGTBasis(Module):
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

    def __init__(
        self,
        basis_opt: Chainable,
        *,
        history_size: int = 100,
        update_freq: int = 1,
        eig_tol: float = 1e-7,
        truncate: int | None = None,
        inner: Chainable | None = None,
    ) -> None:
        check_at_least_one("GGTBasis", history_size=history_size, update_freq=update_freq)
        if truncate is not None:
            check_at_least_one("GGTBasis", truncate=truncate)
        non_negative("GGTBasis", eig_tol=eig_tol)
        super().__init__({"eig_tol": eig_tol})
        self.history_size, self.update_freq, self.truncate = history_size, update_freq, truncate
        self.set_child("modules", basis_opt)
        self.set_child("inner", inner)

    def check(self) -> None:
        far = {need for need in self.children["modules"].all_needs() if need not in (Need.GRADIENT, Need.LOSS)}
        if far:
            wanted = " and ".join(sorted(need.value for need in far))
            raise ChainError(
                f"GGTBasis shows its links coordinates of the update, where nothing can be evaluated, but they need {wanted}"
            )

    def update(self, objective: Objective) -> None:
        """Keep the update, and turn the basis; what the links inside remember turns with it."""
        if self.increment_counter("seen", 0) % self.update_freq:
            return
        vector = work(_vector(objective.peek_updates()))
        history = self.global_state.setdefault("history", deque(maxlen=self.history_size))
        history.append(vector.clone())
        _, found, _ = find_span(history, self.settings[objective.params[0]]["eig_tol"], self.truncate)
        # Columns one by one: a square matrix would not say which of its axes are parameters.
        basis = found.flip(-1)
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
        """The links inside transform the coordinates."""
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        updates = objective.get_updates()
        vector = work(_vector(updates))
        columns = self.global_state.get("basis", [])
        basis = torch.stack(columns, 1) if columns else vector.new_zeros(vector.numel(), 0)
        inside = basis.mT @ vector
        outside = vector - basis @ inside
        shown = vector.new_zeros(self.history_size)
        shown[: len(columns)] = inside
        stand_ins = self._stand_ins.setdefault(self._stand_in_key("modules"), StandIns())
        self.children["modules"].check_shared(objective.params, every=True)
        with stand_ins.point_at([shown.clone()], self.settings.binding, objective.params[:1]) as fakes:
            made = step_tensors(self.children["modules"], [shown], fakes, [shown.clone()], objective.loss)[0]
        made = made[: len(columns)]
        size = inside.norm()
        ratio = torch.where(size > 0, made.norm() / torch.where(size > 0, size, 1.0), 1.0)
        out = basis @ made + ratio * outside
        parts = from_vector(out, [as_real(param.detach()) for param in objective.params])
        objective.updates = [
            restore_complex(part.to(_real_dtype(p)), p) for part, p in zip(parts, objective.params, strict=True)
        ]
        return objective


def _real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _vector(tensors: list[Tensor]) -> Tensor:
    return to_vector([as_real(tensor) for tensor in tensors])


def _pad(matrix: Tensor, size: int) -> Tensor:
    out = matrix.new_zeros(size, size)
    out[: matrix.shape[0], : matrix.shape[1]] = matrix
    return out
