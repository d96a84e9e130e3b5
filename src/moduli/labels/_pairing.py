"""Pairing: which axis of one operand meets which axis of another, and which label which label.

The result is a plan, worked out once for each combination of Axes and join policy and then only applied: permute, insert
axes of size one, rearrange labels. Nothing here looks at a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from .._torch import has_dispatch_mode, in_transform, is_wrapped
from ._axes import Axes, cache_by_axes, intern, intern_pairs
from ._constant import constant
from ._errors import OwnTransposeError, UnknownLabelError
from ._gather import Gather, gather, index_of
from ._join import policy
from ._space import Space, show_labels

Step = tuple[tuple[int, ...] | None, tuple[int, ...], tuple[tuple[int, Gather], ...]]
"""What one operand goes through: permute, insert axes of size one at these places, rearrange labels along axes."""


Check = tuple[str | None, tuple[tuple[int, int], ...]]
"""The name of an axis of the result, and the axes that meet in it, as (operand, axis), whose sizes must agree."""


@final
@constant()
class PairingPlan:
    """The axes of the result, the step of each operand, and the sizes that must agree before anything runs."""

    __slots__ = ("__weakref__", "axes", "checks", "fill", "permutes", "reorder", "steps")

    def __init__(
        self,
        axes: Axes,
        steps: tuple[Step | None, ...],
        checks: tuple[Check, ...],
        fill: complex,
        reorder: tuple[int, Gather] | None,
    ) -> None:
        self.axes = axes
        self.steps = steps
        self.checks = checks
        self.fill = fill
        self.permutes = any(step is not None and step[0] is not None for step in steps)
        # Set where all there is to do is to reorder one axis of the second of two operands: by far the commonest plan.
        self.reorder = reorder

    def __reduce__(self) -> tuple[type[PairingPlan], tuple[Any, ...]]:
        return PairingPlan, (self.axes, self.steps, self.checks, self.fill, self.reorder)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


class _PairedAxis:
    """One axis of the result and the operands' axes that meet in it, as (operand, axis)."""

    __slots__ = ("name", "parts")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.parts: list[tuple[int, int]] = []


def current_plan(axes: Axes, others: tuple[Axes, ...]) -> PairingPlan:
    """The plan for these operands under the join policy in force."""
    return pair(axes, others, policy.how, policy.fill)


def _exact_plan(self: Axes, other: Axes) -> PairingPlan:
    """The plan for two operands under the default policy, in one look-up."""
    plan: PairingPlan | None = self._plans.get(other)
    if plan is None:
        plan = pair(self, (other,), "exact", 0.0)
        # Kept under the operand itself too: `pair` above has made room if there was none.
        self._plans[other] = plan
    return plan


Axes.exact_plan = _exact_plan  # type: ignore[method-assign]


def align(first: Axes, second: Axes, x: torch.Tensor, y: torch.Tensor) -> tuple[Axes, torch.Tensor, torch.Tensor]:
    """Bring two operands together: the axes of the result, and both aligned."""
    how = policy.how
    plan = first.exact_plan(second) if how == "exact" else pair(first, (second,), how, policy.fill)
    reorder = plan.reorder
    if reorder is not None:
        axis, order = reorder
        if plan.checks and x.shape != y.shape:
            check_sizes(plan.checks, (x, y))
        return plan.axes, x, y.index_select(axis, index_of(order, y))
    if plan.permutes:
        refuse_itself(plan, (x, y))
    if plan.checks:
        check_sizes(plan.checks, (x, y))
    left, right = plan.steps
    if left is not None:
        x = apply_step(x, left, plan.fill)
    if right is not None:
        y = apply_step(y, right, plan.fill)
    return plan.axes, x, y


@cache_by_axes
def pair(axes: Axes, others: tuple[Axes, ...], how: str, fill: complex) -> PairingPlan:
    """Pair the axes of several operands, then the labels of each axis."""
    operands = (axes, *others)
    entries = _pair_by_name(operands) if all(each.named for each in operands) else _pair_by_position(operands)
    pairs: list[tuple[str | None, Space | None]] = []
    checks: list[Check] = []
    gathers: list[list[tuple[int, Gather]]] = [[] for _ in operands]
    for at, entry in enumerate(entries):
        spaces = [operands[operand].spaces[axis] for operand, axis in entry.parts]
        result, rearranged = pair_spaces(spaces, how, entry.name, at)
        pairs.append((entry.name, result))
        for (operand, _), plan in zip(entry.parts, rearranged, strict=True):
            if plan is not None:
                gathers[operand].append((at, plan))
        firm = [part for part, space in zip(entry.parts, spaces, strict=True) if space is None or not space.broadcast]
        if len(firm) > 1 and any(operands[operand].spaces[axis] is None for operand, axis in firm):
            checks.append((entry.name, tuple(firm)))
    steps = tuple(_step(i, operand, entries, gathers[i]) for i, operand in enumerate(operands))
    reorder = None
    if len(steps) == 2 and steps[0] is None and steps[1] is not None and axes.ndim == others[0].ndim:
        permute, insert, moved = steps[1]
        if permute is None and not insert and len(moved) == 1 and not moved[0][1].missing:
            reorder = moved[0]
    made = intern_pairs(pairs)
    told = {each.told: each for each in operands if each.told is not None}
    if len(told) == 1:
        # What was told of one operand holds of the result, if it has the same axes and no other operand disagrees.
        ((what, source),) = told.items()
        if (made.names, made.spaces) == (source.names, source.spaces):
            made = intern(made.names, made.spaces, what)
    return PairingPlan(made, steps, tuple(checks), fill, reorder)


