"""What members start as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moduli.layout import layout_and_tensors
from moduli.particles import StructureError, adopt

from ._noise import normal, seeds

__all__ = ["initialise", "of_class"]


def initialise(pop: Any, init: Any, generator: torch.Generator | None) -> None:
    """Fill a population of copies as `Population.of` says."""
    if init is None:
        return
    if callable(init):
        with torch.no_grad():
            for name, leaf in pop.named_parameters():
                init(name, leaf.detach())
        pop._changed()
        return
    if isinstance(init, float | int) and not isinstance(init, bool):
        noise = normal(pop.layout, seeds(len(pop), generator), scale=float(init))
        with torch.no_grad():
            for group, matrix, values in zip(pop.layout.groups, pop._values.matrices, noise, strict=True):
                if group.dtype.is_floating_point or group.dtype.is_complex:
                    matrix.add_(values)
        return
    raise ValueError(f"init={init!r}; give None, a number, or a function of a name and a stacked tensor")


def of_class(
    like: Callable[..., Any],
    make: Callable[..., nn.Module],
    count: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    generator: torch.Generator | None,
) -> Any:
    """A population of what a class makes."""
    first = make(*args, **kwargs)
    if not isinstance(first, nn.Module):
        raise TypeError(f"{getattr(make, '__name__', make)!r} made a {type(first).__name__}, not a torch.nn.Module")
    pop = like(adopt(first), count)
    views: list[Tensor] = pop.layout.views(pop._values.matrices)
    for index in range(1, count):
        layout, tensors = layout_and_tensors(make(*args, **kwargs))
        if layout.fingerprint != pop.layout.fingerprint:
            raise StructureError(f"member {index} was made with another structure than member 0")
        with torch.no_grad():
            for view, tensor in zip(views, tensors, strict=True):
                view[index].copy_(tensor)
    return pop
