"""Resizing state with a parameter whose axes got more units or fewer.

Existing entries keep their state; new ones get the value that the link starts with, or zero. State that is a point of
parameter space is resized as the parameter was. Factors along an axis (Kronecker, rows and columns) get a block for the new units,
and bases the new directions. State without a rule restarts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..axes import match_units
from ..layout import UnitMap, map_tensors
from ..nn import decode_axes
from ._first_state import are_equal
from ._hooks import HookArguments
from ._label_order import Follows, list_axes
from .state_encoding import MemberValues
from .transform import TensorTransform
from .transforms import BufferTransform

if TYPE_CHECKING:
    from ..axes import ModelAxes
    from .module import Module
    from .optimizer import Optimizer


class UnfitStateError(ValueError):
    """State without a rule for a resized parameter."""


def find_resized(
    optimizer: Optimizer, saved: Mapping[str, Any], params: Mapping[str, Tensor], axes: ModelAxes
) -> dict[str, UnitMap]:
    """Return the resize of each saved parameter that has other units here, by saved name.

    Args:
        optimizer: The optimizer.
        saved: The saved state.
        params: The parameters here, by the names that they were saved with.
        axes: The axes of the model here.
    """
    lead, slots = int(optimizer.binding.members is not None), optimizer.binding.slots
    names = {old: str(slots.find_name(param)) for old, param in params.items()}
    here, there = list_axes(optimizer), saved.get("axes", {})
    labels = {
        names[old]: (decode_axes(json.loads(here[names[old]])), decode_axes(json.loads(text)))
        for old, text in there.items()
        if old in names and names[old] in here
    }
    shapes = {names[old]: shape[lead:] for old, shape in saved["shapes"].items() if old in names and shape is not None}
    maps = match_units(axes, shapes, labels)
    return {old: maps[name] for old, name in names.items() if name in maps}


def resize_row(
    link: Module, row: Mapping[str, Any], maps: Sequence[UnitMap], param: Tensor, lead: int = 0
) -> dict[str, Any] | None:
    """Return the state of a link for a resized parameter; None if it has to restart.

    Args:
        link: The link.
        row: Its state for the parameter before.
        maps: How the parameter was resized, step by step.
        param: The parameter after.
        lead: The number of axes before those of the parameter: 1 for members.
    """
    rules, start = link.find_follows(row), {} if lead else find_start(link, param)
    resizer = _StateResizer(maps, lead)
    try:
        return {
            key: resizer.resize(value, rules.get(key), start.get(key), key in link.points) for key, value in row.items()
        }
    except UnfitStateError:
        return None


def find_start(link: Module, param: Tensor) -> dict[str, Any]:
    """Return the initial state of a link for a parameter, without states that are zero or that depend on the update."""
    if not isinstance(link, TensorTransform) or link.concat_params or link.uses_loss or param.is_complex():
        return {}
    if not link.has_own("single_tensor_initialize", "multi_tensor_initialize") or _starts_at_zero(link):
        return {}
    if link.elementwise and param.dim():
        # The initial state of pointwise links is the same for all elements, so one element shows whether it is zero.
        one = _start(link, param, param.detach()[(slice(0, 1),) * param.dim()], 0.0)
        tensors = [value for key, value in one.items() if isinstance(value, Tensor) and key not in link.points]
        if not any(bool(tensor.any()) for tensor in tensors):
            return {}
    first, second = (_start(link, param, param.detach(), value) for value in (0.0, 1.0))
    return {key: value for key, value in first.items() if are_equal(value, second.get(key))}


def _start(link: TensorTransform, param: Tensor, tensor: Tensor, value: float) -> dict[str, Any]:
    """Return the initial state of a link for an update whose elements are all `value`.

    Args:
        link: The link.
        param: The parameter whose settings apply.
        tensor: The parameter, or a part of it.
        value: The elements of the update.
    """
    state: dict[str, Any] = {}
    with torch.no_grad():
        update = torch.full_like(tensor, value)
        grads = [update] if link.uses_grad else None
        link._fill_states(HookArguments([update], [tensor], grads, None, [state], [link.settings[param]]))
    return state


def _starts_at_zero(link: TensorTransform) -> bool:
    """Return whether a link only declares buffers, which start at zero."""
    kind = type(link)
    plain = kind.single_tensor_initialize is BufferTransform.single_tensor_initialize
    return plain and kind.begin is BufferTransform.begin and not link.has_own("multi_tensor_initialize")  # type: ignore[attr-defined]


class _StateResizer:
    """The resize of the values of one row."""

    def __init__(self, maps: Sequence[UnitMap], lead: int) -> None:
        self.maps, self.lead = maps, lead
        self.whole = compose(maps)

    def resize(self, value: Any, rule: Follows | None, start: Any, is_point: bool) -> Any:
        """Return a nested value with its tensors resized.

        Args:
            value: The value of one state.
            rule: How the state follows its parameter; None for the same shape.
            start: The initial value of the state for the new shape; None if there is none.
            is_point: Whether the state is a point of parameter space, which is resized like the parameter.
        """
        if isinstance(value, MemberValues):
            inner = _StateResizer(self.maps, 0)
            return MemberValues((i, inner.resize(item, rule, None, is_point)) for i, item in value.items())
        if isinstance(rule, str) and rule != "fixed" and isinstance(value, list | tuple):
            return self._resize_factors(value, rule, start)
        if isinstance(value, Tensor):
            return self._resize_tensor(value, rule, start, is_point)
        if not _has_tensors(value):
            # Sizes and axes that the link derived from the shape are replaced; counts and other numbers stay.
            if isinstance(value, list | tuple) and tuple(value) == self.whole.shape:
                return type(value)(self.whole.shape_after)
            return start if isinstance(value, list | tuple) and type(start) is type(value) else value
        return map_tensors(value, lambda tensor: self._resize_tensor(tensor, rule, None, is_point))

    def _resize_tensor(self, tensor: Tensor, rule: Follows | None, start: Any, is_point: bool) -> Tensor:
        inside, shape = tuple(tensor.shape[self.lead :]), self.whole.shape
        start = start if isinstance(start, Tensor) else 0.0
        if rule == "fixed":
            return self._pad(tensor)
        if rule is not None and not isinstance(rule, str):
            return self._resize_axes(tensor, rule(len(shape)), start)
        pairs = len(inside) == len(shape) + 1 and inside[-1] == 2
        if (len(inside) == len(shape) or pairs) and all(a in (1, b) for a, b in zip(inside, shape, strict=False)):
            if is_point and inside == shape:
                for each in self.maps:
                    tensor = each.resize(tensor, self.lead)
                return tensor
            extra = [None] * (len(inside) - len(shape))
            own = UnitMap((*shape, *inside[len(shape) :]), (*self.whole.index, *extra), (*self.whole.fresh, *extra))
            return self._apply(own, tensor, start)
        if tensor.numel() <= 1 or not inside:
            return tensor
        raise UnfitStateError

    def _resize_axes(self, tensor: Tensor, axes: Sequence[int | None], start: Tensor | float) -> Tensor:
        """Resize a tensor whose axes belong to these axes of the parameter."""
        inside, shape = tuple(tensor.shape[self.lead :]), self.whole.shape
        if len(inside) != len(axes):
            if tensor.numel() <= 1:
                return tensor
            raise UnfitStateError
        sizes = [size if axis is None else shape[axis] for size, axis in zip(inside, axes, strict=True)]
        if list(inside) != sizes or (None in axes and len(set(inside)) == 1 < len(inside)):
            # A square basis has one direction for each unit, so it would need new directions for new units.
            raise UnfitStateError
        index = [None if axis is None else self.whole.index[axis] for axis in axes]
        fresh = [None if axis is None else self.whole.fresh[axis] for axis in axes]
        resized = self._apply(UnitMap(inside, index, fresh), tensor, start)
        square = len(axes) == 2 and axes[0] == axes[1]
        if square and not isinstance(start, Tensor):
            _fill_diagonal(resized, tensor, fresh[0])
        return resized

    def _resize_factors(self, value: list[Any] | tuple[Any, ...], rule: str, start: Any) -> Any:
        """Resize a list with a matrix, a vector or nothing for each axis of the parameter."""
        if any(isinstance(each, Tensor) for each in value) and len(value) != len(self.whole.shape):
            raise UnfitStateError
        begin = start if isinstance(start, list | tuple) and len(start) == len(value) else [None] * len(value)
        factors = []
        for axis, (factor, own) in enumerate(zip(value, begin, strict=True)):
            if not isinstance(factor, Tensor):
                factors.append(factor)
            elif rule == "bases":
                factors.append(self._extend_basis(factor, axis))
            else:
                tensor = own if isinstance(own, Tensor) and own.dim() == factor.dim() else 0.0
                factors.append(self._resize_axes(factor, [axis] * (factor.dim() - self.lead), tensor))
        return type(value)(factors)

    def _extend_basis(self, basis: Tensor, axis: int) -> Tensor:
        """Add a direction for each new unit to a basis whose vectors are rows."""
        index, fresh, size = self.whole.index[axis], self.whole.fresh[axis], self.whole.shape[axis]
        if index is None:
            return basis
        if self.lead or self.whole.removes or tuple(basis.shape) != (size, size):
            raise UnfitStateError
        extended = basis.new_zeros(len(index), len(index))
        is_old = torch.ones(len(index), dtype=torch.bool)
        news = torch.zeros(0, dtype=torch.int64) if fresh is None else fresh
        is_old[news] = False
        places = is_old.nonzero().flatten()
        extended[:size, places.to(basis.device)] = basis[:, index[places].to(basis.device)]
        extended[range(size, len(index)), news.to(basis.device)] = 1
        return extended

    def _pad(self, tensor: Tensor) -> Tensor:
        """Add zeros for the new directions of a basis."""
        inside, shape = tuple(tensor.shape[self.lead :]), self.whole.shape
        if inside != shape or self.whole.removes:
            if tensor.numel() <= 1:
                return tensor
            raise UnfitStateError
        padded = tensor.new_zeros(*tensor.shape[: self.lead], *self.whole.shape_after)
        padded[tuple(slice(None, size) for size in tensor.shape)] = tensor
        return padded

    def _apply(self, unit_map: UnitMap, tensor: Tensor, start: Tensor | float) -> Tensor:
        """Return a tensor resized by a map, with the initial value for new units, or zero if it has another shape."""
        after = [*tensor.shape[: self.lead], *unit_map.shape_after]
        fits = isinstance(start, Tensor) and list(start.shape) == after
        return unit_map.resize_state(tensor, start if fits else 0.0, self.lead)


def compose(maps: Sequence[UnitMap]) -> UnitMap:
    """Return one map, without initial values, for several that are applied in turn."""
    index, fresh = list(maps[0].index), list(maps[0].fresh)
    for each in maps[1:]:
        for axis, (later, news) in enumerate(zip(each.index, each.fresh, strict=True)):
            if later is None:
                continue
            before, old_news = index[axis], fresh[axis]
            is_new = torch.zeros(len(later), dtype=torch.bool)
            if old_news is not None:
                is_new |= torch.isin(later, old_news)
            if news is not None:
                is_new[news] = True
            index[axis] = later if before is None else before[later]
            fresh[axis] = is_new.nonzero().flatten() if is_new.any() else None
    return UnitMap(maps[0].shape, index, fresh)


def _fill_diagonal(resized: Tensor, before: Tensor, fresh: Tensor | None) -> None:
    """Set the diagonal for new units to the mean of the old one; with zeros they could not move."""
    if fresh is not None and before.shape[-1]:
        mean = before.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        places = fresh.to(resized.device)
        resized[..., places, places] = mean.expand(*resized.shape[:-2], len(places))


def _has_tensors(value: Any) -> bool:
    """Return whether nested data has tensors."""
    tensors: list[Tensor] = []
    map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return bool(tensors)
