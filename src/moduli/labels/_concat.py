"""Concatenation and splitting of tensors along an axis: cat, stack, split, flatten, unflatten."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ._axes import Axes, DimLike, DimsLike, as_key, as_pair, cache_by_axes, intern_pairs
from ._coords import concatenate
from ._gather import Gather, gather
from ._join import policy
from ._pairing import PairingPlan, align_all, current_plan, pair
from ._space import Space, freeze
from ._tensor import RULES, Tensor, as_tensor, method, wrap


def cat(tensors: Sequence[Tensor], dim: DimLike = 0) -> Tensor:
    """Join tensors along an axis they all have.

    Along that axis, labels are put one after the other and must be distinct; positional axes give a positional axis. All
    other axes are paired by name (or by position) and by label, as in arithmetic.

    Args:
        tensors: At least one tensor, all with the same axes.
        dim: The axis to join along, by name or position in the first tensor.

    Raises:
        ValueError: If there is none, axes differ, a label occurs twice along the joined axis, or one tensor has labels
            there and another has not.

    Example:
        >>> import moduli as mo
        >>> a = mo.tensor([[1.0, 2.0]], row=["p"], column=["a", "b"])
        >>> b = mo.tensor([[4.0, 3.0]], row=["q"], column=["b", "a"])
        >>> mo.cat([a, b], "row").sel(column="a")
        Tensor(row: p=1., q=3.)
    """
    tensors = [as_tensor(t) for t in tensors]
    if not tensors:
        raise ValueError("cat needs at least one tensor")
    at, plan = _join_axes(tensors[0]._axes, tuple(t._axes for t in tensors[1:]), dim, policy.how, policy.fill)
    parts = align_all(plan, [t._data for t in tensors])
    # An axis that is BROADCAST in one tensor is expanded to the size of the others.
    sizes = torch.broadcast_shapes(*(part.shape[:at] + part.shape[at + 1 :] for part in parts))  # type: ignore[no-untyped-call]
    parts = [part.expand(*sizes[:at], part.shape[at], *sizes[at:]) for part in parts]
    return wrap(torch.cat(parts, at), plan.axes)


@cache_by_axes
def _join_axes(
    axes: Axes, others: tuple[Axes, ...], dim: DimLike, how: str, fill: complex | None
) -> tuple[int, PairingPlan]:
    at = axes.axis(dim)
    operands = (axes, *others)
    by_name = all(operand.named for operand in operands)
    for operand in operands:
        if operand.ndim != axes.ndim or (by_name and set(operand.names) != set(axes.names)):
            raise ValueError(f"tensors to be joined have the same axes, but one has {operand!r} and another {axes!r}")
    places = [operand.names.index(axes.names[at]) if by_name else at for operand in operands]
    # Neither the labels nor the sizes of the concatenated axis are paired.
    first, *rest = (each.put_labels(place, None) for each, place in zip(operands, places, strict=True))
    plan = pair(first, tuple(rest), how, fill)
    ends = [operand.spaces[place] for operand, place in zip(operands, places, strict=True)]
    joined = plan.axes.put_labels(at, _end_to_end(ends, axes.describe(at)))
    name = axes.names[at]
    along = {} if name is None else concatenate([each.coordinates for each in operands], name)
    if along and joined.coordinates is not None:
        joined = joined.mark(joined.coordinates.replace({**joined.coordinates.entries, **along}))
    checks = tuple(check for check in plan.checks if (0, at) not in check[1])
    return at, plan._replace(axes=joined, checks=checks)


def _end_to_end(spaces: Sequence[Space | None], called: str) -> Space | None:
    """Return the space of the concatenated axis: all labels in order, or None if positional."""
    with_labels = [space for space in spaces if space is not None and space.labelled]
    if not with_labels:
        return None
    if len(with_labels) != len(spaces):
        raise ValueError(
            f"{called} has labels in some of the tensors to be joined and none in others; "
            "label all of them, or none (t.relabel(axis, None))"
        )
    try:
        return Space(itertools.chain.from_iterable(with_labels))
    except ValueError as error:
        raise ValueError(f"the labels of {called} can't be put end to end: {error}") from None


def stack(
    tensors: Sequence[Tensor] | Mapping[Hashable, Tensor], name: str | None = None, *, labels: Any = None, dim: int = 0
) -> Tensor:
    """Stack tensors along a new axis.

    Args:
        tensors: The tensors, paired as in arithmetic; a mapping gives the labels of the new axis by its keys.
        name: The name of the new axis.
        labels: Its labels; positional if not given.
        dim: Its position in the result.

    Raises:
        ValueError: If there is no tensor, or the number of labels is wrong.

    Example:
        >>> import moduli as mo
        >>> a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([3.0, 4.0], x=["b", "a"])
        >>> mo.stack({"first": a, "second": b}, "run").sel(x="a")
        Tensor(run: first=1., second=4.)
    """
    if isinstance(tensors, Mapping):
        labels = list(tensors) if labels is None else labels
        tensors = list(tensors.values())
    operands = [as_tensor(t) for t in tensors]
    if not operands:
        raise ValueError("stack needs at least one tensor")
    plan = current_plan(operands[0]._axes, tuple(t._axes for t in operands[1:]))
    data = align_all(plan, [t._data for t in operands])
    if any(d.shape != data[0].shape for d in data):
        data = list(torch.broadcast_tensors(*data))  # type: ignore[no-untyped-call]
    at, axes = _stack_axes(plan.axes, dim, name, freeze(labels), len(operands))
    return wrap(torch.stack(data, at), axes)


@cache_by_axes
def _stack_axes(axes: Axes, dim: int, name: str | None, labels: Any, count: int) -> tuple[int, Axes]:
    space = None if labels is None else Space(labels)
    if space is not None and len(space) != count:
        raise ValueError(f"{count} tensors were given, but {len(space)} labels: {space!r}")
    own, space = (None, None) if space is None else as_pair(space)
    return axes.insert(dim, (own if name is None else name, space))


# -- splitting ---------------------------------------------------------------------------------------------------------


@method
def split(t: Tensor, sizes: int | Sequence[int], dim: DimLike = 0) -> tuple[Tensor, ...]:
    """Split a tensor along an axis; labels follow their entries.

    Args:
        t: The tensor.
        sizes: The size of every part (the last may be smaller), or one size for each.
        dim: The axis, by name or position.

    Raises:
        ValueError: If the sizes do not add up to the size of the axis.

    Example:
        >>> import moduli as mo
        >>> [piece.dims[0].labels for piece in mo.tensor([1.0, 2.0, 3.0], x=list("abc")).split(2, "x")]
        [('a', 'b'), ('c',)]
    """
    at = t._axes.axis(dim)
    try:
        pieces = t._data.split(sizes if isinstance(sizes, int) else list(sizes), at)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"{t._axes.describe(at)} can't be split into pieces of {sizes}: {error}") from None
    if t._axes.spaces[at] is None and t._axes.coordinates is None:
        return tuple(wrap(piece, t._axes) for piece in pieces)
    axes = _pieces(t._axes, at, tuple(piece.shape[at] for piece in pieces))
    return tuple(wrap(piece, its) for piece, its in zip(pieces, axes, strict=True))


@method
def chunk(t: Tensor, count: int, dim: DimLike = 0) -> tuple[Tensor, ...]:
    """Split a tensor into at most `count` parts of equal size (the last may be smaller).

    Args:
        t: The tensor.
        count: The number of parts.
        dim: The axis, by name or position.

    Example:
        >>> import moduli as mo
        >>> [len(piece) for piece in mo.zeros(5).chunk(2)]
        [3, 2]
    """
    at = t._axes.axis(dim)
    size = t._data.shape[at]
    return split(t, -(-size // count), at) if size else split(t, [0] * count, at)


@method
def unbind(t: Tensor, dim: DimLike = 0) -> tuple[Tensor, ...]:
    """Return the slices along an axis, without it.

    Args:
        t: The tensor.
        dim: The axis, by name or position.

    Example:
        >>> import moduli as mo
        >>> [float(x) for x in mo.tensor([1.0, 2.0], x=["a", "b"]).unbind("x")]
        [1.0, 2.0]
    """
    at = t._axes.axis(dim)
    axes = t._axes.run(Axes.drop, at)
    return tuple(wrap(piece, axes) for piece in t._data.unbind(at))


@cache_by_axes
def _pieces(axes: Axes, at: int, cuts: tuple[int, ...]) -> tuple[Axes, ...]:
    name, space = axes.pairs()[at]
    if space is not None and space.broadcast:
        return tuple(axes if cut == 1 else axes.put(at, (name, None)) for cut in cuts)
    pieces = []
    for start, cut in zip(itertools.accumulate(cuts, initial=0), cuts, strict=False):
        part = slice(start, start + cut)
        part_axes = axes.put(at, (name, None if space is None else space[part]))
        pieces.append(axes.carry(part_axes, {} if name is None else {name: part}))
    return tuple(pieces)


# -- products of axes --------------------------------------------------------------------------------------------------


@method
def flatten(t: Tensor, dims: DimsLike = None, name: str | None = None) -> Tensor:
    """Make one axis of several.

    Its labels are the tuples of the labels of the given axes (with positions for positional ones); if all of them are
    positional, so is the result. The new axis replaces the first of them. `unflatten` is the inverse.

    Args:
        t: The tensor.
        dims: The axes, in the order of flattening (the last one varies fastest); all by default.
        name: The name of the new axis.

    Raises:
        ValueError: If one of them is BROADCAST, or there is none.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], y=["a", "b"], x=["p", "q"])
        >>> t.flatten("y x", name="pixel").dims[0].labels
        (('a', 'p'), ('a', 'q'), ('b', 'p'), ('b', 'q'))
    """
    key = as_key(dims)
    order, first, count, mixed = _group_axes(t._axes, key)
    data = t._data.permute(order)
    shape = data.shape
    group = tuple(shape[first : first + count])
    axes = _product(t._axes, key, name, group if mixed else None)
    return wrap(data.reshape(*shape[:first], math.prod(group), *shape[first + count :]), axes)


@cache_by_axes
def _group_axes(axes: Axes, dims: DimsLike) -> tuple[tuple[int, ...], int, int, bool]:
    """Return the permutation that makes the group adjacent, its start, its length, and whether labels and positions mix."""
    group = axes.axes(dims)
    if not group:
        raise ValueError("flatten needs at least one axis")
    axes.refuse_broadcast(group, "", " and has no entries to run through; squeeze it first")
    place = min(group)
    before = [i for i in range(place) if i not in group]
    after = [i for i in range(place, axes.ndim) if i not in group]
    labelled = [axes.spaces[i] is not None for i in group]
    return (*before, *group, *after), len(before), len(group), any(labelled) and not all(labelled)


@cache_by_axes
def _product(axes: Axes, dims: DimsLike, name: str | None, sizes: tuple[int, ...] | None) -> Axes:
    order, first, count, _ = _group_axes(axes, dims)
    group = order[first : first + count]
    spaces = [axes.spaces[i] for i in group]
    if all(space is None for space in spaces):
        product = None
    elif len(spaces) == 1:
        product = spaces[0]
    else:
        factors = [range(sizes[i]) if s is None and sizes else s for i, s in enumerate(spaces)]
        product = Space(itertools.product(*factors))  # type: ignore[arg-type]
    pairs = [(axes.names[i], axes.spaces[i]) for i in order]
    pairs[first : first + count] = [(name, product)]
    flat = intern_pairs(pairs)
    return (
        flat
        if axes.coordinates is None
        else flat.mark(axes.coordinates.keep({axes.names[i] for i in order if i not in group}))
    )


@method
def unflatten(t: Tensor, dim: DimLike, dims: Sequence[Space | int] | None = None, /, **named: Any) -> Tensor:
    """Make several axes of one, the inverse of `flatten`.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        dims: The new axes: Spaces, or sizes.
        named: The new axes by name: a size, labels or a Space each.

    Raises:
        ValueError: If their sizes do not multiply to the size of the axis, or its labels are not the product of theirs.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], y=["a", "b"], x=["p", "q"])
        >>> flat = t.flatten("y x", name="pixel")
        >>> bool((flat.unflatten("pixel", t.dims) == t).all())
        True
        >>> mo.zeros(6).rename("n").unflatten("n", row=2, column=3).shape
        torch.Size([2, 3])
    """
    factors: tuple[tuple[str | None, Any], ...] = tuple((None, freeze(space)) for space in dims or ())
    factors += tuple((name, freeze(space)) for name, space in named.items())
    at, sizes, order, axes = _factor_axis(t._axes, dim, factors)
    data = t._data
    if math.prod(sizes) != data.shape[at]:
        raise ValueError(f"{t._axes.describe(at)} has size {data.shape[at]}, which is not the product of {sizes}")
    if order is not None:
        data = gather(data, at, order, 0.0)
    return wrap(data.unflatten(at, sizes), axes)  # type: ignore[no-untyped-call]


@cache_by_axes
def _factor_axis(
    axes: Axes, dim: DimLike, given: tuple[tuple[str | None, Any], ...]
) -> tuple[int, tuple[int, ...], Gather | None, Axes]:
    at = axes.axis(dim)
    spaces = tuple(Space(space) if name is None else Space(space).rename(name) for name, space in given)
    if not spaces:
        raise ValueError("unflatten needs the Spaces of the new axes")
    old = axes.spaces[at]
    order = None
    if old is not None and old.labelled:
        wanted: Sequence[Hashable] = tuple(itertools.product(*spaces))
        if len(spaces) == 1:
            wanted = spaces[0].labels
        missing = [label for label in wanted if label not in old]
        if missing or len(wanted) != len(old):
            raise ValueError(
                f"the labels of {axes.describe(at)}, {old!r}, are not the product of {spaces}: "
                f"{missing[0] if missing else 'some'!r} is missing; make the axis positional first with "
                f"t.relabel({axes.names[at] or at!r}, None) if its labels do not matter"
            )
        if tuple(wanted) != tuple(old.labels):
            order = Gather(old.locate(wanted))
    return at, tuple(len(space) for space in spaces), order, axes.put(at, *map(as_pair, spaces))


def _flatten_rule(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    first, last = input._axes.axis(start_dim), input._axes.axis(end_dim)
    return flatten(input, tuple(range(first, last + 1)))


RULES.update({torch.stack: lambda tensors, dim=0: stack(tensors, dim=dim), torch.flatten: _flatten_rule})
