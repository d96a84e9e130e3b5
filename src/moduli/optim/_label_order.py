"""Reordering state to another order of labels.

Saved state names the axes and labels of labelled parameters. Where a parameter has them in another order here, tensors of its state
are reordered as the parameter itself is. Links whose state has other shapes declare which axes it belongs to (`Module.follows`);
state without a rule raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..layout import Axes, AxesError, Reorder, align_axes, layout_of, map_tensors
from ..nn import align_saved, encode_axes
from .state_encoding import MemberValues

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer

Follows = Callable[[int], Sequence[int | None]] | Literal["factors", "bases", "fixed"]
"""How a state follows its parameter: for a parameter of n axes which of them each axis of the state belongs to (None: to none),
or "factors" (a list with a square matrix, a vector or nothing for each axis), "bases" (such a list, with basis vectors as rows),
"fixed" (in a basis of its own)."""


def list_axes(optimizer: Optimizer) -> dict[str, str]:
    """Return the axes of the labelled parameters by name, as text."""
    return {name: json.dumps(encode_axes(axes, name)) for name, axes in _find_axes(optimizer).items()}


def _find_axes(optimizer: Optimizer) -> dict[str, Axes]:
    population, model, slots = optimizer.population, optimizer.model, optimizer.binding.slots
    if population is not None:
        return {entry.name: entry.axes for entry in population.layout if entry.axes is not None}
    if model is None or not (layout := layout_of(model)).labelled:
        return {}
    params = dict(model.named_parameters(remove_duplicate=False))
    named = ((slots.find_name(params[entry.name]), entry.axes) for entry in layout if entry.name in params)
    return {name: axes for name, axes in named if name is not None and axes is not None}


def list_parameter_axes(model: Any) -> dict[Tensor, Axes]:
    """Return the axes of the labelled parameters of a module; of a population none, since its members keep their labels."""
    if not isinstance(model, nn.Module) or not (layout := layout_of(model)).labelled:
        return {}
    params = dict(model.named_parameters(remove_duplicate=False))
    return {params[entry.name]: entry.axes for entry in layout if entry.axes is not None and entry.name in params}


def find_moved_labels(
    replaced: Sequence[tuple[str, Tensor, Tensor]], before: Mapping[Tensor, Axes], now: Mapping[Tensor, Axes]
) -> dict[str, Reorder | None]:
    """Return how labelled parameters that replaced others are reordered, by name; None for those with other labels.

    Args:
        replaced: The name, and the tensor before and after.
        before: The axes of the former parameters.
        now: The axes of the present ones.
    """
    moved: dict[str, Reorder | None] = {}
    for name, old, new in replaced:
        if new not in now or old not in before:
            continue
        try:
            reorder = align_axes(now[new], before[old])
        except AxesError:
            moved[name] = None
        else:
            if reorder is not None:
                moved[name] = reorder
    return moved


def find_reorders(optimizer: Optimizer, saved: Mapping[str, Any], params: Mapping[str, Tensor]) -> dict[str, Reorder]:
    """Return the reordering of each saved parameter whose labels have another order here, by saved name.

    Args:
        optimizer: The optimizer.
        saved: The saved state.
        params: The parameters here, by the names that they were saved with.

    Raises:
        ValueError: Labels are not the same ones, or the parameters are sharded.
    """
    here, there = list_axes(optimizer), saved.get("axes", {})
    reorders: dict[str, Reorder] = {}
    for old, text in there.items():
        name = None if old not in params else optimizer.binding.slots.find_name(params[old])
        if name is None or here.get(name, text) == text:
            continue
        shape = saved["shapes"][old][optimizer.binding.members is not None :]
        reorder = align_saved(name, json.loads(here[name]), json.loads(text), shape)
        if reorder is not None:
            reorders[old] = reorder
    if reorders and optimizer.shards is not None:
        raise ValueError(
            f"the labels of {next(iter(reorders))} have another order here, and its state is sharded; load it into one process"
        )
    return reorders


def follow(
    link: Module, where: str, row: Mapping[str, Any], reorder: Reorder, shape: Sequence[int], lead: int
) -> dict[str, Any]:
    """Return the state of a link for a parameter whose axes or labels have another order here.

    Args:
        link: The link.
        where: The link and the parameter, for errors.
        row: The state.
        reorder: How the parameter is reordered.
        shape: The saved shape of the parameter, without members.
        lead: The number of axes before those of the parameter: 1 for members.

    Raises:
        ValueError: A tensor has neither the shape of the parameter nor a rule.
    """
    rules = link.find_follows(row)
    return {
        key: _Follower(f"state {key!r} of {where}", reorder, shape, rules.get(key)).follow(value, lead)
        for key, value in row.items()
    }


class _Follower:
    """The reordering of the values of one state of a parameter."""

    def __init__(self, where: str, reorder: Reorder, shape: Sequence[int], rule: Follows | None) -> None:
        self.where, self.reorder, self.shape, self.rule = where, reorder, tuple(shape), rule

    def follow(self, value: Any, lead: int) -> Any:
        """Return a nested value with its tensors reordered; `lead`: the number of axes before those of the parameter."""
        if self.rule == "fixed":
            return value
        if isinstance(value, MemberValues):
            return MemberValues((i, self.follow(item, 0)) for i, item in value.items())
        if isinstance(self.rule, str) and isinstance(value, list | tuple):
            tensors = [each for each in value if isinstance(each, Tensor)]
            if tensors and len(value) != len(self.shape):
                raise self._refuse(tensors[0])
            return type(value)(self._follow_factor(axis, each, lead) for axis, each in enumerate(value))
        return map_tensors(value, partial(self._follow_tensor, lead=lead))

    def _follow_factor(self, axis: int, factor: Any, lead: int) -> Any:
        """Reorder the matrix or vector that belongs to one axis of the parameter."""
        if not isinstance(factor, Tensor):
            return factor
        sides = factor.dim() - lead
        axes: list[int | None] = [axis] * sides
        if self.rule == "bases":
            axes[:-1] = [None] * (sides - 1)
        return self._follow_axes(factor, axes, lead)

    def _follow_axes(self, tensor: Tensor, axes: Sequence[int | None], lead: int) -> Tensor:
        """Return a tensor reordered whose axes belong to these axes of the parameter."""
        inside = tuple(tensor.shape[lead:])
        if self.reorder.order is not None or len(inside) != len(axes):
            raise self._refuse(tensor)
        sizes = tuple(size if axis is None else self.shape[axis] for size, axis in zip(inside, axes, strict=True))
        if inside != sizes:
            raise self._refuse(tensor)
        return Reorder(None, tuple(None if axis is None else self.reorder.index[axis] for axis in axes))(tensor, lead)

    def _follow_tensor(self, tensor: Tensor, lead: int) -> Tensor:
        """Return a tensor reordered by the rule of its state, or like the parameter if it has its shape."""
        shape, inside = self.shape, tensor.shape[lead:]
        if self.rule is not None and not isinstance(self.rule, str):
            return self._follow_axes(tensor, self.rule(len(shape)), lead)
        # Complex numbers are pairs of reals where links are pointwise: one axis more.
        if len(inside) - len(shape) in (0, 1) and all(a in (1, b) for a, b in zip(inside, shape, strict=False)):
            extra = tuple(range(len(shape), len(inside)))
            order = None if self.reorder.order is None else (*self.reorder.order, *extra)
            return Reorder(order, (*self.reorder.index, *(None for _ in extra)))(tensor, lead)
        if inside.numel() <= 1:
            return tensor
        raise self._refuse(tensor)

    def _refuse(self, tensor: Tensor) -> ValueError:
        what = f"{self.where} has the shape {tuple(tensor.shape)}, and nothing says how it follows its parameter"
        return ValueError(f"labels have another order here, but {what}. Load it into the saved order of labels")
