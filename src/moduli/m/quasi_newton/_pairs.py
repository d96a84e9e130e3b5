"""Pairs of steps and changes of the update, for links over all parameters concatenated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from .._flat import flat, is_small
from .._vector_link import VectorLink, gather_update


class PairLink(VectorLink):
    """A link that learns from pairs, each made of the point and update before and now."""

    def reset_for_online(self) -> None:
        """Forgets the last point, so that no pair is made across an evaluation of another function."""
        super().reset_for_online()
        for state in self.state.values():
            for key in ("x", "u", "loss"):
                state.pop(key, None)


def take_pair(objective: Objective, state: Any, ptol: float, gtol: float) -> tuple[Tensor, Any, Any, str]:
    """(x, s, y, verdict) of all parameters; s and y are None at first, and the verdict says why they are of no use.

    They are arrays where the vector is small and tensors elsewhere; the verdict is "first" or "new" where nothing fitting was
    remembered, "step" or "gradient" where a difference is within its threshold, and "" for a pair.
    """
    x, u = flat(objective.params), gather_update(objective)
    before: Tensor | None = state.get("x")
    if before is None or before.shape != x.shape or before.dtype != x.dtype:
        state["x"], state["u"] = x.clone(), u.clone()
        return x, None, None, "first" if before is None else "new"
    known: list[Any] = [x, u, before, state["u"]]
    if is_small(x.numel(), x.device):
        known = [tensor.numpy() for tensor in known]
    s, y = known[0] - known[2], known[1] - known[3]
    known[2][:], known[3][:] = known[0], known[1]
    verdict = "" if _exceeds(y, gtol) else "gradient"
    return x, s, y, verdict if _exceeds(s, ptol) else "step"


def take_tensors(objective: Objective, state: Any, setting: Any) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """What `take_pair` finds, as tensors; s and y are None where they are of no use."""
    x, s, y, verdict = take_pair(objective, state, setting["ptol"], setting["gtol"])
    return (x, None, None, verdict) if verdict else (x, torch.as_tensor(s), torch.as_tensor(y), verdict)


def _exceeds(vector: Any, tol: float) -> bool:
    """Whether the largest component of an array or tensor is above a threshold, and all are finite."""
    if tol * tol * len(vector) < float(vector.dot(vector)) < float("inf"):
        return True  # the mean square is above the threshold's
    return len(vector) > 0 and tol < float(abs(vector).max()) < float("inf")
