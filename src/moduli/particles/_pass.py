"""The numbers: one operation on the values of whole models, group by group.

An operand's values are a `Part` for each group of parameters: one vector (times a number that has not been multiplied
in yet), or the list of live tensors where they are. The result is always one vector.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moduli import kernels
from moduli.layout import Group

from . import _pool

__all__ = ["BLEND", "BLEND_OVER", "Part", "binary", "copied", "inplace", "unary"]

_OUT: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
}
_FOREACH: dict[Any, Callable[..., Any]] = {
    operator.add: torch._foreach_add_,
    operator.sub: torch._foreach_sub_,
    operator.mul: torch._foreach_mul_,
    operator.truediv: torch._foreach_div_,
}
_METHODS = {
    operator.add: "add_",
    operator.sub: "sub_",
    operator.mul: "mul_",
    operator.truediv: "div_",
    operator.pow: "pow_",
    operator.floordiv: "floor_divide_",
    operator.mod: "remainder_",
}
_FUSED = {
    operator.mul: kernels.fuse(lambda x, y: x * y),
    operator.truediv: kernels.fuse(lambda x, y: x / y),
}
BLEND = kernels.fuse(lambda x, y, a, b: a * x + b * y)
BLEND_OVER = kernels.fuse(lambda x, y, a, b: a * x + b * y, inplace="y")
# Up to this many bytes, gathering an operand first costs less than running an operation tensor by tensor.
_SMALL = 1 << 19


class Part(NamedTuple):
    """The values of one operand in one group.

    Attributes:
        vector: All values, or None.
        scale: A number that the vector is still to be multiplied with.
        tensors: The live tensors, where there is no vector.
        flats: One-dimensional views of them, if they were at hand.
        spare: Whether nobody will read the vector after this operation, so that the result may be written over it.
    """

    vector: Tensor | None
    scale: float = 1.0
    tensors: Any = ()
    flats: Any = ()
    spare: bool = False

    def gathered(self, group: Group) -> Tensor:
        """The values in a vector of their own."""
        if self.vector is not None:
            if self.scale == 1.0:
                return _pool.take(group).copy_(self.vector) if group.numel else self.vector.clone()
            return torch.mul(self.vector, self.scale, out=_pool.take(group))
        if self.flats:
            return torch.cat(self.flats)
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors], out=_pool.take(group))

    def plainly(self) -> Tensor:
        """The values in a vector, by operations that a graph or a transform can follow."""
        if self.vector is None:
            return torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        return self.vector if self.scale == 1.0 else self.vector * self.scale

    def parts(self, group: Group, sizes: list[int]) -> list[Tensor]:
        """The values as tensors that have the right numbers of elements, whatever their shapes."""
        if self.vector is None:
            if self.flats:
                return list(self.flats)
            if all(map(Tensor.is_contiguous, self.tensors)):
                return list(self.tensors)
            return [tensor.reshape(-1) for tensor in self.tensors]
        vector = self.vector if self.scale == 1.0 else self.vector * self.scale
        return list(torch.split(vector, sizes))


def _small(group: Group) -> bool:
    return group.numel * group.dtype.itemsize <= _SMALL


def copied(group: Group, x: Part) -> Tensor:
    """The values of an operand in a new vector."""
    return x.gathered(group)


def unary(group: Group, fn: Callable[[Tensor], Tensor], x: Part, plain: bool = False) -> tuple[Tensor, float]:
    """A function of the values of one operand: a vector, and a number to multiply it with."""
    if plain:
        values = x.plainly()
        made = fn(values)
        return (made.clone() if made is values else made), 1.0
    if fn is operator.pos:
        return x.gathered(group), 1.0
    if fn is operator.neg and x.vector is not None and group.dtype.is_floating_point:
        return x.vector, -x.scale
    return fn(x.gathered(group)), 1.0


def binary(group: Group, fn: Any, x: Part, y: Any, reflected: bool, plain: bool = False) -> tuple[Tensor, float]:
    """A function of two operands, of which the second is a Part, a number, or a tensor without dimensions.

    Returns:
        A vector, and a number that its values are still to be multiplied with. The vector may be that of an operand
        when only the number differs.
    """
    if plain:
        other = y.plainly() if isinstance(y, Part) else y
        return (fn(other, x.plainly()) if reflected else fn(x.plainly(), other)), 1.0
    scaling = group.dtype.is_floating_point
    if not isinstance(y, Part):
        number = type(y) in (int, float)
        if number and scaling and fn is operator.mul:
            return (x.vector if x.vector is not None else x.gathered(group)), x.scale * y
        if fn in _METHODS and not reflected and scaling and not isinstance(y, complex):
            # The copy is ours, so the operation can run in it.
            return getattr(x.gathered(group), _METHODS[fn])(y), 1.0
        vector = x.gathered(group)
        return (fn(y, vector) if reflected else fn(vector, y)), 1.0
    if reflected:
        x, y = y, x
    if scaling and fn in (operator.add, operator.sub):
        return _sum(group, x, y, 1.0 if fn is operator.add else -1.0), 1.0
    if scaling and fn in (operator.mul, operator.truediv) and x.vector is not None and y.vector is not None:
        scale = x.scale * y.scale if fn is operator.mul else x.scale / y.scale if y.scale else None
        if scale is not None:
            return _OUT[fn](x.vector, y.vector, out=_pool.take(group)), scale
    if _small(group) or fn not in _FUSED or not scaling:
        return fn(x.gathered(group), y.gathered(group)), 1.0
    sizes = [tensor.numel() for tensor in (x.tensors or y.tensors)]
    out = _pool.take(group)
    _FUSED[fn](x.parts(group, sizes), y.parts(group, sizes), out=out)
    return out, 1.0


def _sum(group: Group, x: Part, y: Part, sign: float) -> Tensor:
    """The sum x + sign y, with the numbers that are still to be multiplied in folded into the sum."""
    if not _small(group) and (x.vector is None or y.vector is None):
        # One pass over the live tensors, instead of gathering them first.
        sizes = [tensor.numel() for tensor in (x.tensors or y.tensors)]
        first, second = (each._replace(scale=1.0).parts(group, sizes) for each in (x, y))
        if y.spare and y.vector is not None:
            BLEND_OVER(first, second, x.scale, sign * y.scale)
            return y.vector
        out = _pool.take(group)
        BLEND(first, second, x.scale, sign * y.scale, out=out)
        return out
    if x.vector is None:
        made = x.gathered(group)
        if y.vector is None:
            return made.add_(y.gathered(group), alpha=sign)
        return made.add_(y.vector, alpha=sign * y.scale)
    if y.vector is None:
        made = y.gathered(group)
        if x.scale == 1.0:
            return torch.add(x.vector, made, alpha=sign, out=made)
        return (made if sign == 1.0 else made.neg_()).add_(x.vector, alpha=x.scale)
    out = y.vector if y.spare and x.scale == 1.0 else _pool.take(group)
    if x.scale == 1.0:
        return torch.add(x.vector, y.vector, alpha=sign * y.scale, out=out)
    if sign * y.scale == 1.0:
        return torch.add(y.vector, x.vector, alpha=x.scale, out=out)
    return torch.mul(x.vector, x.scale, out=out).add_(y.vector, alpha=sign * y.scale)


def inplace(fn: Any, tensors: list[Tensor], other: Any) -> None:
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
