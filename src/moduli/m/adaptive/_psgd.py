"""PSGD: a preconditioner fitted so that it whitens the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, TensorTransform
from .._checks import at_least_one, fraction, non_negative, positive
from ._axes import merged_shape, multiply, work

__all__ = ["PSGDKronWhiten"]

# The longest step of a rotation towards a symmetric factor; second order, so it must be small.
_ROTATION = 0.125


def _axis_view(vector: Tensor, axis: int, dims: int) -> Tensor:
    shape = [1] * dims
    shape[axis] = -1
    return vector.reshape(shape)


def _through(tensor: Tensor, factors: list[Tensor], adjoint: bool = False) -> Tensor:
    """Each factor (a matrix, or a diagonal as a vector) along its axis."""
    matrices: list[Tensor | None] = [factor if factor.dim() == 2 else None for factor in factors]
    if any(matrix is not None for matrix in matrices):
        tensor = multiply(tensor, matrices, adjoint)
    for axis, factor in enumerate(factors):
        if factor.dim() == 1:
            tensor = tensor * _axis_view(factor, axis, tensor.dim())
    return tensor


def _largest(matrix: Tensor) -> Tensor:
    """About the largest eigenvalue of a positive matrix: two steps of power iteration from its largest row."""
    start = matrix[torch.diagonal(matrix).real.argmax()]
    x = matrix @ start.conj()
    x = matrix @ (x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(matrix.dtype).tiny))
    length: Tensor = torch.linalg.vector_norm(x)
    return length


def _straighten(q: Tensor) -> Tensor:
    """Turn a factor a little towards a symmetric one, a step of the orthogonal Procrustes problem."""
    skew = q.mH - q
    size = torch.linalg.matrix_norm(skew) / 2**0.5
    skew = skew / size.clamp(min=torch.finfo(q.dtype).tiny)
    turned = skew @ q
    first = torch.diagonal(turned).real.sum()
    second = -(skew.conj() * turned).real.sum()  # the trace of skew @ skew @ q
    limit = torch.full_like(first, _ROTATION)
    step = torch.where(second < 0, torch.minimum(-first / second, limit), limit)
    step = torch.where((first > 0) & (size > 0), step, torch.zeros_like(step))
    out: Tensor = q + step * (turned + (0.5 * step) * (skew @ turned))
    return out


class PSGDKronWhiten(TensorTransform):
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

    counts = True

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
        balance_probability: float = 0.01,
        inner: Chainable | None = None,
        seed: int | None = None,
    ) -> None:
        at_least_one("PSGDKronWhiten", max_dim=max_dim)
        positive("PSGDKronWhiten", lr_preconditioner=lr_preconditioner, grad_clip_max_amp=grad_clip_max_amp)
        non_negative("PSGDKronWhiten", max_skew=max_skew, damping=damping)
        fraction("PSGDKronWhiten", betaL=betaL)
        for key, value in (("update", update_probability), ("balance", balance_probability)):
            if not 0 <= value <= 1:
                raise ValueError(f"PSGDKronWhiten: {key}_probability is {value!r}; give a number from 0 to 1")
        if init_scale is not None:
            positive("PSGDKronWhiten", init_scale=init_scale)
        super().__init__(
            {
                "max_dim": max_dim,
                "max_skew": max_skew,
                "init_scale": init_scale,
                "lr_preconditioner": lr_preconditioner,
                "betaL": betaL,
                "damping": damping,
                "grad_clip_max_amp": grad_clip_max_amp,
                "update_probability": update_probability,
                "balance_probability": balance_probability,
                "seed": seed,
            },
            inner=inner,
        )

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        x = work(tensor)
        shape = merged_shape(tensor.shape, 0, merge=False) or (1,)
        state["shape"] = shape
        scale = setting["init_scale"]
        if scale is None:
            fourth = float(x.abs().double().pow(4).mean()) if x.numel() else 1.0
            scale = (fourth + setting["damping"] ** 4 + 1e-40) ** (-1 / 8)
        each = scale ** (1 / len(shape))
        factors = []
        for size in shape:
            diagonal = size > setting["max_dim"] or size * size > setting["max_skew"] * x.numel()
            ones = torch.ones(size, dtype=x.dtype, device=x.device)
            factors.append(ones * each if diagonal else torch.diag(ones) * each)
        state["factors"] = factors
        state["lipschitz"] = [torch.zeros((), dtype=x.abs().dtype, device=x.device) for _ in shape]

    def _chance(self, probability: float, tensor: Tensor, setting: Any) -> bool:
        if probability >= 1 or probability <= 0:
            return probability >= 1
        generator = self.get_generator("cpu", setting["seed"])
        return bool(torch.rand((), generator=generator) < probability)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        if not tensor.numel() or not self._chance(setting["update_probability"], tensor, setting):
            return
        x = work(tensor).reshape(state["shape"])
        if setting["damping"] > 0:
            generator = self.get_generator(x.device, setting["seed"])
            x = x + setting["damping"] * torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
        factors = state["factors"]
        if len(factors) > 1 and self._chance(setting["balance_probability"], tensor, setting):
            sizes = torch.stack([factor.abs().amax() for factor in factors])
            mean = sizes.log().mean().exp()
            factors = [factor * (mean / size) for factor, size in zip(factors, sizes, strict=True)]
        p = _through(_through(x, factors), factors, adjoint=True)
        fitted = []
        for axis, q in enumerate(factors):
            tau = x.numel() / q.shape[0]
            unfolded = p.movedim(axis, 0).reshape(q.shape[0], -1)
            if q.dim() == 1:
                contracted = unfolded.abs().square().sum(1)
                ell = contracted.amax() + tau
            else:
                contracted = unfolded @ unfolded.mH
                ell = _largest(contracted) + tau
            known = state["lipschitz"][axis]
            known.copy_(torch.maximum(setting["betaL"] * known + (1 - setting["betaL"]) * ell, ell))
            rate = setting["lr_preconditioner"] / known
            if q.dim() == 1:
                fitted.append(q * (1 - rate * (contracted - tau)))
            else:
                fitted.append(_straighten(q * (1 + rate * tau) - rate * (contracted @ q)))
        state["factors"] = fitted

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        if not tensor.numel():
            return tensor
        factors = state["factors"]
        out = _through(_through(work(tensor).reshape(state["shape"]), factors), factors, adjoint=True)
        if setting["grad_clip_max_amp"] != float("inf"):
            amplitude = out.abs().square().mean().sqrt()
            out = out * (setting["grad_clip_max_amp"] / amplitude.clamp(min=setting["grad_clip_max_amp"]))
        return out.reshape(tensor.shape).to(tensor.dtype)
