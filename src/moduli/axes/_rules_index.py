"""Rules of indexing: lookups, gathers, scatters, and the operations that make indices.

Indices that come from a comparison of the entries of an axis (`topk` of the scores of experts) point into that axis: it may be
permuted together with the axis that they index. Other indices, such as tokens, fix the axis that they index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ._atoms import INDEXED, Dim
from ._rules import broadcast, keep_points
from ._tracer import RuleCall, Traced, rule


def point(call: RuleCall, dim: Dim, index: Traced) -> None:
    """Unify an axis with the one into which its indices point; fix it if they point into none.

    Args:
        call: The operation.
        dim: The axis.
        index: The indices.
    """
    if index.points is not None:
        call.same(dim, index.points)
    else:
        call.fix(dim, INDEXED)


def _fix_all(call: RuleCall, operands: Sequence[Traced]) -> None:
    for operand in operands:
        for dim in operand.dims:
            call.fix(dim)


@rule("aten::embedding")
@keep_points
def _embedding(call: RuleCall, weight: Traced, index: Traced, *args: Any, **named: Any) -> Any:
    """Return the axes of rows of a table, selected by index."""
    point(call, weight.dims[0], index)
    call.use(weight, 0, "index")
    call.use(weight, 1, "out")
    return (*index.dims, weight.dims[1])


@rule("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def _embedding_bag(call: RuleCall, weight: Traced, index: Traced, *args: Any, **named: Any) -> Any:
    """Return the axes of sums of rows of a table."""
    call.fix(weight.dims[0], INDEXED)
    call.use(weight, 0, "index")
    call.use(weight, 1, "out")
    for dim in index.dims:
        call.fix(dim)
    return [(call.new(call.shape[0], "bags"), weight.dims[1])]


@rule("aten::index_select")
@keep_points
def _index_select(call: RuleCall, x: Traced, dim: int, index: Traced) -> Any:
    """Return the axes of entries selected along one axis."""
    point(call, x.dims[dim], index)
    return x.change(dim, index.dims[0] if index.dims else (), call.shape[dim])


@rule("aten::index", "aten::_unsafe_index")
@keep_points
def _index_tensors(call: RuleCall, x: Traced, indices: Sequence[Traced | None]) -> Any:
    """Return the axes of advanced indexing: the broadcast axes of the indices are at the first indexed axis, or in front."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    arrays = [index for index in indices if index is not None]
    rank = len(call.shape) - (len(x.dims) - len(axes))
    if any(len(array.dims) > rank for array in arrays):  # a mask indexes several axes
        _fix_all(call, (x, *arrays))
        return tuple(call.new(size, "chosen by a mask") for size in call.shape)
    for axis, array in zip(axes, arrays, strict=True):
        point(call, x.dims[axis], array)
    together = axes == list(range(axes[0], axes[-1] + 1))
    start = axes[0] if together else 0
    shape = call.shape[start : start + rank]
    looked_up = broadcast(call, [dataclasses.replace(array, points=None) for array in arrays], shape)
    rest = x.pick([axis for axis in range(len(x.dims)) if axis not in axes])
    selected = not x.varies and all(array.points is not None for array in arrays)
    origins = (x.origins[axes[0]],) * rank if selected else looked_up.origins
    return Traced(
        call.shape,
        (*rest.dims[:start], *looked_up.dims, *rest.dims[start:]),
        (*rest.origins[:start], *origins, *rest.origins[start:]),
        points=x.points,
        selected=selected,
    )


@rule("aten::gather", "aten::take_along_dim")
@keep_points
def _gather(call: RuleCall, x: Traced, dim: int, index: Traced, *args: Any, **named: Any) -> Any:
    """Pair the axes of the indices with the others, and let the entries of the indices point into the gathered axis."""
    _pair_others(call, x, dim, index)
    point(call, x.dims[dim], index)
    return Traced(call.shape, index.dims, index.origins, points=x.points)


def _pair_others(call: RuleCall, x: Traced, dim: int, index: Traced) -> None:
    for axis in range(len(x.dims)):
        if axis == dim % len(x.dims):
            continue
        if x.shape[axis] == index.shape[axis]:
            call.same(x.dims[axis], index.dims[axis])
        else:
            call.fix(x.dims[axis])
            call.fix(index.dims[axis])


@rule("aten::scatter", "aten::scatter_add", "aten::scatter_reduce")
@keep_points
def _scatter(call: RuleCall, x: Traced, dim: int, index: Traced, source: Any = None, *args: Any, **named: Any) -> Any:
    """Pair the axes of indices and source; indices point into the axis whose entries are written."""
    _pair_others(call, x, dim, index)
    point(call, x.dims[dim], index)
    if isinstance(source, Traced):
        for axis, dims in enumerate(zip(index.dims, source.dims, strict=False)):
            if index.shape[axis] == source.shape[axis]:
                call.same(*dims)
            else:
                call.fix(dims[0])
                call.fix(dims[1])
    return x.dims


@rule("aten::index_add", "aten::index_copy", "aten::index_reduce", "aten::index_fill")
@keep_points
def _index_add(call: RuleCall, x: Traced, dim: int, index: Traced, source: Any, *args: Any, **named: Any) -> Any:
    """Pair the axes of slices that are added along an axis, into which the indices point."""
    point(call, x.dims[dim], index)
    if isinstance(source, Traced) and source.dims:
        for axis in range(len(x.dims)):
            if axis != dim % len(x.dims):
                call.same(x.dims[axis], source.dims[axis])
        if index.dims:
            call.same(index.dims[0], source.dims[dim])
    return x.dims


@rule("aten::index_put", "aten::_index_put_impl")
@keep_points
def _index_put(
    call: RuleCall, x: Traced, indices: Sequence[Traced | None], values: Traced, *args: Any, **named: Any
) -> Any:
    """Pair the axes of values written by advanced indexing if the indices are the first axes; fix all otherwise."""
    arrays = [index for index in indices if index is not None]
    if len(arrays) != len(indices) or any(len(array.dims) > 1 for array in arrays[1:]):
        _fix_all(call, (x, values, *arrays))
        return x.dims
    for axis, array in enumerate(arrays):
        point(call, x.dims[axis], array)
    rest = x.pick(range(len(arrays), len(x.dims)))
    lead = max((array for array in arrays), key=lambda array: len(array.dims))
    whole = Traced((*lead.shape, *rest.shape), (*lead.dims, *rest.dims), (*lead.origins, *rest.origins))
    broadcast(call, (whole, values), whole.shape)
    return x.dims


@rule("aten::topk", "aten::sort")
def _rank(call: RuleCall, x: Traced, *args: Any, dim: int = -1, stable: Any = None, **named: Any) -> Any:
    """Return a fixed axis for the order of values, and indices that point into the sorted axis."""
    position = 1 if call.operation == "aten::topk" else 0
    axis = args[position] if len(args) > position and not isinstance(args[position], bool) else dim
    ranks = call.new(call.shape[axis], "the order of values")
    ranked = x.change(axis, ranks, call.shape[axis])
    return [ranked.dims, Traced(ranked.shape, ranked.dims, ranked.origins, points=x.dims[axis])]


@rule("aten::one_hot")
@keep_points
def _one_hot(call: RuleCall, index: Traced, *args: Any, **named: Any) -> Any:
    """Return the axes of one-hot rows: the indices point into the axis of classes."""
    classes = call.new(call.shape[-1])
    point(call, classes, index)
    return (*index.dims, classes)
