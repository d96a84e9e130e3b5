"""Pairing of the axes of operands by name or position, and of their entries by label.

The result is a plan, which is computed once for each combination of Axes and join policy, and then applied: permute, insert axes
of size one, rearrange labels. Plans do not depend on values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._axes import Axes, Pair, cache_by_axes, intern_pairs
from ._coords import AxisCoordinates, merge
from ._errors import OwnTransposeError, UnknownLabelError
from ._gather import Gather, gather, index_of
from ._join import policy
from ._label_sequences import show_labels
from ._space import Space

Moves = tuple[tuple[int, "Gather"], ...]
"""The rearrangements of labels along axes of one operand."""

Step = tuple[Moves, tuple[int, ...] | None, tuple[int, ...]]
"""The operations on one operand: rearrange labels, permute, insert axes of size one at these positions."""

Check = tuple[str | None, tuple[tuple[int, int], ...]]
"""The name of an axis of the result, and the axes that meet in it, as (operand, axis), whose sizes must agree."""

Meeting = tuple[str | None, list[tuple[int, int]]]
"""The name of an axis of the result, and all axes that meet in it, as (operand, axis)."""


class PairingPlan(NamedTuple):
    """The axes of the result, the step of each operand, and the sizes that must agree before anything runs."""

    axes: Axes
    steps: tuple[Step | None, ...]
    checks: tuple[Check, ...]
    fill: complex | None
    transposes: bool
    """Whether two axes with the same labels have another order in one operand than in another."""
    reorder: tuple[int, Gather] | None
    """The axis and permutation if the plan only reorders one axis of the second of two operands, the most common plan."""


def current_plan(axes: Axes, others: tuple[Axes, ...]) -> PairingPlan:
    """Return the plan for these operands under the current join policy."""
    return pair(axes, others, policy.how, policy.fill)


def align(first: Axes, second: Axes, x: torch.Tensor, y: torch.Tensor) -> tuple[Axes, torch.Tensor, torch.Tensor]:
    """Return the axes of a result of two operands, and both operands aligned to them.

    Args:
        first: The axes of the first operand.
        second: The axes of the second operand.
        x: The data of the first operand.
        y: The data of the second operand.
    """
    exact = policy.how == "exact"
    plan = first.run_pair(_pair_exactly, second) if exact else current_plan(first, (second,))
    reorder = plan.reorder
    if reorder is not None:
        if plan.checks and x.shape != y.shape:
            check_sizes(plan.checks, (x, y))
        axis, order = reorder
        return plan.axes, x, y.index_select(axis, index_of(order, y))
    if plan.transposes:
        refuse_transpose(plan)
    return plan.axes, *align_all(plan, (x, y))  # type: ignore[return-value]


def _pair_exactly(axes: Axes, other: Axes) -> PairingPlan:
    return pair(axes, (other,), "exact", 0.0)


@cache_by_axes
def pair(axes: Axes, others: tuple[Axes, ...], how: str, fill: complex | None) -> PairingPlan:
    """Return the plan that pairs the axes of several operands, and the labels of each axis.

    Args:
        axes: The axes of the first operand.
        others: The axes of the others.
        how: The join policy: "exact", "inner", "outer" or "left".
        fill: The value of missing entries; None for NaN.
    """
    operands = (axes, *others)
    meetings = pair_axes(operands)
    pairs, moves, checks = pair_labels(operands, meetings, how)
    steps = tuple(_step(i, operand, meetings, moves[i]) for i, operand in enumerate(operands))
    reorder = None
    if len(steps) == 2 and steps[0] is None and steps[1] is not None and steps[1][1:] == (None, ()):
        ((axis, plan), *more) = steps[1][0]
        if not more and not plan.missing and axes.ndim == others[0].ndim:
            reorder = (axis, plan)
    result = intern_pairs(pairs)
    coordinates = (_keep_coordinates(each, result) for each in operands)
    result = result.mark(merge([each for each in coordinates if each is not None]))
    transposes = any(step is not None and step[1] is not None for step in steps) and _transposes(operands, meetings)
    return PairingPlan(result, steps, checks, fill, transposes, reorder)


def _keep_coordinates(operand: Axes, result: Axes) -> AxisCoordinates | None:
    """Return the further coordinates of an operand that are valid for the result: those along axes with equal labels."""
    coordinates = operand.coordinates
    if coordinates is None or (operand.names, operand.spaces) == (result.names, result.spaces):
        return coordinates
    spaces = dict(result.pairs())
    names = [name for name in operand.names if name in spaces]
    return coordinates.keep(
        names, [name for name, space in operand.pairs() if name in spaces and spaces[name] != space]
    )


def _transposes(operands: Sequence[Axes], meetings: Sequence[Meeting]) -> bool:
    """Whether two axes with the same labels have another order in one operand than in another that is square, too."""
    for (_, first), (_, second) in itertools.combinations(meetings, 2):
        places, others = dict(first), dict(second)
        common = places.keys() & others.keys()
        if len({places[n] < others[n] for n in common}) > 1:
            square = [n for n in common if _is_square(operands[n], places[n], others[n])]
            if len({places[n] < others[n] for n in square}) > 1:
                return True
    return False


def _is_square(axes: Axes, first: int, second: int) -> bool:
    """Whether two labelled axes have the same labels, and more than one."""
    row, column = axes.spaces[first], axes.spaces[second]
    if row is None or column is None or not (row.labelled and column.labelled) or len(row) < 2:
        return False
    return row.has_labels_of(column)


def pair_axes(operands: Sequence[Axes]) -> list[Meeting]:
    """Return the axes that meet: by name if every axis has one, otherwise by position from the right."""
    if all(each.named for each in operands):
        by_name: dict[str | None, list[tuple[int, int]]] = {}
        for i, operand in enumerate(operands):
            for axis, name in enumerate(operand.names):
                by_name.setdefault(name, []).append((i, axis))
        return list(by_name.items())
    rank = max(operand.ndim for operand in operands)
    names: list[str | None] = [None] * rank
    parts: list[list[tuple[int, int]]] = [[] for _ in names]
    for i, operand in enumerate(operands):
        for axis, name in enumerate(operand.names):
            at = rank - operand.ndim + axis
            parts[at].append((i, axis))
            if None not in (name, names[at]) and name != names[at]:
                raise ValueError(
                    f"axes that meet by position have different names, {names[at]!r} and {name!r} "
                    f"(axis {axis - operand.ndim} of each, because not every axis has a name); "
                    "rename one of them, or name all axes so that they pair by name: "
                    + " against ".join(str(list(each.names)) for each in operands)
                )
            names[at] = names[at] if name is None else name
    return list(zip(names, parts, strict=True))


def pair_labels(
    operands: Sequence[Axes], meetings: Sequence[Meeting], how: str
) -> tuple[list[Pair], list[Moves], tuple[Check, ...]]:
    """Return the axes of the result, the moves of each operand to their labels, and the sizes that must agree.

    Args:
        operands: The axes of each operand.
        meetings: The axes that meet, from `pair_axes`.
        how: The join policy.
    """
    pairs: list[Pair] = []
    checks: list[Check] = []
    moves: list[list[tuple[int, Gather]]] = [[] for _ in operands]
    for at, (name, parts) in enumerate(meetings):
        spaces = [operands[operand].spaces[axis] for operand, axis in parts]
        result, rearranged = _pair_spaces(spaces, how, name, at)
        pairs.append((name, result))
        for (operand, axis), plan in zip(parts, rearranged, strict=True):
            if plan is not None:
                moves[operand].append((axis, plan))
        firm = [part for part, space in zip(parts, spaces, strict=True) if space is None or not space.broadcast]
        if len(firm) > 1 and None in spaces:
            checks.append((name, tuple(firm)))
    return pairs, [tuple(each) for each in moves], tuple(checks)


def _step(number: int, operand: Axes, meetings: Sequence[Meeting], moves: Moves) -> Step | None:
    """Return the step that gives one operand the axes of the result; None if it has them."""
    where = {axis: at for at, (_, parts) in enumerate(meetings) for i, axis in parts if i == number}
    order = tuple(sorted(range(operand.ndim), key=where.__getitem__))
    # torch adds leading axes when it broadcasts.
    first = min(where.values(), default=len(meetings))
    insert = tuple(at - first for at in range(first, len(meetings)) if at not in where.values())
    permute = None if order == tuple(range(operand.ndim)) else order
    return (moves, permute, insert) if moves or permute or insert else None


def _pair_spaces(
    spaces: Sequence[Space | None], how: str, name: str | None, at: int
) -> tuple[Space | None, list[Gather | None]]:
    """Return the labels of one axis of the result, and for each operand how to get there."""
    firm = [space for space in spaces if space is None or not space.broadcast]
    labelled = [space for space in firm if space is not None]
    if not labelled:
        return (None if firm else spaces[-1]), [None] * len(spaces)
    called = f"axis {at}" if name is None else f"axis {name!r}"
    result = _join_labels(labelled, how)
    if how != "exact" and None in firm and any(len(space) != len(result) for space in labelled):
        raise ValueError(
            f"{called} is positional in one operand, and the {how} join of the others changes its size: "
            "positions have no labels to join by; give the axis labels first"
        )
    return result.rename(name), [_find_move(space, result, how, called) for space in spaces]


def _join_labels(spaces: Sequence[Space], how: str) -> Space:
    """Return the labels of the result of a join: those of the first operand unless it is inner or outer."""
    result = spaces[0]
    for space in spaces[1:] if how in ("inner", "outer") else ():
        left, right = result.rename(None), space.rename(None)
        if left._labels != right._labels:
            result = left & right if how == "inner" and not left.has_labels_of(right) else left | right
    return result


def _find_move(space: Space | None, result: Space, how: str, called: str) -> Gather | None:
    """Return the rearrangement of an axis to the labels of the result; None if it is positional, BROADCAST or equal."""
    if space is None or space.broadcast or space._labels == result._labels:
        return None
    move = Gather(space.locate(result))
    if how == "exact" and (move.missing or len(space) != len(result)):
        policies = ", or choose a policy: with mo.join('inner'), mo.join('left') or mo.join('outer', fill=0.0)"
        raise ValueError(describe_difference(result, space, f"the labels of {called} differ:") + policies)
    return move


def describe_difference(left: Space, right: Space, what: str) -> str:
    """Return the message for two axes whose labels differ.

    Args:
        left: The labels of the first axis.
        right: The labels of the second axis.
        what: The start of the message.
    """
    only_left = [label for label in left if label not in right]
    only_right = [label for label in right if label not in left]
    return (
        f"{what} {left!r} on the left, {right!r} on the right; only on the left: {show_labels(only_left)}, only on the "
        f"right: {show_labels(only_right)}. Select the labels you mean first"
    )


# -- applying a plan ---------------------------------------------------------------------------------------------------


def check_sizes(checks: Sequence[Check], operands: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if the sizes of paired axes differ, also 1 against n, which torch would stretch."""
    for name, parts in checks:
        sizes = [operands[operand].shape[axis] for operand, axis in parts]
        for (_, axis), size in zip(parts, sizes, strict=True):
            if size != sizes[0]:
                first, other = ("", "") if name is not None else (f" (axis {parts[0][1]})", f" (axis {axis})")
                raise ValueError(
                    f"the sizes of paired axes differ: {'' if name is None else f'{name!r}: '}{sizes[0]}{first} and "
                    f"{size}{other} in shapes {' and '.join(str(tuple(each.shape)) for each in operands)}"
                    + "; only BROADCAST stretches: index with None, or use unsqueeze, to make such an axis"
                    * (1 in (sizes[0], size))
                )


