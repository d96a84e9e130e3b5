"""What a population can be combined with: populations, single particles, numbers, and tensors of three shapes.

An operand becomes one value for each group of the layout, which broadcasts against the (N, P) matrix of that group: a
number, a column (N, 1) of per-member numbers, a row (1, P) shared by all members, or a whole matrix.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from moduli.layout import Group, Layout, diff, layout_and_tensors
from moduli.nn import labels_of
from moduli.particles import StructureError, matching_values

if TYPE_CHECKING:
    from ._core import Core


def check_match(ours: Core, theirs: Core) -> None:
    """Check that two populations can be combined member by member.

    Raises:
        StructureError: If their structures, sizes or devices differ.
    """
    if ours._count != theirs._count:
        raise StructureError(
            f"cannot combine populations of {ours._count} and {theirs._count} members; choose as many with pop[...], or "
            "combine with one member, as in `pop - other[0]`"
        )
    if ours.layout is not theirs.layout:
        _same(ours.layout, theirs.layout, ours.template, theirs.template)


def _same(ours: Layout, theirs: Layout, left: nn.Module, right: nn.Module) -> None:
    if ours.entries is not theirs.entries and ours.fingerprint != theirs.fingerprint:
        raise StructureError(
            f"cannot combine a population of {type(left).__name__} with {type(right).__name__}: {diff(ours, theirs)}"
        )
    for x, y in zip(ours, theirs, strict=True):
        if x.device != y.device:
            raise StructureError(
                f"{x.name!r} is on {x.device} in the population and on {y.device} in the other operand"
            )


def scalar(other: Any) -> Any:
    """A number or tensor as torch takes it, or None if it is neither."""
    if isinstance(other, bool | int | float | complex | Tensor):
        return other
    if isinstance(other, np.generic):
        return other.item()
    if isinstance(other, np.ndarray):
        return torch.from_numpy(other)
    return None


def rows(pop: Core, module: nn.Module, graph: bool = False) -> list[Tensor]:
    """The values of one module, as a row for each group."""
    layout, tensors = layout_and_tensors(module)
    if _owns_labels(module) and _owns_labels(pop.template):
        layout, tensors = pop.layout, matching_values(pop.template, module)
    elif layout is not pop.layout:
        _same(pop.layout, layout, pop.template, module)
    if not tensors:
        return []
    return layout.pack(tensors if graph else [tensor.detach() for tensor in tensors])


def _owns_labels(module: nn.Module) -> bool:
    return any(labels_of(each) for each in module.modules())


def broadcast(pop: Core, value: Tensor) -> list[Any]:
    """A tensor of numbers per member (N), of one vector (P), or of a whole matrix, for each group.

    Raises:
        StructureError: If its shape is none of these, or could be two of them.
    """
    count, size = len(pop), pop.layout.numel
    shape = tuple(value.shape)
    if not shape:
        return [_cast(value, group) for group in pop.layout.groups]
    if shape == (count,) and shape == (size,):
        raise StructureError(
            f"a tensor of shape {shape} could be one number per member or one vector for all, since there are {count} of "
            f"both; give it the shape ({count}, 1) or (1, {size})"
        )
    if shape in ((count,), (count, 1)):
        column = value.reshape(count, 1)
        return [_cast(column, group) for group in pop.layout.groups]
    if shape in ((size,), (1, size), (count, size)):
        flat = value.reshape(-1, size)
        return [_cast(_gather_columns(pop.layout, group, flat), group) for group in pop.layout.groups]
    raise StructureError(
        f"a tensor of shape {shape} does not fit {count} members of {size} parameters; give one number per member ({count},), "
        f"one vector ({size},), or a matrix ({count}, {size})"
    )


def _gather_columns(layout: Layout, group: Group, flat: Tensor) -> Tensor:
    """The columns of one group, from all parameters laid end to end."""
    if len(layout.groups) == 1:
        return flat
    entries = [layout.entries[i] for i in group.indices]
    return torch.cat([flat.narrow(1, entry.start, entry.numel) for entry in entries], 1)


def _cast(value: Tensor, group: Group) -> Tensor:
    if value.dtype is group.dtype and value.device == group.device:
        return value
    if value.dim() and value.device != group.device:
        raise StructureError(f"a tensor on {value.device} for parameters on {group.device}; move it with .to()")
    if group.dtype.is_complex or (group.dtype.is_floating_point and not value.is_complex()):
        return value.to(group.device, group.dtype)
    return value.to(group.device)


def check_dtype(layout: Layout, group: Group, fn: Any, value: Any) -> None:
    """Check that an operation keeps the dtype of parameters, before anything is computed.

    Raises:
        TypeError: If it would turn them into another kind of number.
    """
    if group.dtype.is_complex or not group.indices:
        return
    turned = isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())
    whole = not group.dtype.is_floating_point
    real = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    if turned or (whole and (real or fn is operator.truediv)):
        name = layout.entries[group.indices[0]].name
        raise TypeError(
            f"the operation would turn {name!r} from {group.dtype} into another kind of number; convert the models first, "
            f"or leave the parameter out with pop.template.set_param_config(operational=False, name={name!r})"
        )
