"""PSGD fitted to products with the Hessian: a preconditioner that becomes the inverse of its absolute value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Objective, map_alike, sample_like
from .._vectors import VectorLink, flat, mask_absent, refuse_complex
from ..adaptive import _kron, _lra
from ..adaptive._axes import work
from ..adaptive._psgd import Geometry, _PSGDFit
from ._newton import _SecondOrderLink


class _PSGDNewton(_PSGDFit, _SecondOrderLink):
    """The base of the three links: pairs of random vectors and their products with the Hessian."""

    shared_settings = ("damping", "update_probability")

    hvp_method: str = "autograd"
    h: float = 1e-3
    distribution: str = "normal"

    def pairs(self, objective: Objective, setting: Any) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return random vectors and their products, with a little noise; None if they are not drawn at this step."""
        refuse_complex(type(self).__name__, objective.params)
        started = "started" in self.global_state
        self.global_state["started"] = True
        if not _kron.flip(setting["update_probability"], self.get_generator("cpu", self.seed)) and started:
            return None
        generator = self.get_generator(objective.params[0].device, self.seed)
        v = sample_like(objective.params, setting["distribution"], generator=generator)
        products = objective.hessian_vector_product(v, hvp_method=setting["hvp_method"], h=setting["h"])[0]
        noise = sample_like(objective.params, "normal", generator=generator)
        products = [Hv + setting["damping"] * z for Hv, z in zip(products, noise, strict=True)]
        return v, mask_absent(products, objective.present)


class PSGDKronNewton(_PSGDNewton):
    r"""Fits one factor per axis so that their product becomes about $|H|^{-1}$, and preconditions with it.

    $P = Q^T Q$ with $Q = Q_1 \otimes \cdots \otimes Q_k$ for each tensor minimises $E[h^T P h + v^T P^{-1} v]$ for random
    v and $h = Hv$, so that $E[P h h^T P] = E[v v^T]$. With $T_i$ and $C_i$ the contractions of $Ph$ and of v with
    themselves along all axes but i, $Q_i \leftarrow Q_i - \frac{\mu}{L_i}(T_i - C_i) Q_i$; `PSGDKronWhiten` has the details.

    Args:
        max_dim: Longer axes have a diagonal factor.
        max_skew: So have axes with $n_i^2$ above this times the number of elements.
        init_scale: The scale of Q at the start; None takes $\overline{h^4}^{-1/8}$ of the first product.
        lr_preconditioner: The step $\mu$ of the factors.
        betaL: Memory of $L_i$, which rises at once and falls slowly.
        damping: Size of the noise that is added to products.
        grad_clip_max_amp: Bound on the root mean square of the result, of each tensor.
        update_probability: How often factors are fitted.
        dQ: The local coordinates of a step, as for `PSGDKronWhiten`.
        balance_probability: How often factors are brought to the same size.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        h: The length of difference steps.
        distribution: "normal", "rademacher", "uniform" or "sphere".
        inner: Links that transform the update before it is preconditioned, after the factors were fitted.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.PSGDKronNewton(seed=0), m.LR(0.3))
        >>> for _ in range(100):
        ...     _ = opt.step(mo.closure(lambda: 4 * w[0] ** 2 + 0.5 * w[1] ** 2))
        >>> bool(w.abs().max() < 0.05)
        True

    References:
        X.-L. Li, "Preconditioned stochastic gradient descent", arXiv:1512.04202; "Stochastic Hessian fittings with Lie
        groups", arXiv:2402.11858.
    """

    max_dim: int = 10_000
    max_skew: float = 1.0
    grad_clip_max_amp: float = float("inf")
    dQ: Geometry = "Q0.5EQ1.5"
    balance_probability: float = 0.01

    follows = {"factors": "factors", "products": "factors"}

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        drawn = self.pairs(objective, settings[0])
        if drawn is None:
            return
        pairs, rows, own = [], [], []
        for i, (v, Hv, state, setting) in enumerate(zip(*drawn, states, settings, strict=True)):
            if not v.numel() or (objective.present is not None and not objective.present[i]):
                continue
            if "factors" not in state:
                _kron.begin(state, Hv, setting)
            if _kron.flip(setting["balance_probability"], self.get_generator("cpu", self.seed)):
                _kron.balance(state, setting)
            shape = state["shape"]
            pairs.append((work(Hv).reshape(shape), work(v).reshape(shape)))
            rows.append(state)
            own.append(setting)
        map_alike(lambda i, pair, state: _kron.fit(state, pair[0], pair[1], own[i]), pairs, rows, own)

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        out = list(objective.get_updates())
        positions = [i for i, state in enumerate(states) if "factors" in state]

        def precondition(k: int, item: Sequence[Any], state: dict[str, Any]) -> Tensor:
            preconditioned = _kron.precondition(state, work(item[0]).reshape(state["shape"]))
            preconditioned = _kron.limit_amplitude(preconditioned, settings[positions[k]]["grad_clip_max_amp"])
            return preconditioned.reshape(item[0].shape).to(item[0].dtype)

        rows, own = [states[i] for i in positions], [settings[i] for i in positions]
        for i, tensor in zip(
            positions, map_alike(precondition, [(out[i],) for i in positions], rows, own), strict=True
        ):
            out[i] = tensor
        objective.updates = out
        return objective


