"""Pairing: which axis of one operand meets which axis of another, and which label which label.

The result is a plan, worked out once for each combination of Axes and join policy and then only applied: permute, insert
axes of size one, rearrange labels. Nothing here looks at a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from .._torch import mark_constant, run_outside
from ._axes import Axes, Pair, cache_by_axes, intern_pairs
from ._constant import constant
from ._coords import AxisCoordinates, merge
from ._errors import OwnTransposeError, UnknownLabelError
from ._join import policy
from ._label_sequences import show_labels
from ._space import Space

Moves = tuple[tuple[int, "Gather"], ...]
"""How labels are rearranged along axes of one operand."""

Step = tuple[Moves, tuple[int, ...] | None, tuple[int, ...]]
"""What one operand goes through: rearrange labels, permute, insert axes of size one at these places."""

Check = tuple[str | None, tuple[tuple[int, int], ...]]
"""The name of an axis of the result, and the axes that meet in it, as (operand, axis), whose sizes must agree."""

Meeting = tuple[str | None, list[tuple[int, int]]]
"""The same before it is known whether there is anything to check."""


class PairingPlan(NamedTuple):
    """The axes of the result, the step of each operand, and the sizes that must agree before anything runs."""

    axes: Axes
    steps: tuple[Step | None, ...]
    checks: tuple[Check, ...]
    fill: complex | None
    transposes: bool
    """Whether two axes that have the same labels come in another order in one operand than in another."""
    reorder: tuple[int, Gather] | None
    """Set where all there is to do is to reorder one axis of the second of two operands: by far the commonest plan."""


def current_plan(axes: Axes, others: tuple[Axes, ...]) -> PairingPlan:
    """The plan for these operands under the join policy in force."""
    return pair(axes, others, policy.how, policy.fill)


def align(first: Axes, second: Axes, x: torch.Tensor, y: torch.Tensor) -> tuple[Axes, torch.Tensor, torch.Tensor]:
    """Bring two operands together: the axes of the result, and both aligned."""
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
    """Pair the axes of several operands, then the labels of each axis."""
    operands = (axes, *others)
    meetings = pair_axes(operands)
    pairs, moves, checks = pair_labels(operands, meetings, how)
    steps = tuple(_step(i, operand, meetings, moves[i]) for i, operand in enumerate(operands))
    reorder = None
    if len(steps) == 2 and steps[0] is None and steps[1] is not None and steps[1][1:] == (None, ()):
        ((axis, plan), *more) = steps[1][0]
        if not more and not plan.missing and axes.ndim == others[0].ndim:
            reorder = (axis, plan)
    made = intern_pairs(pairs)
    made = made.mark(merge([kept for each in operands if (kept := _keep_coordinates(each, made)) is not None]))
    transposes = any(step is not None and step[1] is not None for step in steps) and _transposes(operands, meetings)
    return PairingPlan(made, steps, checks, fill, transposes, reorder)


def _keep_coordinates(operand: Axes, made: Axes) -> AxisCoordinates | None:
    """The further coordinates of an operand that hold of the result: those along axes that have the same labels there."""
    told = operand.told
    if told is None or (operand.names, operand.spaces) == (made.names, made.spaces):
        return told
    spaces = dict(made.pairs())
    names = [name for name in operand.names if name in spaces]
    return told.keep(names, [name for name, space in operand.pairs() if name in spaces and spaces[name] != space])


def _transposes(operands: Sequence[Axes], meetings: Sequence[Meeting]) -> bool:
    """Whether two axes that have the same labels come in another order in one operand than in another."""
    for (_, first), (_, second) in itertools.combinations(meetings, 2):
        places, others = dict(first), dict(second)
        common = places.keys() & others.keys()
        orders = {places[number] < others[number] for number in common}
        if len(orders) > 1 and any(_is_square(operands[n], places[n], others[n]) for n in common):
            return True
    return False


def _is_square(axes: Axes, first: int, second: int) -> bool:
    """Whether two axes have the same labels, more than one; positional axes have nothing in common but their sizes."""
    row, column = axes.spaces[first], axes.spaces[second]
    if row is None or column is None or not (row.labelled and column.labelled) or len(row) < 2:
        return False
    return row.has_labels_of(column)


def pair_axes(operands: Sequence[Axes]) -> list[Meeting]:
    """Which axes meet: by name where every axis has one, otherwise by position from the right."""
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
    """The axes of the result, how each operand gets to their labels, and the sizes that must agree."""
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
    """How one operand gets the axes of the result: rearrange labels, reorder its own, insert the absent ones."""
    where = {axis: at for at, (_, parts) in enumerate(meetings) for i, axis in parts if i == number}
    order = tuple(sorted(range(operand.ndim), key=where.__getitem__))
    # Leading axes are added by torch itself.
    first = min(where.values(), default=len(meetings))
    insert = tuple(at - first for at in range(first, len(meetings)) if at not in where.values())
    permute = None if order == tuple(range(operand.ndim)) else order
    return (moves, permute, insert) if moves or permute or insert else None


def _pair_spaces(
    spaces: Sequence[Space | None], how: str, name: str | None, at: int
) -> tuple[Space | None, list[Gather | None]]:
    """The labels of one result axis, and for each operand how to get there."""
    firm = [space for space in spaces if space is None or not space.broadcast]
    labelled = [space for space in firm if space is not None]
    if not labelled:
        return (None if firm else spaces[-1]), [None] * len(spaces)
    called = f"axis {at}" if name is None else f"axis {name!r}"
    result = labelled[0]
    for space in labelled[1:] if how in ("inner", "outer") else ():
        left, right = result.rename(None), space.rename(None)
        if left._labels != right._labels:
            result = left & right if how == "inner" and not left.has_labels_of(right) else left | right
    if how != "exact" and None in firm and any(len(space) != len(result) for space in labelled):
        raise ValueError(
            f"{called} is positional in one operand, and the {how} join of the others changes its size: "
            "positions have no labels to join by; give the axis labels first"
        )
    plans: list[Gather | None] = []
    for each in spaces:
        plan = None
        if each is not None and not each.broadcast and each._labels != result._labels:
            plan = Gather(each.locate(result))
            if how == "exact" and (plan.missing or len(each) != len(result)):
                policies = ", or choose a policy: with mo.join('inner'), mo.join('left') or mo.join('outer', fill=0.0)"
                raise ValueError(describe_difference(result, each, f"the labels of {called} differ:") + policies)
        plans.append(plan)
    return result.rename(name), plans


def describe_difference(left: Space, right: Space, what: str) -> str:
    """The sentence for two axes whose labels differ."""
    only_left = [label for label in left if label not in right]
    only_right = [label for label in right if label not in left]
    return (
        f"{what} {left!r} on the left, {right!r} on the right; only on the left: {show_labels(only_left)}, only on the "
        f"right: {show_labels(only_right)}. Select the labels you mean first"
    )


# -- applying a plan ---------------------------------------------------------------------------------------------------


def check_sizes(checks: Sequence[Check], operands: Sequence[torch.Tensor]) -> None:
    """Refuse sizes that disagree, also 1 against n, which torch would stretch."""
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


def apply_step(data: torch.Tensor, step: Step, fill: complex | None) -> torch.Tensor:
    """Bring one operand to the axes of the result."""
    moves, permute, insert = step
    for axis, plan in moves:
        data = gather(data, axis, plan, fill)
    if permute is not None:
        data = data.permute(*permute, *range(len(permute), data.ndim))
    for at in insert:
        data = data.unsqueeze(at)
    return data


def refuse_transpose(plan: PairingPlan) -> None:
    """Raise OwnTransposeError for operands whose axes of the same labels come in another order.

    ``h + h.T`` is a symmetrisation to all who write it, but as a sum of named tensors it is ``2 * h``. Only the axes decide:
    a copy of the transpose, and the transpose of another operator, are refused as well.
    """
    raise OwnTransposeError(
        "a tensor is combined with its own transpose, or with one of another operator: the axes "
        f"{', '.join(map(repr, plan.axes.names))} come in another order and have the same labels, so that a transpose can't be "
        "told from axes in another order. For entry (a, b) to meet entry (b, a) write t.mH, or t.mT without conjugation, as in "
        "(t + t.mH) / 2; to pair by name write t.align_to(other.dims) first"
    )


# -- entries of an axis, rearranged to other labels --------------------------------------------------------------------


@final
@constant()
class Gather:
    """For each wanted label its position in the source, or -1 where the source has none."""

    __slots__ = ("__weakref__", "_cpu", "_made", "_positions", "_readers", "highest", "missing")

    def __init__(self, positions: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._positions: Final = np.asarray(positions, np.int64)
        self.missing: Final = bool((self._positions < 0).any())
        self.highest: Final = int(self._positions.max(initial=-1))
        self._cpu: torch.Tensor | None = None
        self._readers: dict[str, Callable[[torch.device], torch.Tensor]] = {}
        self._made: dict[tuple[torch.device, str], torch.Tensor] = {}

    # A plan is what it is: compared by identity, said here because the compiler asks for it.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Gather], tuple[Any]]:
        return Gather, (self._positions,)

    @property
    def size(self) -> int:
        """The number of wanted labels."""
        return len(self._positions)

    @property
    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The positions, not to be written to."""
        return self._positions

    def reader(self, what: str) -> Callable[[torch.device], torch.Tensor]:
        """The function that compiled code calls, while it is traced, for the index or the mask.

        What a function marked like this returns is a constant of the graph, and goes by the name of the function: so
        every Gather has functions, and names, of its own.
        """
        found = self._readers.get(what)
        if found is None:

            def found(device: torch.device) -> torch.Tensor:
                return self.build(device, what)

            found.__code__ = found.__code__.replace(co_name=f"moduli_{what}_{next(_numbers)}")
            self._readers[what] = mark_constant(found)
        return found

    def build(self, device: torch.device, what: str) -> torch.Tensor:
        """The places as an index on a device, or as a mask: True where the source has the label."""
        found = self._made.get((device, what))
        if found is None:
            values = self._positions.clip(0) if what == "index" else self._positions >= 0
            # It outlives the call: it must not belong to a function transform, a tracer or inference mode that is active.
            found = self._made[device, what] = run_outside(torch.tensor, values, device=device)
            found._moduli_constant = True  # type: ignore[attr-defined]  # what is computed with it depends on nothing more
        return found


