"""The last pairs of steps and gradient differences, with the small matrices of the compact form kept up to date."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._flat import is_small

_WIDE = 8_192
"""For products with larger matrices NumPy's library uses all threads, also for one that was told to use one only."""
_BLOCKS = 4
"""So they are cut into blocks of rows; those that would need more than this are left to torch."""
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
        held = state.get("rows")
        if held is None or held.shape[1] != n or state["history"] != history or held.dtype is not dtype:
            capacity = history
            # Saved vectors follow reordered parameters along every axis of their length, so no other axis may have it.
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
        self.eps = torch.finfo(dtype).eps
        self.capacity: int = state["capacity"]
        self.slots: list[int] = state["slots"]
        # Below this size NumPy's dispatch, on the same memory, costs less than torch's.
        self.numpy = is_small(n, device)
        self._rows: Any = self.rows.numpy() if self.numpy else self.rows
        self._blocks = self._split_slots() if self.numpy else []
        self._found: Any = np.empty(2 * self.capacity, dtype=self._rows.dtype) if self.numpy else None
        self._yy: Small = state["yy"].numpy()
        self._inverse: Small = state["inverse"].numpy()
        self._sy: Small = state["sy"].numpy()[0]
        self._weights: Small = np.empty(2 * self.capacity)

    def _split_slots(self) -> list[tuple[slice, Any]]:
        height = max(_WIDE // max(self.n, 1), 1)
        if height * self.n > _WIDE or 2 * self.capacity > _BLOCKS * height:
            return []
        cuts = [slice(i, min(i + height, 2 * self.capacity)) for i in range(0, 2 * self.capacity, height)]
        return [(cut, self._rows[cut]) for cut in cuts]

    def still(self, state: Any, like: Tensor, history: int) -> bool:
        """Whether this is still the view of that state."""
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
        """S v and Y v, one after the other; v is an array where NumPy is used."""
        if self._blocks:
            found: Any = self._found
            for cut, rows in self._blocks:
                np.dot(rows, vector, out=found[cut])
        else:
            given = torch.from_numpy(vector) if self.numpy else vector
            found = torch.mv(self.rows, given).cpu().numpy()
        return found if found.dtype == np.float64 else found.astype(np.float64)

    def direction(self, vector: Any) -> Any:
        """The inverse BFGS matrix times v: an array where NumPy is used, otherwise a tensor."""
        capacity, inverse, weights, newest = self.capacity, self._inverse, self._weights, self.slots[-1]
        gamma = float(self._sy[newest] / self._yy[newest, newest])
        found = self.products(vector)
        v = inverse.dot(found[:capacity])
        inner = self._yy.dot(v)
        inner -= found[capacity:]
        inner *= gamma
        inner += self._sy * v
        weights[:capacity] = inner.dot(inverse)
        v *= -gamma
        weights[capacity:] = v
        if not self.numpy:
            return torch.addmv(vector, self.rows.T, torch.from_numpy(weights).to(vector), beta=gamma, alpha=1.0)
        rows = self._rows
        given = weights if rows.dtype == np.float64 else weights.astype(rows.dtype)
        out = rows.dtype.type(gamma) * vector
        if self._blocks:
            for cut, block in self._blocks:
                out += given[cut].dot(block)
        else:
            out += torch.mv(self.rows.T, torch.from_numpy(given)).numpy()
        return out

    def add(self, s: Any, y: Any, sy: float) -> None:
        """Take in a pair, and forget the oldest where there is no room."""
        slots, inverse, capacity = self.slots, self._inverse, self.capacity
        slot = slots.pop(0) if len(slots) == self.history else len(slots)
        slots.append(slot)
        self._rows[slot], self._rows[slot + capacity] = s, y
        found = self.products(y)
        inverse[slot] = inverse[:, slot] = 0.0
        column = inverse.dot(found[:capacity])
        column *= -1.0 / sy
        column[slot] = 1.0 / sy
        inverse[:, slot] = column
        self._yy[slot] = self._yy[:, slot] = found[capacity:]
        self._sy[slot] = sy

    def clear(self) -> None:
        """Forget all pairs."""
        self.slots.clear()
        self._inverse[:] = 0.0
        self._sy[:] = 0.0

    def ordered(self) -> tuple[Tensor, Tensor]:
        """S and Y with the oldest pair first, as new tensors."""
        slots = torch.tensor(self.slots, dtype=torch.long, device=self.rows.device)
        return self.rows.index_select(0, slots), self.rows.index_select(0, slots + self.capacity)
