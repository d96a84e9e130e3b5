"""Tensors of a pure step under `torch.vmap` and forward-mode differentiation, converted so that links can work on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from .._torch import in_forward_ad, in_transform, is_batched
from ..layout import map_tensors
from ._vectorize import OutOfPlace


def has_tangent(value: Any) -> bool:
    """Return whether a value is a tensor with a forward-mode tangent."""
    return isinstance(value, Tensor) and in_forward_ad() and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


class TransformedTensors:
    """The conversion of one step's tensors for links, and back; outside of transforms it changes nothing.

    Links write in place. Torch raises if batched values are written into a tensor that is not batched, so if one tensor is
    batched, all become batched. The tangent of a 0-d tensor in single precision becomes double in an operation with a Python
    number, which in-place operations do not allow, so in forward mode 0-d parameters and their state get an axis.

    Args:
        values: All tensors of the step, nested: parameters, gradients, settings and state.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.forward = in_forward_ad()
        #: A zero that is batched at every level at which one of the tensors is; adding it batches a tensor.
        self.zero: Tensor | None = None
        if in_transform():
            map_tensors(values, self._join_batch)

    def _join_batch(self, tensor: Tensor) -> None:
        if is_batched(tensor):
            zero = tensor.detach().new_zeros(())
            self.zero = zero if self.zero is None else self.zero + zero

    def enter_each(self, values: Sequence[Any], params: Sequence[Tensor]) -> list[Any]:
        """Return one nested value for each parameter with its tensors converted for links."""
        return [self.enter(value, scalar=param.dim() == 0) for value, param in zip(values, params, strict=True)]

    def enter(self, value: Any, scalar: bool = False) -> Any:
        """Return a nested value with its tensors converted for links.

        Args:
            value: The value.
            scalar: Whether it belongs to a 0-d parameter.
        """
        if self.zero is None and not self.forward:
            return value
        return map_tensors(value, partial(self._enter_tensor, scalar=scalar))

    def leave(self, value: Any, param: Tensor) -> Any:
        """Return a nested value of a parameter with its tensors converted back."""
        if not self.forward or param.dim():
            return value
        return map_tensors(value, lambda tensor: tensor.reshape(()) if tensor.shape == (1,) else tensor)

    def run_batched(self) -> AbstractContextManager[Any]:
        """Return a context in which in-place operations without a rule for `torch.vmap` are replaced."""
        return nullcontext() if self.zero is None else OutOfPlace()

    def _enter_tensor(self, tensor: Tensor, scalar: bool) -> Tensor:
        if self.zero is not None:
            tensor = tensor + self.zero.to(tensor.dtype)
        if not self.forward:
            return tensor
        primal, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if tangent is not None and tangent.dtype != primal.dtype:
            tensor = forward_ad.make_dual(primal, tangent.to(primal.dtype))  # type: ignore[no-untyped-call]
        return tensor.reshape(1) if scalar and tensor.dim() == 0 else tensor