def _pair_by_name(operands: Sequence[Axes]) -> list[_PairedAxis]:
    entries: dict[str | None, _PairedAxis] = {}
    for i, operand in enumerate(operands):
        for axis, name in enumerate(operand.names):
            entries.setdefault(name, _PairedAxis(name)).parts.append((i, axis))
    return list(entries.values())


def _pair_by_position(operands: Sequence[Axes]) -> list[_PairedAxis]:
    rank = max(operand.ndim for operand in operands)
    entries = [_PairedAxis(None) for _ in range(rank)]
    for i, operand in enumerate(operands):
        for axis, name in enumerate(operand.names):
            entry = entries[rank - operand.ndim + axis]
            if name is not None:
                if entry.name is not None and entry.name != name:
                    raise ValueError(
                        f"axes that meet by position have different names, {entry.name!r} and {name!r} "
                        f"(axis {axis - operand.ndim} of each, because not every axis has a name); "
                        "rename one of them, or name all axes so that they pair by name: "
                        + " against ".join(str(list(each.names)) for each in operands)
                    )
                entry.name = name
            entry.parts.append((i, axis))
    return entries


def _step(number: int, operand: Axes, entries: Sequence[_PairedAxis], gathers: list[tuple[int, Gather]]) -> Step | None:
    """How one operand gets the axes of the result: reorder its own, insert the absent ones, rearrange labels."""
    where = {axis: at for at, entry in enumerate(entries) for i, axis in entry.parts if i == number}
    order = tuple(sorted(range(operand.ndim), key=where.__getitem__))
    present = sorted(where.values())
    # Leading axes are added by torch itself.
    first = min(present, default=len(entries))
    absent = tuple(at for at in range(first, len(entries)) if at not in present)
    # A gather's axis counts from the front of the full result; leading absent axes are not there yet.
    lead = len(entries) - len(order) - len(absent)
    moved = tuple((at - lead, plan) for at, plan in gathers)
    insert = tuple(at - lead for at in absent)
    if order == tuple(range(operand.ndim)) and not insert and not moved:
        return None
    return None if order == tuple(range(operand.ndim)) else order, insert, moved


def pair_spaces(
    spaces: Sequence[Space | None], how: str, name: str | None, at: int
) -> tuple[Space | None, list[Gather | None]]:
    """The labels of one result axis, and for each operand how to get there."""
    result: Space | None = None
    broadcast: Space | None = None
    firm = False
    for space in spaces:
        if space is not None and space.broadcast:
            broadcast = space
            continue
        firm = True
        if space is not None:
            if result is None:
                result = space
            elif how in ("inner", "outer") and result.labels != space.labels:
                left, right = result.rename(None), space.rename(None)
                result = left & right if how == "inner" and not left.has_labels_of(right) else left | right
    if not firm:
        return broadcast, [None] * len(spaces)
    if result is None:
        return None, [None] * len(spaces)
    plans: list[Gather | None] = []
    for space in spaces:
        if (
            space is None
            and how != "exact"
            and any(other is not None and not other.broadcast and len(other) != len(result) for other in spaces)
        ):
            raise ValueError(
                f"{_axis(name, at)} is positional in one operand, and the {how} join of the others changes its size: "
                "positions have no labels to join by; give the axis labels first"
            )
        if space is None or space.broadcast or space.labels == result.labels:
            plans.append(None)
        else:
            plan = Gather(space.locate(result))
            if how == "exact" and (plan.missing or len(space) != len(result)):
                raise ValueError(describe_difference(result, space, _axis(name, at)))
            plans.append(plan)
    return result.rename(name), plans


def _axis(name: str | None, at: int) -> str:
    return f"axis {at}" if name is None else f"axis {name!r}"


def describe_difference(left: Space, right: Space, axis: str) -> str:
    """The sentence for two axes whose labels differ."""
    only_left = [label for label in left if label not in right]
    only_right = [label for label in right if label not in left]
    return (
        f"the labels of {axis} differ: {left!r} on the left, {right!r} on the right; "
        f"only on the left: {show_labels(only_left)}, only on the right: {show_labels(only_right)}. "
        "Select the labels you mean first, or choose a policy: with mo.join('inner'), mo.join('left') or "
        "mo.join('outer', fill=0.0)"
    )


