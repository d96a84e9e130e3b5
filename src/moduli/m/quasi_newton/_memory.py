"""The last pairs of steps and gradient differences, with the small matrices of the compact form kept up to date."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SMALL", "PairMemory"]

SMALL = 20_000
Small = np.ndarray[Any, np.dtype[np.float64]]


class PairMemory:
    r"""Rows of S and Y in one buffer, with $Y Y^T$, the diagonal of $S Y^T$, and the inverse of its upper part R.

    It is a view of a dictionary of plain tensors, which is what a link saves. Rows are slots that are used in turn; the
    small matrices are in order of age. A new pair costs one product with the buffer. The inverse of the triangle grows
    by a column for a new pair and loses its first row and column with the oldest, each in O(m^2).
    """

    def __init__(self, state: Any, like: Tensor, history: int) -> None:
        n = like.numel()
        held = state.get("rows")
        if held is None or held.shape[1] != n or state["history"] != history or held.dtype is not like.dtype:
            capacity = history
            # Saved vectors follow reordered parameters along every axis of their length, so no other axis may have it.
            while capacity == n or 2 * capacity == n:
                capacity += 1
            state["rows"] = torch.zeros(2 * capacity, n, dtype=like.dtype, device=like.device)
            for key in ("yy", "inverse"):
                state[key] = torch.zeros(capacity, capacity, dtype=torch.float64)
            state["sy"] = torch.zeros(1, capacity, dtype=torch.float64)
            state["slots"] = []
            state["history"] = history
            state["capacity"] = capacity
        self.state = state
        self.rows: Tensor = state["rows"]
        self.capacity: int = state["capacity"]
        self.history = history
        self.slots: list[int] = state["slots"]
        # Below this size NumPy's dispatch, on the same memory, costs less than torch's.
        self.numpy = n <= SMALL and like.device.type == "cpu"
        self._rows: Any = self.rows.numpy() if self.numpy else self.rows
        self._yy: Small = state["yy"].numpy()
        self._inverse: Small = state["inverse"].numpy()
        self._sy: Small = state["sy"].numpy()[0]
        self._order = np.array(self.slots, dtype=np.intp)

    def still(self, state: Any, like: Tensor, history: int) -> bool:
        """Whether this is still the view of that state."""
        rows = self.rows
        return (
            state.get("rows") is rows
            and state["slots"] is self.slots
            and len(self._order) == len(self.slots)
            and self.history == history
            and rows.shape[1] == like.shape[0]
            and rows.dtype is like.dtype
        )

    def __len__(self) -> int:
        return len(self.slots)

    def products(self, vector: Any) -> tuple[Small, Small]:
        """S v and Y v, oldest pair first; v is an array where NumPy is used."""
        found = self._rows.dot(vector) if self.numpy else (self.rows @ vector).double().cpu().numpy()
        if found.dtype != np.float64:
            found = found.astype(np.float64)
        return found[self._order], found[self._order + self.capacity]

    def direction(self, vector: Any) -> Any:
        """The inverse BFGS matrix times v: an array where NumPy is used, otherwise a tensor."""
        k, order = len(self.slots), self._order
        inverse, yy, sy = self._inverse[:k, :k], self._yy[:k, :k], self._sy[:k]
        gamma = float(sy[-1] / yy[-1, -1])
        of_s, of_y = self.products(vector)
        v = inverse.dot(of_s)
        weights = np.zeros(2 * self.capacity)
        weights[order] = (sy * v + gamma * (yy.dot(v) - of_y)).dot(inverse)
        weights[order + self.capacity] = -gamma * v
        if self.numpy:
            rows = self._rows
            out = weights.astype(rows.dtype, copy=False).dot(rows)
            out += rows.dtype.type(gamma) * vector
            return out
        return torch.addmv(vector, self.rows.T, torch.from_numpy(weights).to(vector), beta=gamma, alpha=1.0)

    def add(self, s: Any, y: Any, sy: float) -> None:
        """Take in a pair, and forget the oldest where there is no room."""
        k, slots = len(self.slots), self.slots
        yy, inverse = self._yy, self._inverse
        if k == self.history:
            slot = slots.pop(0)
            k -= 1
            for matrix in (yy, inverse):
                matrix[:k, :k] = matrix[1 : k + 1, 1 : k + 1].copy()
            self._sy[:k] = self._sy[1 : k + 1].copy()
        else:
            slot = k
        slots.append(slot)
        self._order = np.array(slots, dtype=np.intp)
        self._rows[slot], self._rows[slot + self.capacity] = s, y
        s_y, y_y = self.products(y)
        yy[: k + 1, k] = yy[k, : k + 1] = y_y
        self._sy[k] = sy
        inverse[k, :k] = 0.0
        inverse[:k, k] = inverse[:k, :k].dot(s_y[:k]) * (-1.0 / sy)
        inverse[k, k] = 1.0 / sy

    def clear(self) -> None:
        """Forget all pairs."""
        self.slots.clear()
        self._order = np.array([], dtype=np.intp)

    def ordered(self) -> tuple[Tensor, Tensor]:
        """S and Y with the oldest pair first, as new tensors."""
        slots = torch.tensor(self.slots, dtype=torch.long, device=self.rows.device)
        return self.rows.index_select(0, slots), self.rows.index_select(0, slots + self.capacity)
