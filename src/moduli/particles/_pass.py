"""The numbers: one pass over the values of whole models, group by group.

An operand's values are a `Part` for each group of parameters: one vector (times a number that has not been multiplied in
yet), or the list of live tensors where they are. The result is always one fresh vector, or the vector of an operand that
exists only inside the expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moduli import kernels
from moduli._torch import join_flat
from moduli.layout import Group

__all__ = ["Part", "binary", "blend", "change", "unary"]

_METHODS = {
    operator.add: "add_",
    operator.sub: "sub_",
    operator.mul: "mul_",
    operator.truediv: "div_",
    operator.pow: "pow_",
    operator.floordiv: "floor_divide_",
    operator.mod: "remainder_",
}
_FOREACH: dict[Any, Callable[..., Any]] = {
    operator.add: torch._foreach_add_,
    operator.sub: torch._foreach_sub_,
    operator.mul: torch._foreach_mul_,
    operator.truediv: torch._foreach_div_,
}
_FUSED = {
    operator.mul: kernels.fuse(lambda x, y: x * y),
    operator.truediv: kernels.fuse(lambda x, y: x / y),
}
_BLEND = kernels.fuse(lambda x, y, a, b: a * x + b * y)
# Up to this many bytes, to gather an operand first costs less than to prepare a pass over its tensors.
_SMALL = 1 << 19


class Part(NamedTuple):
    """The values of one operand in one group.

    Attributes:
        vector: All values, or None.
        tensors: The live tensors, where there is no vector.
        scale: A number that the vector is still to be multiplied with.
        spare: Whether the vector may be written over, because nothing refers to it after the operation.
    """

    vector: Tensor | None
    tensors: Sequence[Tensor] = ()
    scale: float = 1.0
    spare: bool = False

    def gather(self) -> Tensor:
        """The values in a vector that may be written over."""
        if self.vector is None:
            return join_flat(self.tensors)
        if self.spare:
            return self.vector if self.scale == 1.0 else self.vector.mul_(self.scale)
        return self.vector.clone() if self.scale == 1.0 else self.vector * self.scale

    def join(self) -> Tensor:
        """The values in a vector, which may be the operand's own, by operations that a graph or a transform can follow."""
        if self.vector is None:
            return torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        return self.vector if self.scale == 1.0 else self.vector * self.scale

    def split(self, sizes: list[int]) -> list[Tensor]:
        """The values as a list of tensors, without the number."""
        if self.vector is not None:
            return list(torch.split(self.vector, sizes))
        return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in self.tensors]


def unary(fn: Callable[[Tensor], Tensor], x: Part, composing: bool) -> Tensor:
    """A function of the values of one operand."""
    if composing:
        values = x.join()
        made = fn(values)
        return made.clone() if made is values else made
    return x.gather() if fn is operator.pos else fn(x.gather())


def binary(group: Group, fn: Any, x: Part, y: Any, reflected: bool, composing: bool) -> Tensor:
    """A function of two operands, of which the second is a Part, a number, or a tensor without dimensions."""
    if composing:
        other = y.join() if isinstance(y, Part) else y
        return fn(other, x.join()) if reflected else fn(x.join(), other)  # type: ignore[no-any-return]
    if not isinstance(y, Part):
        if fn in _METHODS and not reflected and group.dtype.is_floating_point and not isinstance(y, complex):
            return getattr(x.gather(), _METHODS[fn])(y)  # type: ignore[no-any-return]
        return fn(y, x.gather()) if reflected else fn(x.gather(), y)  # type: ignore[no-any-return]
    if reflected:
        x, y = y, x
    if group.dtype.is_floating_point:
        if fn is operator.add or fn is operator.sub:
            return blend(group, x, y, 1.0, 1.0 if fn is operator.add else -1.0)
        if fn in _FUSED and not _is_small(group):
            x, y = (each._replace(vector=each.join()) if each.scale != 1.0 else each for each in (x, y))
            sizes = [tensor.numel() for tensor in x.tensors or y.tensors] or [group.numel]
            return _FUSED[fn](x.split(sizes), y.split(sizes), flat=True)  # type: ignore[no-any-return]
    return fn(x.join(), y.join())  # type: ignore[no-any-return]


def blend(group: Group, x: Part, y: Part, a: float, b: float) -> Tensor:
    """The sum a x + b y of floating-point values, with the numbers that are still to be multiplied in."""
    a, b = a * x.scale, b * y.scale
    if _is_small(group):
        first = x.vector.clone() if x.vector is not None else join_flat(x.tensors)
        second = y.vector if y.vector is not None else join_flat(y.tensors)
        return (first if a == 1.0 else first.mul_(a)).add_(second, alpha=b)
    sizes = [tensor.numel() for tensor in x.tensors or y.tensors] or [group.numel]
    out = y.vector if y.spare else x.vector if x.spare else None
    if out is None:
        return _BLEND(x.split(sizes), y.split(sizes), a, b, flat=True)  # type: ignore[no-any-return]
    _BLEND(x.split(sizes), y.split(sizes), a, b, out=out)
    return out


def _is_small(group: Group) -> bool:
    return group.numel * group.dtype.itemsize <= _SMALL


def change(fn: Any, tensors: list[Tensor], other: Any) -> None:
    """Change tensors in place; `other` is a list of as many tensors, a number, or a tensor without dimensions."""
    if not tensors:
        return
    foreach = _FOREACH.get(fn)
    if foreach is not None and not (isinstance(other, Tensor) and other.dim() == 0):
        foreach(tensors, other)
        return
    others = other if isinstance(other, list) else [other] * len(tensors)
    for tensor, value in zip(tensors, others, strict=True):
        getattr(tensor, _METHODS[fn])(value)
