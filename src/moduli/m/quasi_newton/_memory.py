"""The last pairs of steps and gradient differences, with the small matrices of the compact form kept up to date."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["PairMemory"]

_SMALL = 20_000
Small = np.ndarray[Any, np.dtype[np.float64]]


class PairMemory:
    r"""Rows of S and Y in one buffer, and $S Y^T$, $Y Y^T$, $S S^T$ and the inverse of $R$, the upper part of $S Y^T$.

    It is a view of a dictionary of plain tensors, which is what a link saves. Rows are slots that are used in turn; the
    small matrices are in order of age. A new pair costs two products with the buffer. The inverse of the triangle grows
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
            for key in ("sy", "yy", "ss", "inverse"):
                state[key] = torch.zeros(capacity, capacity, dtype=torch.float64)
            state["slots"] = []
            state["history"] = history
            state["capacity"] = capacity
        self.state = state
        self.rows: Tensor = state["rows"]
        self.capacity: int = state["capacity"]
        self.history = history
        self.slots: list[int] = state["slots"]
        # Below this size NumPy's dispatch, on the same memory, costs less than torch's.
        self.numpy = n <= _SMALL and like.device.type == "cpu"

    def __len__(self) -> int:
        return len(self.slots)

    def small(self, key: str) -> Small:
        """One of the small matrices, the part that is in use."""
        k = len(self.slots)
        out: Small = self.state[key].numpy()[:k, :k]
        return out

    def products(self, vector: Tensor) -> tuple[Small, Small]:
        """S v and Y v, oldest pair first."""
        if self.numpy:
            found: Small = self.rows.numpy() @ vector.numpy()
        else:
            found = (self.rows @ vector).double().cpu().numpy()
        slots = self.slots
        return found[slots].astype(np.float64), found[[slot + self.capacity for slot in slots]].astype(np.float64)

    def combination(self, scale: float, vector: Tensor, of_s: Small, of_y: Small) -> Tensor:
        """scale v + S^T a + Y^T b."""
        weights = np.zeros(2 * self.capacity)
        weights[self.slots] = of_s
        weights[[slot + self.capacity for slot in self.slots]] = of_y
        if self.numpy:
            rows = self.rows.numpy()
            out = weights.astype(rows.dtype) @ rows
            out += rows.dtype.type(scale) * vector.numpy()
            return torch.from_numpy(out)
        given = torch.from_numpy(weights).to(vector)
        return torch.addmv(vector, self.rows.T, given, beta=scale, alpha=1.0)

    def add(self, s: Tensor, y: Tensor) -> None:
        """Take in a pair, and forget the oldest where there is no room."""
        k, slots = len(self.slots), self.slots
        if k == self.history:
            slot = slots.pop(0)
            for key in ("sy", "yy", "ss", "inverse"):
                matrix = self.state[key].numpy()
                matrix[: k - 1, : k - 1] = matrix[1:k, 1:k].copy()
            k -= 1
        else:
            slot = k
        slots.append(slot)
        if self.numpy:
            rows = self.rows.numpy()
            rows[slot], rows[slot + self.capacity] = s.numpy(), y.numpy()
        else:
            self.rows[slot].copy_(s)
            self.rows[slot + self.capacity].copy_(y)
        (s_s, y_s), (s_y, y_y) = self.products(s), self.products(y)
        sy, yy, ss = self.small("sy"), self.small("yy"), self.small("ss")
        sy[:, k], sy[k, :] = s_y, y_s
        yy[:, k] = yy[k, :] = y_y
        ss[:, k] = ss[k, :] = s_s
        inverse = self.small("inverse")
        rho = 1.0 / sy[k, k]
        inverse[k, :] = 0.0
        inverse[:k, k] = -rho * (inverse[:k, :k] @ s_y[:k])
        inverse[k, k] = rho

    def clear(self) -> None:
        """Forget all pairs."""
        self.slots.clear()

    def ordered(self) -> tuple[Tensor, Tensor]:
        """S and Y with the oldest pair first, as new tensors."""
        slots = torch.tensor(self.slots, dtype=torch.long, device=self.rows.device)
        return self.rows.index_select(0, slots), self.rows.index_select(0, slots + self.capacity)
