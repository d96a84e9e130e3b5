"""How quasi-Newton links come by their pairs: the last point and gradient, and what changed since."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from .._flat import flat, is_small, mask_absent


def changed(
    objective: Objective, state: Any, ptol: float, gtol: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, str]:
    """(x, u, s, y, verdict); s and y are None at first, and the verdict says why a pair is of no use ("" where it is).

    The point and the update are remembered for the next call.
    """
    x = flat(objective.params)
    u = flat(mask_absent(objective.peek_updates(), objective.present))
    x_before, u_before = state.get("x"), state.get("u")
    if x_before is None or x_before.shape != x.shape or x_before.dtype != x.dtype:
        state["x"], state["u"] = x.clone(), u.clone()
        return x, u, None, None, "first" if x_before is None else "new"
    if is_small(x.numel(), x.device):
        a, b, c, d = x.numpy(), x_before.numpy(), u.numpy(), u_before.numpy()
        s, y = torch.from_numpy(a - b), torch.from_numpy(c - d)
        b[:], d[:] = a, c
    else:
        s, y = x - x_before, u - u_before
        x_before.copy_(x)
        u_before.copy_(u)
    if not exceeds(s, ptol):
        return x, u, s, y, "step"
    if not exceeds(y, gtol):
        return x, u, s, y, "gradient"
    return x, u, s, y, ""


def exceeds(vector: Tensor, tol: float) -> bool:
    """Whether the largest component is above a threshold, and all are finite."""
    if vector.numel() == 0:
        return False
    if is_small(vector.numel(), vector.device):
        array = vector.numpy()
        return exceeds_array(array, float(array.dot(array)), tol)
    largest = float(torch.linalg.vector_norm(vector, float("inf")))
    return tol < largest < float("inf")


def exceeds_array(array: Any, square: float, tol: float) -> bool:
    """The same for an array whose squared length is known."""
    if tol * tol * len(array) < square < float("inf"):
        return True  # the mean square is above the threshold's
    return len(array) > 0 and tol < float(abs(array).max()) < float("inf")


def forget_point(state: Any) -> None:
    """Drop the last point, so that the next pair is not made across an evaluation of another function."""
    state.pop("x", None)
    state.pop("u", None)
