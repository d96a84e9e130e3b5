"""Parts of models (`only`), measures such as norms and distances, and conversion to and from vectors."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn  # noqa: F401 - for the examples

from moduli._torch import keep_from_tracing
from moduli.layout import any_sharded, check_pattern, is_sharded, make_whole

from ._arithmetic import Only, derive
from ._operand import Operand, pair
from ._product import take_products
from ._species import require
from .errors import StructureError

T = TypeVar("T")


def only(module: Any, *patterns: str) -> Only:
    """Restrict an operation to the parameters and buffers whose names match: the others keep their values.

    Args:
        module: A particle.
        *patterns: Names, or patterns such as `"encoder.*"`.

    Returns:
        An operand that acts like the particle. Results of operations are whole particles.

    Raises:
        ValueError: If no parameter matches a pattern.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt, norm, only
        >>> net = adopt(nn.Linear(2, 1))
        >>> half = only(net, "bias") * 0.5
        >>> torch.equal(half.weight, net.weight), torch.equal(half.bias, 0.5 * net.bias)
        (True, True)
        >>> bool(norm(only(net, "bias")) == net.bias.abs().sum())
        True
    """
    particle = require(module)
    names = [name for name, _ in particle.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in particle.named_buffers(remove_duplicate=False)]
    for pattern in patterns:
        check_pattern(pattern, [*names, *buffers], "parameter", type(module).__name__)
    return Only(particle, patterns)


def operand_of(x: Any, live: bool = False) -> Operand:
    """Return the operand of a particle, or of a part of one."""
    return Operand(x if isinstance(x, Only) else require(x), live=live)


def _select(x: Any, *others: Any) -> list[list[Tensor]]:
    """Return the parameters of models of one structure, restricted to the scope of the first operand that has one."""
    operands = [operand_of(x)]
    for other in others:
        operands[0], right = pair(operands[0], operand_of(other))
        operands.append(right)
    scoped = next((each for each in operands if each.scope is not None), None)
    outside = {} if scoped is None else scoped.inert
    return [[tensor for p, tensor in enumerate(each.parameters()) if p not in outside] for each in operands]


@take_products
def norm(x: Any, p: float = 2.0) -> Tensor:
    r"""Return the norm of all parameters as one vector, $(\sum_i |x_i|^p)^{1/p}$.

    Args:
        x: A particle, a product, or a part.
        p: The order; `float("inf")` is the largest magnitude.

    Returns:
        A tensor without dimensions, in float32 or wider.

    Example:
        >>> from moduli.particles import adopt, norm
        >>> net = adopt(nn.Linear(3, 3))
        >>> round(norm(0 * net + 1).item() ** 2, 3)
        12.0
    """
    return _measure(_select(x)[0], p)


def _measure(tensors: list[Tensor], p: float) -> Tensor:
    parts = [_widen(t) for t in tensors if t.numel()]
    if not parts:
        return torch.zeros(())
    sharded = any_sharded(parts)
    if sharded and abs(p) == math.inf:
        # The local shard may be empty, and an empty tensor has no largest element.
        parts = list(map(make_whole, parts))
    each = [torch.linalg.vector_norm(t, p) for t in parts]
    if sharded:
        each = list(map(make_whole, each))
    kind = functools.reduce(torch.promote_types, (t.dtype for t in each))
    total: Tensor = torch.linalg.vector_norm(torch.stack([t.to(kind) for t in each]), p)
    return total


def _widen(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or wider, since squares of half precision overflow; integers in float64."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.double()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@take_products
def dot(x: Any, y: Any) -> Tensor:
    r"""Return the inner product of two models, $\sum_i \bar x_i y_i$.

    Example:
        >>> from moduli.particles import adopt, dot
        >>> net = 0 * adopt(nn.Linear(3, 3)) + 1
        >>> dot(net, 2 * net).item()
        24.0
    """
    left, right = _select(x, y)
    total = torch.zeros((), dtype=torch.float64)
    kind = functools.reduce(torch.promote_types, (t.dtype for t in left), torch.float32)
    for a, b in zip(left, right, strict=True):
        wide = torch.promote_types(a.dtype, torch.float32)
        # `sum` adds pairwise, with less rounding than `vecdot`; half precision is copied here anyway.
        if is_sharded(a) or wide is not a.dtype:
            total = total + make_whole((a.to(wide).conj() * b.to(wide)).sum())
        else:
            total = total + torch.linalg.vecdot(a.reshape(-1).to(wide), b.reshape(-1).to(wide))
    return total if total.is_complex() and not kind.is_complex else total.to(kind)


@take_products
def cosine(x: Any, y: Any) -> Tensor:
    """Return the cosine of the angle between two models; 0 if one of them is all zeros.

    Example:
        >>> from moduli.particles import adopt, cosine
        >>> net = adopt(nn.Linear(3, 3))
        >>> round(cosine(net, -2 * net).item(), 4)
        -1.0
    """
    lengths = norm(x) * norm(y)
    # If a norm is 0, so is the inner product.
    return dot(x, y) / torch.where(lengths == 0, 1, lengths)


@take_products
def distance(x: Any, y: Any, p: float = 2.0) -> Tensor:
    """Return the norm of the difference of two models.

    Args:
        x: A particle, a product, or a part.
        y: Another one of the same structure.
        p: The order of the norm.

    Example:
        >>> from moduli.particles import adopt, distance
        >>> net = adopt(nn.Linear(3, 3))
        >>> round(distance(net, net + 1).item() ** 2, 3)
        12.0
    """
    return _measure([_widen(a) - _widen(b) for a, b in zip(*_select(x, y), strict=True)], p)


@take_products
def vector(x: Any, copy: bool = True) -> Tensor:
    """Return all parameters as one vector, in the order of `named_parameters()`.

    Parameters of several dtypes are promoted to a common one.

    Args:
        x: A particle, a product, or a part.
        copy: Whether the vector must be independent. Otherwise the result is a view if the parameters are contiguous in one
            storage, such as those of a member of a population: writing to it writes to them.

    Example:
        >>> from moduli.particles import adopt, vector
        >>> vector(adopt(nn.Linear(2, 1)) * 0 + 1)
        tensor([1., 1., 1.])
    """
    tensors = list(map(make_whole, _select(x)[0]))
    if not tensors:
        return torch.zeros(0)
    joined = None if copy else _see_joined(tensors)
    if joined is not None:
        return joined
    kind = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    if (kind.is_floating_point or kind.is_complex) and any(t.dtype in (torch.int32, torch.int64) for t in tensors):
        kind = torch.promote_types(kind, torch.float64)
    return torch.cat([t.reshape(-1).to(kind) for t in tensors])


def _see_joined(tensors: list[Tensor]) -> Tensor | None:
    """Return a vector that views tensors which are contiguous in one storage; None if they are not."""
    first, end = tensors[0].detach(), tensors[0].storage_offset()
    for each in tensors:
        alike = each.dtype == first.dtype and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or not each.is_contiguous() or each.storage_offset() != end:
            return None
        end += each.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


@take_products
def from_vector(x: T, values: Tensor) -> T:
    """Return a particle like another, with the values of a vector; the inverse of `vector`.

    A vector has no labels: its values are in the order of the labels of `x`. To take over the values of a model whose
    labels have another order, use `x.clone_from(model)`.

    Args:
        x: The particle that the result is like.
        values: As many values as `vector(x)` has, in its order.

    Raises:
        StructureError: If there are too few or too many.

    Example:
        >>> from moduli.particles import adopt, from_vector, vector
        >>> from_vector(adopt(nn.Linear(2, 1)), torch.arange(3.0)).bias.item()
        2.0
    """
    left = operand_of(x)
    layout = left.layout
    if values.shape != (layout.numel,):
        raise StructureError(
            f"{type(x).__name__} has {layout.numel} parameters in all; the vector given has shape {tuple(values.shape)}"
        )
    parts = []
    for entry, part in zip(layout, torch.split(values, [entry.numel for entry in layout]), strict=True):
        real = part.real if part.is_complex() and not entry.dtype.is_complex else part
        parts.append(real.to(entry.dtype).reshape(entry.shape).clone())
    # The vector has no elements for buffers: those of `x` are copied.
    parts += [left.buffers[place].clone() for place in left.acting]
    return derive(left, left.pick(parts))  # type: ignore[return-value]


keep_from_tracing(only)
