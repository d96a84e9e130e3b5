"""Rules of views: transpositions, reshapes, slices, concatenations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ._atoms import Dim
from ._rules import CHUNK, keep_points, refresh, view_rule
from ._tracer import NOWHERE, Origins, RuleCall, Traced, rule


@rule("aten::t", "aten::numpy_T", "aten::mT")
@view_rule
def _transpose_last(call: RuleCall, x: Traced) -> Any:
    """Return the axes in reverse."""
    return x.pick(reversed(range(len(x.dims))))


@rule("aten::transpose", "aten::swapaxes")
@view_rule
def _transpose(call: RuleCall, x: Traced, first: int, second: int) -> Any:
    """Return the axes with two of them exchanged."""
    axes = list(range(len(x.dims)))
    axes[first], axes[second] = axes[second], axes[first]
    return x.pick(axes)


@rule("aten::permute")
@view_rule
def _permute(call: RuleCall, x: Traced, dims: Sequence[int]) -> Any:
    """Return the axes in another order."""
    return x.pick([axis % len(x.dims) for axis in dims])


@rule("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::view_copy")
@view_rule
def _view(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Split axes into factors and join them; a view in another dtype keeps the axes whose sizes stay."""
    if math.prod(call.shape) != math.prod(x.shape):
        return [refresh(call, x, call.shape)]
    if 0 in x.shape:
        return [tuple(call.new(size) for size in call.shape)]
    dims = tuple(call.atoms.regroup(x.dims, call.shape))
    origins = _regroup_origins(x, call.shape)
    return dataclasses.replace(x, shape=call.shape, dims=dims, origins=origins)


def _regroup_origins(x: Traced, shape: Sequence[int]) -> tuple[Origins, ...]:
    """Return the origins of the axes of a view: those of the smallest run of axes with the same number of entries."""
    olds = [(size, origins) for size, origins in zip(x.shape, x.origins, strict=True) if size != 1]
    results: list[Origins] = []
    run: list[int] = []  # the positions of the view's axes in the current run
    have = want = 1
    origins: Origins = NOWHERE
    for position, size in enumerate(shape):
        results.append(NOWHERE)
        if size == 1:
            continue
        run.append(position)
        want *= size
        while have < want:
            next_size, next_origins = olds.pop(0)
            have *= next_size
            origins |= next_origins
        for each in run:
            results[each] = origins
        if have == want:
            run, have, want, origins = [], 1, 1, NOWHERE
    return tuple(results)


