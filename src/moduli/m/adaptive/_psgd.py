"""PSGD: a preconditioner fitted so that it whitens the update."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable
from .._transforms import (
    BufferTransform,
    allow_none,
    check_at_least_one,
    choice,
    fraction,
    non_negative,
    positive,
    probability,
)
from ._axes import work
from ._kron import GEOMETRIES, balance, begin, fit, flip, limit_amplitude, precondition

Geometry = Literal["Q0.5EQ1.5", "QEQ", "QEP", "QUAD", "QUAD4P", "EQ"]


class PSGDKronWhiten(BufferTransform):
    r"""Fits one factor per axis so that their product whitens the update, and preconditions with it.

    $P = Q^T Q$ with $Q = Q_1 \otimes \cdots \otimes Q_k$ minimises $E[u^T P u + v^T P^{-1} v]$ for white noise v, so that
    $E[P u u^T P] = I$. With $p = P u$, $T_i$ its contraction with itself along all axes but i, and
    $\tau_i = n / n_i$, each factor moves by $Q_i \leftarrow Q_i - \frac{\mu}{L_i}(T_i Q_i - \tau_i Q_i)$, where $L_i$
    follows $\|T_i\| + \tau_i$, and is then turned towards a symmetric matrix. Finally $u \leftarrow P u$.

    Args:
        max_dim: Longer axes have a diagonal factor.
        max_skew: So have axes with $n_i^2$ above this times the number of elements.
        init_scale: The scale of Q at the start; None takes $\overline{u^4}^{-1/8}$ of the first update.
        lr_preconditioner: The step $\mu$ of the factors.
        betaL: Memory of $L_i$, which rises at once and falls slowly.
        damping: Size of the noise that is added to the update the factors are fitted to.
        grad_clip_max_amp: Bound on the root mean square of the result.
        update_probability: How often factors are fitted.
        dQ: The local coordinates of a factor's step, named by its form: with $M_i = T_i - \tau_i I$, "Q0.5EQ1.5" is the step
            above, "QEQ" $Q_i - \mu Q_i M_i$, "QEP" $Q_i - \mu Q_i M_i P_i$, "QUAD" $(I - \frac\mu2 M_i) Q_i (I - \frac\mu2 M_i)$,
            "QUAD4P" the same for $P_i$ in place of $Q_i$, and "EQ" a step of triangular factors, which has to solve with them.
        balance_probability: How often factors are brought to the same size.
        inner: Links that transform the update before it is preconditioned, after the factors were fitted to it.
        seed: Seed of the noise; None uses torch's own generator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.PSGDKronWhiten(seed=0), torch.zeros(2)
        >>> for _ in range(300):
        ...     out = optim.step_tensors(link, [torch.tensor([100.0, 0.01])], params=[w])[0]
        >>> [round(x, 1) for x in out.tolist()]
        [1.0, 1.0]

    References:
        X.-L. Li, "Preconditioned stochastic gradient descent", arXiv:1512.04202.
        O. Pooladzandi, X.-L. Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv:2402.04553; X.-L. Li, "Stochastic Hessian fittings with Lie groups", arXiv:2402.11858.
    """

    members = "batched"
    counts = True
    ranges = {
        check_at_least_one: ("max_dim",),
        positive: ("lr_preconditioner", "grad_clip_max_amp"),
        non_negative: ("max_skew", "damping"),
        fraction: ("betaL",),
        probability: ("update_probability", "balance_probability"),
        allow_none(positive): ("init_scale",),
    }

    def __init__(
        self,
        *,
        max_dim: int = 10_000,
        max_skew: float = 1.0,
        init_scale: float | None = None,
        lr_preconditioner: float = 0.1,
        betaL: float = 0.9,
        damping: float = 1e-9,
        grad_clip_max_amp: float = float("inf"),
        update_probability: float = 1.0,
        dQ: Geometry = "Q0.5EQ1.5",
        balance_probability: float = 0.01,
        inner: Chainable | None = None,
        seed: int | None = None,
    ) -> None:
        choice("PSGDKronWhiten", "dQ", dQ, GEOMETRIES)
        super().__init__(locals())

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        begin(state, tensor, setting)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        coin = self.get_generator("cpu", setting["seed"])
        if not tensor.numel() or not flip(setting["update_probability"], coin):
            return
        x = work(tensor).reshape(state["shape"])
        noise = None
        if setting["damping"] > 0 or setting["dQ"] == "EQ":
            generator = self.get_generator(x.device, setting["seed"])
            noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
            x = x.add(noise, alpha=setting["damping"])
        if flip(setting["balance_probability"], coin):
            balance(state, setting)
        fit(state, x, noise if setting["dQ"] == "EQ" else None, setting)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        out = precondition(state, work(tensor).reshape(state["shape"]))
        out = limit_amplitude(out, setting["grad_clip_max_amp"])
        return out.reshape(tensor.shape).to(tensor.dtype)
