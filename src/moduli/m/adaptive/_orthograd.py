"""Updates orthogonal to the weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import Across
from .._checks import non_negative
from .._lists import dot
from .._transforms import Settings, Tensors, UpdateTransform


class OrthoGrad(UpdateTransform):
    r"""Removes the part of the update along the weights, $u_\perp = u - \frac{\langle x, u\rangle}{\|x\|^2 + \epsilon}\,x$.

    Args:
        eps: Added to the squared norm of the weights.
        renormalize: Scale the result to the norm of the update.
        dim: "global" for all parameters as one vector, None for each tensor by itself.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> x, u = torch.tensor([2.0, 0.0]), torch.tensor([3.0, 4.0])
        >>> optim.step_tensors(m.OrthoGrad(renormalize=False), [u], params=[x])
        [tensor([0., 4.])]

    References:
        L. Prieto, M. Barsbey, P. A. M. Mediano, T. Birdal, "Grokking at the edge of numerical stability", ICLR 2025.
    """

    members = "batched"
    differentiable = True
    ranges = {non_negative: ("eps",)}

    @property
    def across(self) -> Across:  # type: ignore[override]
        return Across.MATRICES if self.defaults["dim"] is None else Across.SUMS

    def __init__(self, *, eps: float = 1e-8, renormalize: bool = True, dim: str | None = "global") -> None:
        if dim not in ("global", None):
            raise ValueError(f"OrthoGrad: dim is {dim!r}; it can be 'global' (all parameters) or None (each tensor)")
        super().__init__(locals())
        self.elementwise = self.measures = dim == "global"

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: Settings, members: int | None
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] is None:
            return None
        pairs = {"xu": (params, tensors), "xx": (params, params), "uu": (tensors, tensors)}
        return {key: dot(a, b, members) for key, (a, b) in pairs.items()}

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        if setting["dim"] is None:
            setting = {
                **setting,
                "xu": (param.conj() * tensor).real.sum(),
                "xx": param.abs().square().sum(),
                "uu": tensor.abs().square().sum(),
            }
        eps, xu, xx, uu = setting["eps"], setting["xu"], setting["xx"], setting["uu"]
        along = xu / (xx + eps)
        out: Tensor = tensor - param * along
        if setting["renormalize"]:
            left = uu - 2 * along * xu + along * along * xx
            left = left * ((left > 0) * 1.0)  # rounding can leave it below zero
            out = out * (uu**0.5 / (left**0.5 + eps))
        return out
