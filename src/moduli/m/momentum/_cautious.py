"""Cautious updates: move only where the update agrees with the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ... import kernels
from ...optim import Across, TensorTransform
from .._checks import choice, non_negative
from .._scalars import larger, read


def agreement(first: list[Tensor], second: list[Tensor], members: int | None) -> Any:
    """The fraction of elements where two updates point the same way; one number per member for a population."""
    if kernels.over_processes() is not None:
        signs = [(a * b > 0).double() for a, b in zip(first, second, strict=True)]
        every = read(kernels.sum([torch.ones_like(sign) for sign in signs]))
        return read(kernels.sum(signs)) / larger(every, 1.0)
    if members is None and not torch.is_grad_enabled():
        count = sum(tensor.numel() for tensor in first)
        return read(kernels.sum(_signs_agree(first, second))) / max(count, 1)
    # In a differentiable step numbers may be those of `torch.func`, which can't be read.
    shape = () if members is None else (members,)
    rows = [(a * b > 0).reshape(*shape, -1).sum(-1) for a, b in zip(first, second, strict=True)]
    return torch.stack(rows).sum(0).double() / max(sum(tensor.numel() for tensor in first) // (members or 1), 1)


def _agrees(first: Tensor, second: Tensor) -> Tensor:
    return torch.where(first * second > 0, torch.ones_like(first), torch.zeros_like(first))


_signs_agree = kernels.fuse(_agrees)


class Cautious(TensorTransform):
    r"""Drops the elements of the update whose sign differs from the gradient's.

    $u_i \leftarrow u_i\,[u_i g_i > 0]$, with `normalize` divided by the fraction of elements that are kept.

    Args:
        normalize: Divide by the fraction of elements kept (one over all parameters), so that the step keeps its size.
        eps: The smallest fraction to divide by.
        mode: What the other elements become: "zero"; "grad", the gradient; "backtrack", the update reversed.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Cautious(), [torch.tensor([1.0, 2.0])], grads=[torch.tensor([3.0, -1.0])])
        [tensor([1., 0.])]

    References:
        K. Liang, L. Chen, B. Liu, Q. Liu, "Cautious optimizers: improving training with one line of code", 2024.
    """

    across = Across.SUMS

    fixed_settings = ("normalize",)
    differentiable = True
    elementwise = True

    def __init__(
        self, *, normalize: bool = False, eps: Any = 1e-6, mode: Literal["zero", "grad", "backtrack"] = "zero"
    ) -> None:
        choice("Cautious", "mode", mode, ("zero", "grad", "backtrack"))
        non_negative("Cautious", eps=eps)
        if normalize and mode != "zero":
            raise ValueError(f"Cautious: normalize is for elements that are dropped, but mode is {mode!r}")
        super().__init__({"normalize": normalize, "eps": eps, "mode": mode}, uses_grad=True)
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
        given = cast(Tensor, grad)
        agrees = tensor * given > 0
        if setting["mode"] == "grad":
            return torch.where(agrees, tensor, given)
        if setting["mode"] == "backtrack":
            return torch.where(agrees, tensor, -tensor)
        out = torch.where(agrees, tensor, torch.zeros_like(tensor))
        if setting["normalize"]:
            enough = (setting["kept"] > setting["eps"]) * 1.0
            out = out / (setting["kept"] * enough + setting["eps"] * (1 - enough))
        return out