_numbers: Final = itertools.count()


def index_of(gather: Gather, data: torch.Tensor) -> torch.Tensor:
    """The index of a Gather, where the data is."""
    if is_dynamo_compiling():
        return gather.reader("index")(data.device)
    if data.is_cpu:
        found = gather._cpu
        if found is None:
            found = gather._cpu = gather.build(data.device, "index")
        return found
    return gather.build(data.device, "index")


def gather(data: torch.Tensor, axis: int, plan: Gather, fill: complex | None) -> torch.Tensor:
    """The data with one axis rearranged; what is missing becomes `fill`, or NaN if that is None."""
    if not plan.missing:
        return data.index_select(axis, index_of(plan, data))
    if fill is None:
        fill = _default_fill(data)
    mask = plan.reader("mask")(data.device) if is_dynamo_compiling() else plan.build(data.device, "mask")
    mask = lay_along(mask, axis, data.ndim)
    # 0.0 in integers is 0: a float that is a whole number must not turn integers into floats and round them.
    if not (data.is_floating_point() or data.is_complex() or isinstance(fill, complex)) and fill % 1 == 0:
        fill = bool(fill) if data.dtype is torch.bool and fill in (0, 1) else int(fill)
    if data.shape[axis] == 0:
        wanted = list(data.shape)
        wanted[axis] = plan.size
        return torch.where(mask, data.new_zeros(wanted), fill)
    return torch.where(mask, data.index_select(axis, index_of(plan, data)), fill)


def _default_fill(data: torch.Tensor) -> float:
    """NaN, or a refusal where there is none."""
    if data.is_floating_point() or data.is_complex():
        return math.nan
    raise TypeError(
        f"labels are missing in a tensor of {data.dtype}, which has no NaN to put there: say what to take, as in "
        "mo.join('outer', fill=0), or convert it first with t.float()"
    )


def lay_along(vector: torch.Tensor, axis: int, ndim: int) -> torch.Tensor:
    """A vector as a tensor of more axes, all of size one but one."""
    return vector.reshape([-1 if at == axis else 1 for at in range(ndim)])
