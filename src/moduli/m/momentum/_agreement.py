"""Scaling by how much the update agrees with the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...optim import Across, TensorTransform
from .._checks import non_negative
from .._lists import dot
from .._metrics import lengths
from .._scalars import larger
from ._cautious import agreement


class UpdateGradientSignConsistency(TensorTransform):
    r"""Replaces the update by the mask $[u_i g_i > 0]$; `Cautious` multiplies by it.

    Args:
        normalize: Divide by the fraction of ones (over all parameters).
        eps: The smallest fraction to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> u, g = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
        >>> optim.step_tensors(m.UpdateGradientSignConsistency(), [u], grads=[g])
        [tensor([1., 0.])]

    References:
        K. Liang, L. Chen, B. Liu, Q. Liu, "Cautious optimizers: improving training with one line of code", 2024.
    """

    across = Across.SUMS

    fixed_settings = ("normalize",)
    differentiable = True
    elementwise = True

    def __init__(self, *, normalize: bool = False, eps: Any = 1e-6) -> None:
        non_negative("UpdateGradientSignConsistency", eps=eps)
        super().__init__({"normalize": normalize, "eps": eps}, uses_grad=True)
        self.measures = normalize

    def measure(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        settings: Sequence[Mapping[str, Any]],
        members: int | None,
    ) -> dict[str, Any] | None:
        if not settings[0]["normalize"] or grads is None:
            return None
        return {"kept": agreement(tensors, grads, members)}

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        agrees = tensor * cast(Tensor, grad) > 0
        mask = torch.where(agrees, torch.ones_like(tensor), torch.zeros_like(tensor))
        if setting["normalize"]:
            enough = (setting["kept"] > setting["eps"]) * 1.0
            mask = mask / (setting["kept"] * enough + setting["eps"] * (1 - enough))
        return mask


class ScaleByGradCosineSimilarity(TensorTransform):
    r"""Multiplies the update by its cosine with the gradient, over all parameters: $u \leftarrow u\,\cos(u, g)$.

    Args:
        eps: The smallest product of norms to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> u, g = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
        >>> optim.step_tensors(m.ScaleByGradCosineSimilarity(), [u], grads=[g])
        [tensor([1.8000, 2.4000])]
    """

    across = Across.SUMS

    differentiable = True
    elementwise = True

    def __init__(self, *, eps: float = 1e-6) -> None:
        non_negative("ScaleByGradCosineSimilarity", eps=eps)
        super().__init__({"eps": eps}, uses_grad=True)

    def measure(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        settings: Sequence[Mapping[str, Any]],
        members: int | None,
    ) -> dict[str, Any] | None:
        given = cast(list[Tensor], grads)
        if members is None:
            sizes = (dot(tensors, tensors) * dot(given, given)) ** 0.5
            return {"cosine": dot(tensors, given) / larger(sizes, settings[0]["eps"])}
        products = torch.stack(
            [(u.double() * g).reshape(members, -1).sum(1) for u, g in zip(tensors, given, strict=True)]
        )
        return {"cosine": products.sum(0) / (lengths(tensors) * lengths(given)).clamp(min=settings[0]["eps"])}

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        out: Tensor = tensor * setting["cosine"]
        return out