@rule("aten::expand", "aten::expand_copy")
@view_rule
def _expand(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Return axes of size one with equal entries instead."""
    missing = len(call.shape) - len(x.dims)
    grown = x.pick([*[None] * missing, *range(len(x.dims))])
    dims = tuple(
        call.new(size) if have == 1 and size != 1 else dim
        for dim, have, size in zip(grown.dims, grown.shape, call.shape, strict=True)
    )
    return dataclasses.replace(grown, shape=call.shape, dims=dims)


@rule("aten::repeat", "aten::tile")
@view_rule
def _repeat(call: RuleCall, x: Traced, repeats: Sequence[int], *args: Any, **named: Any) -> Any:
    """Return each axis as a product with an axis of equal entries."""
    grown = x.pick([*[None] * (len(repeats) - len(x.dims)), *range(len(x.dims))])
    dims = tuple((*call.new(times), *dim) for dim, times in zip(grown.dims, repeats, strict=True))
    return dataclasses.replace(grown, shape=call.shape, dims=dims)


@rule("aten::unsqueeze")
@view_rule
def _unsqueeze(call: RuleCall, x: Traced, dim: int) -> Any:
    """Insert an axis of size one."""
    axes: list[int | None] = list(range(len(x.dims)))
    axes.insert(dim % (len(axes) + 1), None)
    return x.pick(axes)


@rule("aten::squeeze")
@view_rule
def _squeeze(call: RuleCall, x: Traced, dim: Any = None) -> Any:
    """Drop axes of size one."""
    wanted = range(len(x.dims)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis % max(len(x.dims), 1) for axis in wanted}
    return x.pick([axis for axis, size in enumerate(x.shape) if axis not in gone or size != 1])


@rule("aten::cat", "aten::concat")
@keep_points
def _cat(call: RuleCall, tensors: Sequence[Traced], dim: int = 0) -> Any:
    """Concatenate along an axis, which becomes segments, and unify the others."""
    parts = [each for each in tensors if each.shape != (0,)]
    first = parts[0]
    dim %= len(first.dims)
    for other in parts[1:]:
        for axis, (ours, theirs) in enumerate(zip(first.dims, other.dims, strict=True)):
            if axis != dim:
                call.same(ours, theirs)
    points = _join_points(call, parts)
    joined = call.atoms.join([each.dims[dim] for each in parts if each.shape[dim]])
    origins = tuple(frozenset().union(*axes) for axes in zip(*(each.origins for each in parts), strict=True))
    return dataclasses.replace(first.change(dim, joined, call.shape[dim]), origins=origins, points=points)


def _join_points(call: RuleCall, parts: Sequence[Traced]) -> Dim | None:
    points = [each.points for each in parts if each.points is not None]
    for other in points:
        if len(points) == len(parts):
            call.same(points[0], other)
        else:
            call.fix(other, "its indices are mixed with other numbers")
    return points[0] if len(points) == len(parts) else None


@rule("aten::stack")
@keep_points
def _stack(call: RuleCall, tensors: Sequence[Traced], dim: int = 0) -> Any:
    """Concatenate along a new axis."""
    return _cat(call, [_unsqueeze(call, each, dim) for each in tensors], dim)


def _cut(call: RuleCall, x: Traced, dim: int, sizes: Sequence[int]) -> list[Traced]:
    rest, parts = x.dims[dim], []
    left = sum(sizes)
    for size in sizes:
        if size == left:
            head = rest
        elif size == 0:
            head = ()
        else:
            head, rest = call.atoms.cut(rest, size)
        left -= size
        parts.append(x.change(dim, head, size))
    return parts


@rule("aten::split", "aten::split_with_sizes", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::chunk")
@view_rule
def _split(call: RuleCall, x: Traced, size: Any, dim: int = 0) -> Any:
    """Cut an axis into segments."""
    dim %= len(x.dims)
    return _cut(call, x, dim, [shape[dim] for shape in call.shapes])


@rule("aten::unbind")
@view_rule
def _unbind(call: RuleCall, x: Traced, dim: int = 0) -> Any:
    """Fix an axis whose entries become separate tensors."""
    return [_select(call, x, dim, 0)] * len(call.shapes)


@rule("aten::select")
@view_rule
def _select(call: RuleCall, x: Traced, dim: int, index: Any) -> Any:
    """Fix an axis of which one entry is selected by position."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], CHUNK)
    return x.pick([axis for axis in range(len(x.dims)) if axis != dim])


@rule("aten::slice")
@view_rule
def _slice(
    call: RuleCall, x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Return a segment of an axis, or every n-th entry of it."""
    dim %= len(x.dims)
    size, taken = x.shape[dim], call.shape[dim]
    if taken == size or taken == 0:
        return x.change(dim, x.dims[dim] if taken else (), taken)
    if step != 1:
        if size % step or taken != size // step:
            return _fix_slice(call, x, dim)
        outer, inner = call.atoms.regroup([x.dims[dim]], [size // step, step])
        call.fix(inner, f"every {step} entries are one")
        return x.change(dim, outer, taken)
    start = 0 if start is None else start + size if start < 0 else start
    segment = x.dims[dim]
    if start + taken < size:
        segment, _ = call.atoms.cut(segment, start + taken, (True, False))
    if start:
        _, segment = call.atoms.cut(segment, start, (False, True))
    call.atoms.mark_read(segment)
    return x.change(dim, segment, taken)


def _fix_slice(call: RuleCall, x: Traced, dim: int) -> Traced:
    call.fix(x.dims[dim])
    return x.change(dim, call.new(call.shape[dim], "a part of a fixed axis"), call.shape[dim])


@rule("aten::constant_pad_nd")
def _pad(call: RuleCall, x: Traced, pad: Sequence[int], value: Any = 0) -> Any:
    """Return axes with segments of equal entries before and after them."""
    dims = list(x.dims)
    for back, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        if before < 0 or after < 0:
            call.fix(dims[-back])
            dims[-back] = call.new(call.shape[-back], f"made by {call.operation}")
        elif before or after:
            parts = [call.new(before) if before else None, dims[-back], call.new(after) if after else None]
            dims[-back] = call.atoms.join([part for part in parts if part is not None])
    return tuple(dims)


@rule("aten::view_as_real", "aten::view_as_complex", "aten::_view_as_complex")
def _view_complex(call: RuleCall, x: Traced) -> Any:
    """Split complex numbers into pairs, or join pairs."""
    if len(call.shape) < len(x.shape):
        call.fix(x.dims[-1], "the parts of a complex number")
        return x.pick(range(len(x.dims) - 1))
    pairs = x.pick([*range(len(x.dims)), None])
    return pairs.change(len(x.dims), call.new(2, "the parts of a complex number"), 2)


@rule("aten::diagonal")
def _diagonal(call: RuleCall, x: Traced, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Unify two axes whose entries at equal positions are selected."""
    one, two = dim1 % len(x.dims), dim2 % len(x.dims)
    if offset or x.shape[one] != x.shape[two]:
        call.fix(x.dims[one])
        call.fix(x.dims[two])
        tail = call.new(call.shape[-1], f"made by {call.operation}")
    else:
        tail = call.same(x.dims[one], x.dims[two])
    others = [axis for axis in range(len(x.dims)) if axis not in (one, two)]
    return (*(x.dims[axis] for axis in others), tail)
