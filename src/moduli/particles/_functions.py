"""Functions of whole models. They take particles, products, or parts of particles that `only` selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moduli.layout import Guard, cut_like

from ._arithmetic import apply, derive, overwrite
from ._measures import operand_of
from ._operand import Operand, pair
from ._product import take_products
from .base import NytoModuleBase
from .errors import StructureError

T = TypeVar("T")


@take_products
def _elementwise(x: T, fn: Callable[[Tensor], Tensor]) -> T:
    left = operand_of(x)
    return derive(left, apply(fn, left.values()))  # type: ignore[return-value]


def sign(x: T) -> T:
    """Return a particle with the signs of the values.

    Example:
        >>> from moduli.particles import adopt, sign
        >>> sign(adopt(nn.Linear(1, 1)) * 0 - 3).bias.item()
        -1.0
    """
    return _elementwise(x, torch.sgn)


def sqrt(x: T) -> T:
    """Return a particle with the square roots of the values.

    Example:
        >>> from moduli.particles import adopt, sqrt
        >>> sqrt(adopt(nn.Linear(1, 1)) * 0 + 9).bias.item()
        3.0
    """
    return _elementwise(x, torch.sqrt)


def exp(x: T) -> T:
    """Return a particle with the exponentials of the values.

    Example:
        >>> from moduli.particles import adopt, exp
        >>> exp(adopt(nn.Linear(1, 1)) * 0).bias.item()
        1.0
    """
    return _elementwise(x, torch.exp)


def clamp(x: T, min: float | None = None, max: float | None = None) -> T:
    """Return a particle with the values clamped to an interval.

    Args:
        x: A particle, a product, or a part.
        min: The lower bound; None for none.
        max: The upper bound; None for none.

    Example:
        >>> from moduli.particles import adopt, clamp
        >>> clamp(adopt(nn.Linear(1, 1)) * 0 + 9, max=2.0).bias.item()
        2.0
    """
    return _elementwise(x, lambda t: torch.clamp(t, min, max))


@take_products
def lerp(x: T, y: Any, weight: Any) -> T:
    r"""Return the linear interpolation of two models, $x + w (y - x)$.

    Args:
        x: A particle or a product; the result is of the same type.
        y: Another one of the same structure.
        weight: A number, or a tensor without dimensions.

    Example:
        >>> from moduli.particles import adopt, lerp
        >>> net = adopt(nn.Linear(1, 1)) * 0
        >>> lerp(net, net + 8, 0.25).bias.item()
        2.0
    """
    left, right = pair(operand_of(x), operand_of(y))
    _refuse_whole(left, "which has no points between")
    mine, theirs = left.values(), right.values()
    if isinstance(weight, Tensor):
        values = apply(lambda a, b: torch.lerp(a, b, weight.to(a.dtype)), mine, theirs)
    else:
        values = apply(torch.lerp, mine, theirs, weight)
    return derive(left, values)  # type: ignore[return-value]


def _refuse_whole(left: Operand, why: str) -> None:
    """Raise TypeError for parameters that hold integers."""
    for entry in left.entries:
        if not (entry.dtype.is_floating_point or entry.dtype.is_complex):
            raise TypeError(
                f"{entry.name!r} holds {entry.dtype}, {why}; leave it out with "
                f"set_param_config(operational=False, name={entry.name!r})"
            )


def lerp_(x: T, y: Any, weight: float) -> T:
    r"""Move a model towards another in place, $x \leftarrow x + w (y - x)$; its parameters stay the same objects.

    Args:
        x: A particle or a product.
        y: Another one of the same structure.
        weight: The number $w$.

    Example:
        >>> from moduli.particles import adopt, lerp_
        >>> net = adopt(nn.Linear(1, 1)) * 0
        >>> lerp_(net, net + 8, 0.25).bias.item()
        2.0
    """
    return _in_place(x, y, lambda mine, theirs: torch._foreach_lerp_(mine, theirs, weight), divides=True)


def axpy_(x: T, alpha: float, y: Any) -> T:
    r"""Add a multiple of another model in place, $x \leftarrow x + \alpha y$.

    Args:
        x: A particle or a product.
        alpha: The factor $\alpha$.
        y: Another one of the same structure.

    Example:
        >>> from moduli.particles import adopt, axpy_
        >>> net = adopt(nn.Linear(1, 1)) * 0
        >>> axpy_(net, -0.5, net + 8).bias.item()
        -4.0
    """
    return _in_place(
        x, y, lambda mine, theirs: torch._foreach_add_(mine, theirs, alpha=alpha), divides=not isinstance(alpha, int)
    )


@take_products
def _in_place(x: T, y: Any, act: Callable[[list[Tensor], list[Tensor]], Any], divides: bool) -> T:
    with Guard(deferred=True):
        left, right = pair(operand_of(x, live=True), operand_of(y))
        overwrite(left, act, right.values(), divides)
    return x


@take_products
def where(condition: Any, x: T, y: Any) -> T:
    """Select the elements of one of two models, like `torch.where`.

    Args:
        condition: A truth value, a vector of truth values as long as `vector(x)`, or a particle of the same structure
            whose elements count as true where they are not zero.
        x: The model for elements where the condition is true; the result is a particle like it.
        y: The model for the other elements: a particle of the same structure, or a number.

    Example:
        >>> from moduli.particles import adopt, vector, where
        >>> net = adopt(nn.Linear(1, 1)) * 0 + 3
        >>> where(torch.tensor([True, False]), net, -net).bias.item()
        -3.0
    """
    left = operand_of(x)
    if isinstance(y, nn.Module):
        left, right = pair(left, operand_of(y))
        second = right.values()
    else:
        second = [torch.as_tensor(y, dtype=e.dtype, device=e.device) for e in left.entries]
    chosen: list[Any]
    if isinstance(condition, NytoModuleBase):
        chosen = [t != 0 for t in pair(left, Operand(condition))[1].values()]
    elif isinstance(condition, Tensor) and condition.dim() == 1:
        layout = left.layout
        if condition.shape[0] != layout.numel:
            raise StructureError(f"the condition has {condition.shape[0]} elements; the model has {layout.numel}")
        parts = torch.split(condition.bool(), [entry.numel for entry in layout])
        chosen = [part.view(entry.shape) for entry, part in zip(layout, parts, strict=True)]
        # The vector has no elements for buffers: those of `x` are selected.
        chosen = left.pick(chosen + [torch.ones_like(left.buffers[place], dtype=torch.bool) for place in left.acting])
        chosen = [cut_like(each, own) for each, own in zip(chosen, left.unscaled(), strict=True)]
    else:
        chosen = [torch.as_tensor(bool(condition), device=entry.device) for entry in left.entries]
    return derive(left, apply(torch.where, chosen, left.values(), second))  # type: ignore[return-value]


@take_products
def map(fn: Callable[..., Tensor], x: T, *others: Any, named: bool = False) -> T:
    """Apply a function to every parameter.

    Args:
        fn: Called with the parameter of `x` and those of the others; returns a tensor of the same shape.
        x: A particle, a product, or a part; the result is of the same type.
        *others: More of them, of the same structure.
        named: Whether to call the function with the dotted name first.

    Example:
        >>> from moduli.particles import adopt, map
        >>> net = adopt(nn.Linear(1, 1))
        >>> map(lambda name, p: p * 0 + len(name), net, named=True).bias.item()
        4.0
    """
    left = operand_of(x)
    rights = []
    for other in others:
        left, right = pair(left, operand_of(other))
        rights.append(right)

    results = []
    for entry, *row in zip(left.entries, *(each.values() for each in (left, *rights)), strict=True):
        value = fn(*((entry.name,) if named else ()), *row)
        if not isinstance(value, Tensor) or value.shape != entry.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise StructureError(f"the function gave {got} for {entry.name!r}, which has shape {entry.shape}")
        # The function may have returned its argument, or a view of it.
        results.append(value.clone())
    return derive(left, results)  # type: ignore[return-value]


@take_products
def _draw(x: T, draw: Callable[..., Tensor], scale: float, generator: torch.Generator | None) -> T:
    left = operand_of(x)
    _refuse_whole(left, "for which nothing can be drawn")
    layout = left.layout
    parts = layout.views([draw(g.numel, dtype=g.dtype, device=g.device, generator=generator) for g in layout.groups])
    for e in (layout.buffers[place] for place in left.acting):
        parts.append(draw(e.shape, dtype=e.dtype, device=e.device, generator=generator))
    return derive(left, apply(lambda part: scale * part, left.pick(parts)))  # type: ignore[return-value]


def rand(x: T, scale: float = 1.0, generator: torch.Generator | None = None) -> T:
    """Return a particle of the same species with values drawn uniformly from [0, scale).

    Args:
        x: A particle, or a part of one.
        scale: The upper bound.
        generator: The random number generator; torch's default one if None.

    Example:
        >>> from moduli.particles import adopt, rand
        >>> net = adopt(nn.Linear(2, 1))
        >>> one, two = (rand(net, generator=torch.Generator().manual_seed(0)) for _ in range(2))
        >>> torch.equal(one.weight, two.weight)
        True
    """
    return _draw(x, torch.rand, scale, generator)


def randn(x: T, scale: float = 1.0, generator: torch.Generator | None = None) -> T:
    """Return a particle of the same species with values drawn from a normal distribution of mean 0.

    Args:
        x: A particle, or a part of one.
        scale: The standard deviation.
        generator: The random number generator; torch's default one if None.

    Example:
        >>> from moduli.particles import adopt, norm, randn
        >>> norm(randn(adopt(nn.Linear(2, 1)), scale=0.0)).item()
        0.0
    """
    return _draw(x, torch.randn, scale, generator)


def zeros_like(x: T) -> T:
    """Return a particle of the same species with all values zero.

    Example:
        >>> from moduli.particles import adopt, zeros_like
        >>> zeros_like(adopt(nn.Linear(2, 1))).bias.item()
        0.0
    """
    return _elementwise(x, torch.zeros_like)