def align_all(plan: PairingPlan, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all operands aligned; further axes of an operand stay last."""
    if plan.checks:
        check_sizes(plan.checks, operands)
    return [
        data if step is None else apply_step(data, step, plan.fill)
        for data, step in zip(operands, plan.steps, strict=True)
    ]


def align_to_fixed(axes: Axes, its: Axes, value: torch.Tensor, what: str, like: torch.Tensor | None) -> torch.Tensor:
    """Return a value aligned to the axes of a tensor, which are not changed.

    Args:
        axes: The axes of the tensor.
        its: The axes of the value.
        value: The value.
        what: The name of the value in errors.
        like: The data of the tensor, whose sizes are checked; None to skip this.
    """
    plan = current_plan(axes, (its,))
    if plan.axes.ndim != axes.ndim or plan.steps[0] is not None:
        raise UnknownLabelError(f"{what} with {its!r} does not fit {axes!r}{_explain_misfit(axes, plan.axes)}")
    if like is not None:
        check_sizes(plan.checks, (like, value))
    step = plan.steps[1]
    return value if step is None else apply_step(value, step, plan.fill)


def _explain_misfit(axes: Axes, joined: Axes) -> str:
    """Return the reason in words if a join policy would change the labels of a tensor, else nothing."""
    for space, result in zip(axes.spaces, joined.spaces, strict=False) if axes.ndim == joined.ndim else ():
        if space is not None and result is not None and space._labels != result._labels:
            what = f"; under mo.join({policy.how!r}) the labels would become others, which they can't in place:"
            return describe_difference(space, result, what)
    return ""


def apply_step(data: torch.Tensor, step: Step, fill: complex | None) -> torch.Tensor:
    """Return one operand with the axes of the result.

    Args:
        data: The operand.
        step: The step of the plan.
        fill: The value of missing entries; None for NaN.
    """
    moves, permute, insert = step
    for axis, plan in moves:
        data = gather(data, axis, plan, fill)
    if permute is not None:
        data = data.permute(*permute, *range(len(permute), data.ndim))
    for at in insert:
        data = data.unsqueeze(at)
    return data


def refuse_transpose(plan: PairingPlan) -> None:
    """Raise OwnTransposeError for operands whose axes with the same labels have different orders.

    ``h + h.T`` is a symmetrisation to all who write it, but as a sum of named tensors it is ``2 * h``. Only the axes decide:
    a copy of the transpose, and the transpose of another operator, are refused as well.
    """
    raise OwnTransposeError(
        "a tensor is combined with its own transpose, or with one of another operator: the axes "
        f"{', '.join(map(repr, plan.axes.names))} come in another order and have the same labels, so that a transpose can't be "
        "told from axes in another order. For entry (a, b) to meet entry (b, a) write t.mH, or t.mT without conjugation, as in "
        "(t + t.mH) / 2; to pair by name write t.align_to(other.dims) first"
    )