class _OneVector(_PSGDNewton, VectorLink):
    """One preconditioner for all parameters, as one vector."""

    @abstractmethod
    def _fit(self, state: dict[str, Any], Hv: Tensor, v: Tensor, setting: Any) -> None: ...

    @abstractmethod
    def _precondition(self, state: dict[str, Any], u: Tensor) -> Tensor: ...

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        pair = self.pairs(objective, setting)
        if pair is not None:
            self._fit(state, flat(pair[1]).clone(), flat(pair[0]).clone(), setting)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        out, limit = self._precondition(state, u), setting["grad_clip_max_norm"]
        if limit != float("inf"):
            out = out * (limit / torch.linalg.vector_norm(out).clamp(min=limit))
        return out


class PSGDDenseNewton(_OneVector):
    r"""Fits a dense matrix over all parameters until it is about $|H|^{-1}$, and preconditions with it.

    $P = Q^T Q$ minimises $E[h^T P h + v^T P^{-1} v]$ for random v and $h = Hv$:
    $Q \leftarrow Q - \frac{\mu}{L}(p p^T - v v^T) Q$ with $p = Ph$, then Q is turned towards a symmetric matrix. No system is
    solved, and negative curvature counts by its size. For small problems: the matrix has a row for each parameter.

    Args:
        init_scale: The scale of Q at the start; None takes $\overline{h^4}^{-1/8}$ of the first product.
        lr_preconditioner: The step $\mu$.
        betaL: Memory of $L$, which rises at once and falls slowly.
        damping: Size of the noise that is added to products.
        grad_clip_max_norm: Bound on the norm of the result.
        update_probability: How often Q is fitted.
        dQ: The local coordinates of a step, as for `PSGDKronWhiten`.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        h: The length of difference steps.
        distribution: "normal", "rademacher", "uniform" or "sphere".
        inner: Links that transform the update before it is preconditioned, after Q was fitted.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.PSGDDenseNewton(seed=0), m.LR(0.3))
        >>> for _ in range(100):
        ...     _ = opt.step(mo.closure(lambda: 4 * w[0] ** 2 + 0.5 * w[1] ** 2))
        >>> bool(w.abs().max() < 0.05)
        True

    References:
        X.-L. Li, "Preconditioned stochastic gradient descent", arXiv:1512.04202; "Stochastic Hessian fittings with Lie
        groups", arXiv:2402.11858.
    """

    grad_clip_max_norm: float = float("inf")
    dQ: Geometry = "Q0.5EQ1.5"

    def _fit(self, state: dict[str, Any], Hv: Tensor, v: Tensor, setting: Any) -> None:
        if "factors" not in state:
            _kron.begin(state, Hv, {**setting, "max_dim": Hv.numel(), "max_skew": float("inf")})
        _kron.fit(state, Hv.reshape(state["shape"]), v.reshape(state["shape"]), setting)

    def _precondition(self, state: dict[str, Any], u: Tensor) -> Tensor:
        return _kron.precondition(state, u.reshape(state["shape"])).reshape(-1)


class PSGDLRANewton(_OneVector):
    r"""Fits a diagonal and a correction of low rank until their product is about $|H|^{-1}$, and preconditions with it.

    As `PSGDLRAWhiten`, $P = Q^T Q$ with $Q = (I + U V^T)\operatorname{diag}(d)$, fitted to pairs of random v and $h = Hv$.

    Args:
        rank: Columns of U and V.
        init_scale: The scale of d at the start; None takes $\overline{h^4}^{-1/8}$ of the first product.
        lr_preconditioner: The step of the factors.
        betaL: Memory of the bounds on their changes, which rise at once and fall slowly.
        damping: Size of the noise that is added to products.
        grad_clip_max_norm: Bound on the norm of the result.
        update_probability: How often factors are fitted.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        h: The length of difference steps.
        distribution: "normal", "rademacher", "uniform" or "sphere".
        inner: Links that transform the update before it is preconditioned, after the factors were fitted.
        seed: Draws from a generator of its own, which is saved; None for torch's.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.PSGDLRANewton(rank=1, seed=0), m.LR(0.3))
        >>> for _ in range(100):
        ...     _ = opt.step(mo.closure(lambda: 4 * w[0] ** 2 + 0.5 * w[1] ** 2))
        >>> bool(w.abs().max() < 0.05)
        True

    References:
        O. Pooladzandi, X.-L. Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv:2402.04553; X.-L. Li, "Stochastic Hessian fittings with Lie groups", arXiv:2402.11858.
    """

    rank: int = 10
    grad_clip_max_norm: float = float("inf")

    def _fit(self, state: dict[str, Any], Hv: Tensor, v: Tensor, setting: Any) -> None:
        if "d" not in state:
            _lra.begin(state, Hv, setting, self.get_generator(Hv.device, self.seed))
        coin = torch.rand((), generator=self.get_generator("cpu", self.seed))
        _lra.fit(state, Hv, v, bool(coin < 0.5), setting)

    def _precondition(self, state: dict[str, Any], u: Tensor) -> Tensor:
        return _lra.precondition(state, u)
