"""GGT: the full matrix of the last updates, through its small side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import allow_none, check_at_least_one, non_negative, positive
from .._transforms import BufferTransform
from ._axes import eigh, work


class GGT(BufferTransform):
    r"""Full-matrix adaptation from the last r updates, $u \leftarrow (M M^T + \epsilon I)^{-1/2} u$ with M their matrix.

    Only the r by r matrix $M^T M = V \Lambda V^T$ is decomposed. With $U = M V \Lambda^{-1/2}$ the result is
    $U (\Lambda + \epsilon)^{-1/2} U^T u + \epsilon^{-1/2}(u - U U^T u)$: the part of the update outside the last ones is
    kept. To run any links in that basis, `GGTBasis`.

    Args:
        history_size: How many updates are kept, r.
        update_freq: Keep every n-th update.
        eig_tol: Eigenvalues below this times the largest count as zero.
        truncate: Use only this many of the largest eigenvalues.
        damping: The number $\epsilon$, above zero.
        rdamping: Added to $\epsilon$, relative to the largest eigenvalue.
        matrix_power: The exponent.
        concat_params: One history for all parameters; False: one for each tensor.
        inner: Links that transform the update before it is preconditioned, after it entered the history.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> _ = mo.Optimizer([w], m.GGT(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.7000, 3.6000])

    References:
        N. Agarwal et al., "Efficient full-matrix adaptive regularization", ICML 2019.
    """

    decides_on_host = True
    ranges = {
        check_at_least_one: ("history_size",),
        allow_none(check_at_least_one): ("truncate",),
        positive: ("damping",),
        non_negative: ("rdamping", "eig_tol"),
    }

    def __init__(
        self,
        *,
        history_size: int = 100,
        update_freq: int = 1,
        eig_tol: float = 1e-7,
        truncate: int | None = None,
        damping: float = 1e-4,
        rdamping: float = 0.0,
        matrix_power: float = -0.5,
        concat_params: bool = True,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad", "history")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["history"] = deque(maxlen=setting["history_size"])

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = work(tensor).reshape(-1)
        history = state["history"]
        history.append(x.clone())
        state["values"], state["basis"], top = find_span(history, setting["eig_tol"], setting["truncate"])
        state["damping"] = setting["damping"] + setting["rdamping"] * top

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        x = work(tensor).reshape(-1)
        basis, eps, p = state["basis"], state["damping"], setting["matrix_power"]
        inside = basis.mH @ x
        outside = x - basis @ inside
        out = basis @ (inside * (state["values"] + eps) ** p) + outside * eps**p
        return out.reshape(tensor.shape).to(tensor.dtype)


def find_span(history: Iterable[Tensor], eig_tol: float, truncate: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The nonzero eigenvalues of a history's second moment with their vectors, in rising order, and the largest of all."""
    matrix = torch.stack(list(history), dim=1)
    values, vectors = eigh(matrix.mH @ matrix)
    top = values[-1].clamp(min=0)
    kept = values > eig_tol * top
    if truncate is not None:
        kept[:-truncate] = False
    return values[kept], (matrix @ vectors[:, kept]) / values[kept].sqrt(), top
