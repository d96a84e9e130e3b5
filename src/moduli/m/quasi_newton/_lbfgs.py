"""The last pairs of steps and gradient differences, with the small matrices of the compact form kept up to date."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...layout import Guard
from ...linalg import LBFGSOperator, LinearOperator, ScaledIdentity
from ...optim import Chainable, ChainError, Objective, Optimizer, describe_params
from ...optim import ranges as check
from .._vectors import HessianLink, is_small, vector_like
from ._lbfgs_members import learn_members, multiply_members
from ._pairs import _PairLink, count_skipped, take_pair

_WIDE = 8_192
"""For products with larger matrices NumPy's library uses all threads, even if it was configured for a single one."""
Small = np.ndarray[Any, np.dtype[np.float64]]


class PairMemory:
    r"""Rows of S and Y in one buffer, with $Y Y^T$, the diagonal of $S Y^T$, and the inverse of its upper part R.

    It is a view of a dictionary of plain tensors, which is what a link saves. Rows are slots that are used in turn, and so
    are the rows and columns of the small matrices: the triangle is one in the order of age, but all that is done with it
    is as right in any other order. Of a slot that is not used the small matrices are zero. A new pair costs one product with
    the buffer, and a column of the inverse in O(m^2); the oldest leaves with its row and column.

    Args:
        state: The dictionary.
        like: A vector of the length, dtype and device of the pairs.
        history: How many pairs are kept.
    """

    def __init__(self, state: Any, like: Tensor, history: int) -> None:
        n, dtype, device = len(like), like.dtype, like.device
        stored = state.get("rows")
        if stored is None or stored.shape[1] != n or state["history"] != history or stored.dtype is not dtype:
            capacity = history
            # Saved vectors are permuted with parameters along every axis of their length, so no other axis may have it.
            while capacity == n or 2 * capacity == n:
                capacity += 1
            state["rows"] = torch.zeros(2 * capacity, n, dtype=dtype, device=device)
            for key in ("yy", "inverse"):
                state[key] = torch.zeros(capacity, capacity, dtype=torch.float64)
            state["sy"] = torch.zeros(1, capacity, dtype=torch.float64)
            state["slots"] = []
            state["history"] = history
            state["capacity"] = capacity
        self.rows: Tensor = state["rows"]
        self.n, self.dtype, self.history = n, dtype, history
        self.eps, self.tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        self.capacity: int = state["capacity"]
        self.slots: list[int] = state["slots"]
        # Below this size NumPy's dispatch, on the same memory, costs less than torch's.
        self.numpy = is_small(n, device)
        self._rows: Any = self.rows.numpy() if self.numpy else self.rows
        self._narrow = self.numpy and self.rows.numel() <= _WIDE
        self._yy: Small = state["yy"].numpy()
        self._inverse: Small = state["inverse"].numpy()
        self._sy: Small = state["sy"].numpy()[0]
        self._weights: Small = np.empty(2 * self.capacity)

    def still(self, state: Any, like: Tensor, history: int) -> bool:
        """Return whether this is still the view of that state.

        Args:
            state: The dictionary.
            like: A vector of the length and dtype of the pairs.
            history: How many pairs are kept.
        """
        return (
            state.get("rows") is self.rows
            and state["slots"] is self.slots
            and self.n == len(like)
            and self.dtype is like.dtype
            and self.history == history
        )

    def __len__(self) -> int:
        return len(self.slots)

    def products(self, vector: Any) -> Small:
        """Return S v and Y v concatenated; v is an array if NumPy is used."""
        if self._narrow:
            products: Any = self._rows.dot(vector)
        else:
            tensor = torch.from_numpy(vector) if self.numpy else vector
            products = torch.mv(self.rows, tensor).cpu().numpy()
        return products if products.dtype == np.float64 else products.astype(np.float64)

    def direction(self, vector: Any) -> Any:
        """Return the inverse BFGS matrix times v: an array if NumPy is used, otherwise a tensor."""
        capacity, inverse, weights, newest = self.capacity, self._inverse, self._weights, self.slots[-1]
        gamma = float(self._sy[newest] / self._yy[newest, newest])
        products = self.products(vector)
        v = inverse.dot(products[:capacity])
        inner = self._yy.dot(v)
        inner -= products[capacity:]
        inner *= gamma
        inner += self._sy * v
        weights[:capacity] = inner.dot(inverse)
        v *= -gamma
        weights[capacity:] = v
        if not self.numpy:
            return torch.addmv(vector, self.rows.T, torch.from_numpy(weights).to(vector), beta=gamma, alpha=1.0)
        rows = self._rows
        combination = weights if rows.dtype == np.float64 else weights.astype(rows.dtype)
        out = rows.dtype.type(gamma) * vector
        out += combination.dot(rows) if self._narrow else torch.mv(self.rows.T, torch.from_numpy(combination)).numpy()
        return out

    def add(self, s: Any, y: Any, sy: float) -> None:
        """Add a pair, and drop the oldest if there is no room.

        Args:
            s: The step.
            y: The difference of gradients.
            sy: Their inner product.
        """
        slots, inverse, capacity = self.slots, self._inverse, self.capacity
        slot = slots.pop(0) if len(slots) == self.history else len(slots)
        slots.append(slot)
        self._rows[slot], self._rows[slot + capacity] = s, y
        products = self.products(y)
        inverse[slot] = inverse[:, slot] = 0.0
        column = inverse.dot(products[:capacity])
        column *= -1.0 / sy
        column[slot] = 1.0 / sy
        inverse[:, slot] = column
        self._yy[slot] = self._yy[:, slot] = products[capacity:]
        self._sy[slot] = sy

    def clear(self) -> None:
        """Drop all pairs."""
        self.slots.clear()
        self._inverse[:] = 0.0
        self._sy[:] = 0.0

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Return S and Y with the oldest pair first, as new tensors."""
        slots = torch.tensor(self.slots, dtype=torch.long, device=self.rows.device)
        return self.rows.index_select(0, slots), self.rows.index_select(0, slots + self.capacity)


class LBFGS(_PairLink, HessianLink):
    r"""Multiplies the update by the BFGS matrix of the last pairs $s = x - x_-$, $y = u - u_-$.

    With $\gamma = s^Ty / y^Ty$ of the newest pair, $D$ the diagonal and $R$ the upper part of $S Y^T$ (pairs in rows),

    $H u = \gamma u + S^T R^{-T}\big((D + \gamma Y Y^T) R^{-1} S u - \gamma Y u\big) - \gamma Y^T R^{-1} S u$.

    This equals the two-loop recursion, in two products with one buffer. Follow it with a line search. Members of a
    population have pairs of their own. The optimizer's `attrs` have the number of pairs of one model that carried no
    information and were skipped, as `"LBFGS.skipped_pairs"`.

    Args:
        history_size: How many pairs are kept.
        ptol: A step whose largest component is not above this gives no pair.
        ptol_restart: Forget all pairs after such a step.
        gtol: A change of the gradient whose largest component is not above this gives no pair.
        gtol_restart: Forget all pairs after such a change.
        sy_tol: A pair is kept where $s^Ty$ exceeds this, and rounding.
        scale_first: Before there is a pair, scale the update to a length of at most one.
        update_freq: Take in a pair at every n-th step only.
        damping: "powell" mixes y with Bs until $s^Ty \ge 0.2\,s^TBs$, so that no pair is lost.
        inner: Links that transform the update after the pair was stored and before it is multiplied.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        >>> for _ in range(15):
        ...     _ = opt.step(mo.closure(lambda: (w**4).sum() + (w**2).sum(), fixed=True))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        J. Nocedal, "Updating quasi-Newton matrices with limited storage", Math. Comp. 35 (1980); R. H. Byrd, J. Nocedal,
        R. B. Schnabel, "Representations of quasi-Newton matrices", Math. Programming 63 (1994), theorem 2.2; M. J. D.
        Powell, "Algorithms for nonlinear constraints that use Lagrangian functions", Math. Programming 14 (1978).
    """

    members = True

    ranges = {check.at_least_one: ("history_size",), check.one_of(None, "powell"): ("damping",)}

    history_size: int = 10
    ptol: float = 1e-32
    ptol_restart: bool = False
    gtol: float = 1e-32
    gtol_restart: bool = False
    sy_tol: float = 1e-32
    scale_first: bool = True
    update_freq: int = 1
    damping: str | None = None
    inner: Chainable | None = None

    def attached(self, optimizer: Optimizer) -> None:
        """For a population, store the pairs of all members with each parameter."""
        if optimizer.binding.members is None:
            return
        if self.defaults["damping"] is not None or self.children:
            raise ChainError(
                "LBFGS of a population has neither damping nor inner links: leave them out, or train each model by itself"
            )
        self.vector_state = False

    def _follow_members(self, params: list[Tensor]) -> None:
        here = sorted(describe_params(params, self.settings.binding.slots))
        before = self.global_state.get("members of")
        if before != here:
            # Sizes are those of one member: a checkpoint may come from another number of processes.
            if before is not None and [_drop_size(part) for part in before] != [_drop_size(part) for part in here]:
                self.reset()
            self.global_state["members of"] = here

    def _memory(self, state: Any, like: Tensor, setting: Any) -> PairMemory:
        memory: PairMemory | None = self.__dict__.get("_held")
        if memory is None or not memory.still(state, like, setting["history_size"]):
            memory = self._held = PairMemory(state, like, setting["history_size"])
        return memory

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_held", None)
        return state

    def protect(self, guard: Guard, unwritten: Sequence[Tensor] = ()) -> None:
        """Register the state with a guard; of the pairs only the one whose slot is used next."""
        for state in self.rows.values():
            if "slots" in state:
                slots, rows = state["slots"], state["rows"]
                slot = slots[0] if len(slots) == state["history"] else len(slots)
                guard.tensors([rows[slot], rows[slot + state["capacity"]]])
                unwritten = [*unwritten, rows]
        super().protect(guard, unwritten)

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        if objective.members is not None:
            self._follow_members(objective.params)
            states = [self.state[param] for param in objective.params]
            learn_members(objective, states, self.global_state, settings[0])
            return
        self.learn_vector(objective, states[0], settings[0])

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        x, s, y, verdict = take_pair(objective, state, setting["ptol"], setting["gtol"])
        memory = self._memory(state, x, setting)
        if verdict:
            restart = {"new": True, "step": setting["ptol_restart"], "gradient": setting["gtol_restart"]}
            if restart.get(verdict):
                memory.clear()
            if verdict in ("step", "gradient"):
                count_skipped(self, objective, state)
            return
        if setting["damping"] == "powell":
            damped = _powell(torch.as_tensor(s), torch.as_tensor(y), self.operator(objective, state, setting))
            y = damped.numpy() if memory.numpy else damped
        along, yy = float(s.dot(y)), float(y.dot(y))
        rounding = memory.eps * math.sqrt(float(s.dot(s)) * yy)
        # The scale of the matrix is divided by the square of y, which must not underflow.
        if math.inf > along > max(setting["sy_tol"], rounding, memory.tiny) and math.inf > yy > memory.tiny:
            memory.add(s, y, along)
        else:
            count_skipped(self, objective, state)

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        if objective.members is not None:
            return multiply_members(objective, states, self.global_state, settings[0])
        return super().apply_states(objective, states, settings)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        memory = self._memory(state, u, setting)
        if memory.slots:
            return torch.from_numpy(memory.direction(u.numpy())) if memory.numpy else memory.direction(u)
        length = float(torch.linalg.vector_norm(u)) if setting["scale_first"] else 0.0
        return u / length if 1 < length < math.inf else None

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        like = vector_like(objective)
        memory = self._memory(state, like, setting)
        return LBFGSOperator(*memory.ordered()) if len(memory) else ScaledIdentity(len(like), like.new_ones(()))


def _powell(s: Tensor, y: Tensor, B: LinearOperator) -> Tensor:
    Bs = B.matvec(s)
    sBs, sy = float(torch.dot(s, Bs)), float(torch.dot(s, y))
    if sy >= 0.2 * sBs or sBs == sy:
        return y
    theta = 0.8 * sBs / (sBs - sy)
    return theta * y + (1 - theta) * Bs


def _drop_size(part: str) -> str:
    return part.rpartition(":")[0]
