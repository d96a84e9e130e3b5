"""Updates with mean zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_at_least_one
from .._metrics import Axes, axes_of, check_axes
from .._transforms import Settings, Tensors, UpdateTransform


class Centralize(UpdateTransform):
    r"""Subtracts the mean from the update, $u \leftarrow u - \operatorname{mean}(u)$.

    Gradient centralisation, the mean over every axis but the output's, is `Centralize(dim=0, inverse_dims=True)`.

    Args:
        dim: None for the mean of each tensor, axes for the mean over them, "global" for the mean of everything. A tensor
            that has none of the axes is left as it is.
        inverse_dims: The axes are those to keep.
        min_size: Means of fewer elements are not subtracted.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Centralize(), [torch.tensor([3.0, 1.0])])
        [tensor([ 1., -1.])]

    References:
        H. Yong, J. Huang, X. Hua, L. Zhang, "Gradient centralization: a new optimization technique for deep neural
        networks", ECCV 2020.
    """

    members = "batched"
    differentiable = True
    static = ("dim", "min_size")
    ranges = {check_at_least_one: ("min_size",)}

    def __init__(self, *, dim: Axes | str = None, inverse_dims: bool = False, min_size: int = 2) -> None:
        dim = check_axes("Centralize", dim)
        if dim == "global" and inverse_dims:
            raise ValueError("Centralize: inverse_dims is for axes, but dim is 'global'")
        super().__init__(locals())

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: Settings, members: int | None
    ) -> dict[str, Any] | None:
        if settings[0]["dim"] != "global":
            return None
        count = sum(tensor.numel() for tensor in tensors)
        if count < settings[0]["min_size"]:
            return {"mean": 0.0}
        totals = [tensor.sum() if torch.is_grad_enabled() else tensor.sum().item() for tensor in tensors]
        return {"mean": sum(totals) / count}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if setting["dim"] == "global":
            return tensor - setting["mean"]
        axes = axes_of(tensor, setting["dim"], setting["inverse_dims"], setting["min_size"])
        if axes is None or tensor.dim() == 0:
            return tensor
        return tensor - tensor.mean(axes, keepdim=True)
