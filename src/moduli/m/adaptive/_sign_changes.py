"""Where the sign of the update has changed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._transforms import BufferTransform


class BacktrackOnSignChange(BufferTransform):
    """Takes the last step of a weight back where the sign of its update flips.

    It is the part of `Rprop` that is not about sizes; the comparison after a flip is neutral, as there.

    Args:
        use_grad: Compare signs of gradients in place of those of updates.
        backtrack: False: the weight waits instead.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.BacktrackOnSignChange(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([u])], params=[w])[0].item() for u in (2.0, -1.0, -1.0)]
        [2.0, -2.0, -1.0]

    References:
        M. Riedmiller, H. Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm", 1993.
    """

    shared_settings = ("use_grad",)
    elementwise = True
    buffers = {"previous": "grad", "last": "grad", "flipped": None}

    def __init__(self, *, use_grad: bool = False, backtrack: bool = True) -> None:
        super().__init__(locals(), uses_grad=True)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        seen = cast(Tensor, grad) if setting["use_grad"] else tensor
        flipped = seen * state["previous"] < 0
        zero = torch.zeros_like(tensor)
        # What was emitted before, where it is to be taken back; else what is emitted now.
        state["last"] = torch.where(flipped, -state["last"], tensor)
        state["flipped"] = torch.where(flipped, torch.ones_like(tensor), zero)
        state["previous"] = torch.where(flipped, zero, seen)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        back = state["last"] if setting["backtrack"] else torch.zeros_like(tensor)
        return torch.where(state["flipped"] > 0, back, tensor)


class SignConsistencyMask(BufferTransform):
    r"""Replaces the update by the mask $[u_t u_{t-1} > 0]$: one where its sign has stayed; zero at first.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.SignConsistencyMask(), torch.zeros(2)
        >>> for u in ([1.0, 1.0], [2.0, -2.0]):
        ...     out = optim.step_tensors(link, [torch.tensor(u)], params=[w])
        >>> out
        [tensor([1., 0.])]
    """

    elementwise = True
    buffers = {"previous": "grad", "mask": None}

    def __init__(self) -> None:
        super().__init__()

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        same = tensor * state["previous"] > 0
        state["mask"] = torch.where(same, torch.ones_like(tensor), torch.zeros_like(tensor))
        state["previous"] = tensor.clone()

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["mask"].clone()
