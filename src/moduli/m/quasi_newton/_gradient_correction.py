"""The gradient where an exact line search would have ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Objective
from ._pairs import PairLink, take_tensors


class GradientCorrection(PairLink):
    r"""Corrects the update as if the last line search had been exact: $u \leftarrow u - y\,\frac{s^Tu}{s^Ty}$.

    With s the last step and y the change of the update, the result has no part left along s. Use it as `inner` of a
    quasi-Newton link, whose theory supposes that.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DFP(inner=m.GradientCorrection()), m.Backtracking())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        S. Hoshino, "A formulation of variable metric methods", J. Inst. Maths Applics 10 (1972).
    """

    def __init__(self) -> None:
        super().__init__()

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """The pair of the last step."""
        _, s, y, _ = take_tensors(objective, state, {"ptol": 0.0, "gtol": 0.0})
        state.pop("s", None)
        if s is not None and y is not None and torch.dot(s, y).item() > 0:
            state["s"], state["y"] = s, y

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        """Takes out the part along the last step."""
        if "s" not in state:
            return None
        s, y = state["s"], state["y"]
        return u - y * (torch.dot(s, u.to(s.dtype)) / torch.dot(s, y))
