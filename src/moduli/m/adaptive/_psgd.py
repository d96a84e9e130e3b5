"""PSGD: a preconditioner fitted so that it whitens the update, a factor per axis or of low rank."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import BufferTransform, Chainable, DeclaredLink, MatrixLink, Ranges, as_real, restore_complex
from ...optim import ranges as check
from . import _kron, _lra
from ._axes import work

Geometry = Literal["Q0.5EQ1.5", "QEQ", "QEP", "QUAD", "QUAD4P", "EQ"]


class _PSGDFit(DeclaredLink):
    """The base of all links of the family: the settings of the preconditioner's fit."""

    ranges: ClassVar[Ranges] = {
        check.at_least_one: ("max_dim", "rank"),
        check.positive: ("lr_preconditioner", "h", "grad_clip_max_amp", "grad_clip_max_norm"),
        check.non_negative: ("max_skew", "damping"),
        check.fraction: ("betaL",),
        check.probability: ("update_probability", "balance_probability"),
        check.allow(check.positive, None): ("init_scale",),
    }

    init_scale: float | None = None
    lr_preconditioner: float = 0.1
    betaL: float = 0.9
    damping: float = 1e-9
    update_probability: float = 1.0
    inner: Chainable | None = None
    seed: int | None = None


class _PSGDWhiten(_PSGDFit, BufferTransform):
    """The base of the two links that whiten the update."""

    search_ranges = {"lr": UNIT_STEPS}

    counts = True

    grad_clip_max_amp: float = float("inf")


class PSGDKronWhiten(MatrixLink, _PSGDWhiten):
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
        batch: Axes of the parameter whose entries are matrices by themselves ("head"); the optimizer has to be given the axes of
            the model (see `optim.matrix_view`).
        matrix: Rows and columns of the matrices by their axes ("out in").

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
    attributes = ("batch", "matrix")

    max_dim: int = 10_000
    max_skew: float = 1.0
    dQ: Geometry = "Q0.5EQ1.5"
    balance_probability: float = 0.01
    batch: str | tuple[str, ...] | None = None
    matrix: str | None = None

    follows = {"factors": "factors", "products": "factors"}

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        _kron.begin(state, tensor, setting)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        coin = self.get_generator("cpu", setting["seed"])
        if not tensor.numel() or not _kron.flip(setting["update_probability"], coin):
            return
        x = work(tensor).reshape(state["shape"])
        noise = None
        if setting["damping"] > 0 or setting["dQ"] == "EQ":
            generator = self.get_generator(x.device, setting["seed"])
            noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
            x = x.add(noise, alpha=setting["damping"])
        if _kron.flip(setting["balance_probability"], coin):
            _kron.balance(state, setting)
        _kron.fit(state, x, noise if setting["dQ"] == "EQ" else None, setting)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        out = _kron.precondition(state, work(tensor).reshape(state["shape"]))
        out = _kron.limit_amplitude(out, setting["grad_clip_max_amp"])
        return out.reshape(tensor.shape).to(tensor.dtype)


class PSGDLRAWhiten(_PSGDWhiten):
    r"""Fits a diagonal and a correction of low rank so that together they whiten the update, and preconditions with them.

    $P = Q^T Q$ with $Q = (I + U V^T)\operatorname{diag}(d)$ minimises $E[u^T P u + v^T P^{-1} v]$ for white noise v. With
    $a = Qu$ and $b = Q^{-T}v$, either $U \leftarrow U - \frac{\mu}{L}(a a^T - b b^T) V (I + V^TU)$ or
    $V \leftarrow V - \frac{\mu}{L}(I + VU^T)(a a^T - b b^T) U$ (by a coin), and
    $d \leftarrow d - \frac{\mu}{L} d \odot (Pu \odot u - v \odot P^{-1}v)$, where each $L$ bounds the size of the change.
    Finally $u \leftarrow Pu$.

    Args:
        rank: Columns of U and V.
        init_scale: The scale of d at the start; None takes $\overline{u^4}^{-1/8}$ of the first update.
        lr_preconditioner: The step $\mu$.
        betaL: Memory of the bounds, which rise at once and fall slowly.
        damping: Size of the noise that is added to the update the factors are fitted to.
        grad_clip_max_amp: Bound on the root mean square of the result.
        update_probability: How often factors are fitted.
        concat_params: One preconditioner for all parameters; False: one for each tensor.
        inner: Links that transform the update before it is preconditioned, after the factors were fitted to it.
        seed: Seed of the noise; None uses torch's own generator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.PSGDLRAWhiten(rank=1, seed=0), torch.zeros(2)
        >>> noise = torch.Generator().manual_seed(0)
        >>> out = [
        ...     optim.step_tensors(link, [torch.tensor([10.0, 0.1]) * torch.randn(2, generator=noise)], params=[w])[0]
        ...     for _ in range(600)
        ... ]
        >>> (torch.stack(out[300:]).square().mean(0) - 1).abs() < 0.5
        tensor([True, True])

    References:
        O. Pooladzandi, X.-L. Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv:2402.04553; X.-L. Li, "Stochastic Hessian fittings with Lie groups", arXiv:2402.11858.
    """

    rank: int = 10
    concat_params: bool = True

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        x = _vector(tensor)
        _lra.begin(state, x, setting, self.get_generator(x.device, setting["seed"]))

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        if not tensor.numel():
            return
        chance = torch.rand(2, generator=self.get_generator("cpu", setting["seed"]))
        if float(chance[0]) >= setting["update_probability"]:
            return
        x = _vector(tensor)
        noise = torch.randn(
            x.shape, dtype=x.dtype, device=x.device, generator=self.get_generator(x.device, setting["seed"])
        )
        _lra.fit(state, x.add(noise, alpha=setting["damping"]), noise, bool(chance[1] < 0.5), setting)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if not tensor.numel():
            return tensor
        out = _kron.limit_amplitude(_lra.precondition(state, _vector(tensor)), setting["grad_clip_max_amp"])
        return restore_complex(out.reshape(as_real(tensor).shape), tensor).to(tensor.dtype)


def _vector(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor as one real vector."""
    return work(as_real(tensor)).reshape(-1)