# -- applying a plan ---------------------------------------------------------------------------------------------------


def check_sizes(checks: Sequence[Check], operands: Sequence[torch.Tensor]) -> None:
    """Refuse sizes that disagree, also 1 against n, which torch would stretch."""
    for name, parts in checks:
        operand, axis = parts[0]
        size = operands[operand].shape[axis]
        for other, other_axis in parts[1:]:
            different = operands[other].shape[other_axis]
            if different != size:
                shapes = " and ".join(str(tuple(each.shape)) for each in operands)
                raise ValueError(
                    f"the sizes of paired axes differ: {describe_sizes((size, name, axis), (different, name, other_axis))} "
                    f"in shapes {shapes}"
                    + ("; only BROADCAST stretches: index with None, or use unsqueeze, to make such an axis")
                    * (1 in (size, different))
                )


def describe_sizes(first: tuple[int, str | None, int], second: tuple[int, str | None, int]) -> str:
    """Two sizes that differ, each with the name and the position of its axis: by name where there is one."""
    (size, name, axis), (other, other_name, other_axis) = first, second
    if name is not None and name == other_name:
        return f"{name!r}: {size} and {other}"
    words = [
        f"axis {at}" if called is None else repr(called) for called, at in ((name, axis), (other_name, other_axis))
    ]
    return f"{size} ({words[0]}) and {other} ({words[1]})"


def align_all(plan: PairingPlan, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All operands, aligned; axes of theirs beyond those that were paired stay last."""
    if plan.checks:
        check_sizes(plan.checks, operands)
    return [
        data if step is None else apply_step(data, step, plan.fill)
        for data, step in zip(operands, plan.steps, strict=True)
    ]


def align_to_fixed(axes: Axes, its: Axes, value: torch.Tensor, what: str, like: torch.Tensor | None) -> torch.Tensor:
    """A value aligned to axes that stay as they are, and to the sizes of the tensor that has them, if it is given."""
    plan = current_plan(axes, (its,))
    if plan.axes.ndim != axes.ndim or plan.steps[0] is not None:
        raise UnknownLabelError(f"{what} with {its!r} does not fit {axes!r}")
    if like is not None:
        check_sizes(plan.checks, (like, value))
    step = plan.steps[1]
    return value if step is None else apply_step(value, step, plan.fill)


def apply_step(data: torch.Tensor, step: Step, fill: complex) -> torch.Tensor:
    """Bring one operand to the axes of the result."""
    permute, insert, gathers = step
    if permute is not None:
        data = data.permute(*permute, *range(len(permute), data.ndim))
    for at in insert:
        data = data.unsqueeze(at)
    for axis, plan in gathers:
        data = gather(data, axis, plan, fill)
    return data


def reorder(data: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The data with its axes in another order."""
    made = data.permute(tuple(order))
    if not torch.compiler.is_compiling() and in_transform():
        # For `refuse_itself`: where a transform is active, memory can't always be compared.
        made._moduli_order_of = data  # type: ignore[attr-defined]
    return made


def refuse_itself(plan: PairingPlan, operands: Sequence[torch.Tensor]) -> None:
    """Refuse a tensor together with a reordering of its own axes: paired by name, every entry would meet itself.

    ``h + h.T`` is a symmetrisation to all who write it, but as a sum of named tensors it is ``2 * h``.
    """
    if torch.compiler.is_compiling():
        return
    permutes = [None if step is None else step[0] for step in plan.steps]
    for i, x in enumerate(operands):
        for j, y in enumerate(operands[:i]):
            if permutes[i] == permutes[j] or x.ndim != y.ndim:
                continue
            same = getattr(x, "_moduli_order_of", None) is y or getattr(y, "_moduli_order_of", None) is x
            if not same and _has_memory(x) and _has_memory(y):
                # A conjugate is a mark on the same memory.
                first, second = (t.conj() if t.is_conj() else t for t in (x, y))
                a, b = (t if p is None else t.permute(p) for t, p in ((first, permutes[i]), (second, permutes[j])))
                same = a.is_set_to(b)
            if same:
                raise OwnTransposeError(
                    "a tensor is combined with its own transpose, but axes pair by name, whatever their order, so every "
                    f"entry would meet itself (the axes are {', '.join(map(repr, plan.axes.names))}). For entry (a, b) to "
                    "meet entry (b, a) write t.mH, or t.mT without conjugation, as in (t + t.mH) / 2; they need the same "
                    "labels on both axes"
                )


def _has_memory(data: torch.Tensor) -> bool:
    usual = data.layout is torch.strided and (data.is_cpu or data.is_cuda)
    return usual and data.numel() > 1 and not is_wrapped(data) and not has_dispatch_mode()
