"""The table of rules: how each operation of torch pairs the axes of its tensors.

A rule is right if permuting an axis in every operand where it occurs permutes it in the result, and nothing else. Products and
normalisations are in `_rules_layers`, indexing in `_rules_index`; here are the pointwise operations, reductions and views.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ._atoms import Dim
from ._tracer import NOWHERE, Constant, Origins, Rule, RuleCall, Traced, rule

CHUNK = "the index of a chunk"


def keep_points(function: Rule) -> Rule:
    """Mark a rule that knows what to do with tensors of indices; for all others the axis that they point into is fixed."""
    function.reads_points = True  # type: ignore[attr-defined]
    return function


def view_rule(function: Rule) -> Rule:
    """Mark the rule of an operation that returns entries of its operand as they are, in memory that may be shared."""
    function.views = True  # type: ignore[attr-defined]
    return keep_points(function)


def broadcast(call: RuleCall, operands: Sequence[Traced], shape: Sequence[int]) -> Traced:
    """Unify the axes of operands that torch aligns from the right, and return those of the result."""
    dims: list[Dim] = []
    origins: list[Origins] = []
    for back in range(len(shape), 0, -1):
        aligned = [each for each in operands if len(each.dims) >= back]
        dim: Dim = ()
        for each in aligned:
            if each.shape[-back] != 1:
                dim = call.same(dim, each.dims[-back]) if dim else each.dims[-back]
        dims.append(dim)
        origins.append(frozenset().union(*(each.origins[-back] for each in aligned)))
    return Traced(tuple(shape), tuple(dims), tuple(origins))


# ---------------------------------------------------------------------- pointwise


@rule(
    "pointwise", "aten::masked_fill", "aten::where", "aten::log_sigmoid_forward", "aten::copy", "aten::rrelu_with_noise"
)
def align_pointwise(call: RuleCall, *args: Any, **named: Any) -> Any:
    """Operands are aligned, entry by entry. Every operation with torch's tag `pointwise` has this rule."""
    operands = [each for each in (*args, *named.values()) if isinstance(each, Traced)]
    return [broadcast(call, operands, shape) for shape in call.shapes]


@rule(
    "aten::clone", "aten::detach", "aten::alias", "aten::_to_copy", "aten::contiguous", "aten::lift_fresh", "aten::lift"
)
@rule("aten::_conj", "aten::resolve_conj", "aten::resolve_neg", "aten::_neg_view", "aten::lift_fresh_copy")
@view_rule
def copy(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """The same entries in another tensor."""
    return x


@rule("aten::native_dropout", "aten::bernoulli", "aten::dropout", "aten::feature_dropout", "aten::alpha_dropout")
def drop(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Entries are dropped independently of their position."""
    return [x.dims, x.dims]


@rule("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax", "aten::softmax", "aten::log_softmax")
@rule("aten::_unsafe_masked_index_put_accumulate", "aten::renorm")
def normalize(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Entries of an axis are divided by a sum over it."""
    return x.dims


@rule("aten::_weight_norm_interface")
def weight_norm(call: RuleCall, v: Traced, g: Traced, dim: int = 0) -> Any:
    """Slices across an axis are scaled to the entries of g."""
    call.same(v.dims[dim], g.dims[dim])
    return [v, g.dims]


@rule("aten::glu")
def glu(call: RuleCall, x: Traced, dim: int = -1) -> Any:
    """The first half of an axis times the sigmoid of the second."""
    left, right = call.atoms.cut(x.dims[dim], x.shape[dim] // 2)
    call.same(left, right)
    return x.change(dim, left, x.shape[dim] // 2).dims


# ---------------------------------------------------------------------- reductions


@rule(
    "aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::logsumexp", "aten::linalg_vector_norm", "aten::prod"
)
@rule(
    "aten::any",
    "aten::all",
    "aten::nansum",
    "aten::count_nonzero",
    "aten::aminmax",
    "aten::median",
    "aten::max",
    "aten::min",
)
@rule("aten::var", "aten::std", "aten::var_mean", "aten::std_mean", "aten::norm", "aten::argmax", "aten::argmin")
@rule("aten::mode", "aten::kthvalue", "aten::nanmedian", "aten::nanmean")
def reduce(call: RuleCall, x: Traced, *args: Any, dim: Any = None, **named: Any) -> Any:
    """Axes are reduced, in any order of their entries; results that are indices point into the reduced axis."""
    if args and isinstance(args[0], Traced):  # `max(x, y)` is pointwise
        return [broadcast(call, (x, args[0]), call.shape)]
    axes = _find_reduced(call, x, args, dim)
    results: list[Any] = []
    for position, shape in enumerate(call.shapes):
        keeps = len(shape) == len(x.shape)
        traced = x.pick([None if axis in axes else axis for axis in range(len(x.dims)) if keeps or axis not in axes])
        points = _has_indices(call.operation, position) and len(axes) == 1
        results.append(dataclasses.replace(traced, points=x.dims[next(iter(axes))] if points else None))
        if _has_indices(call.operation, position) and len(axes) != 1:
            for axis in axes:
                call.fix(x.dims[axis])
    return results


def _has_indices(operation: str, position: int) -> bool:
    short = operation.split("::")[1]
    if short in ("argmax", "argmin"):
        return True
    return position == 1 and short in ("max", "min", "median", "nanmedian", "mode", "kthvalue", "topk", "sort")


def _find_reduced(call: RuleCall, x: Traced, args: Sequence[Any], dim: Any) -> set[int]:
    """Return the axes that a reduction reduces: its first argument that can be axes, in the schemas of aten."""
    short = call.operation.split("::")[1]
    if dim is None and args:
        dim = args[1] if short in ("linalg_vector_norm", "norm", "kthvalue") and len(args) > 1 else args[0]
        if short in ("linalg_vector_norm", "norm", "kthvalue") and len(args) < 2:
            dim = None
    if dim is None or dim == [] or (isinstance(dim, bool) and short in ("var", "std", "var_mean", "std_mean")):
        return set(range(len(x.dims)))
    return {axis % max(len(x.dims), 1) for axis in ([dim] if isinstance(dim, int) else dim)}


@rule("aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::cummax", "aten::cummin", "aten::flip", "aten::roll")
@rule("aten::unfold", "aten::diff")
def order(call: RuleCall, x: Traced, *args: Any, dim: Any = None, dims: Any = None, **named: Any) -> Any:
    """The order of entries along an axis matters."""
    axes = dim if dim is not None else dims if dims is not None else args[-1 if "roll" in call.operation else 0]
    for axis in [axes] if isinstance(axes, int) else axes:
        call.fix(x.dims[axis])
    return [_refresh(call, x, shape) for shape in call.shapes]


def _refresh(call: RuleCall, x: Traced, shape: Sequence[int]) -> tuple[Dim, ...]:
    """Return the axes of a result: those of the operand where the sizes agree, fixed ones elsewhere."""
    return tuple(
        x.dims[axis] if axis < len(x.dims) and x.shape[axis] == size else call.new(size, f"made by {call.operation}")
        for axis, size in enumerate(shape)
    )


@rule("aten::tril", "aten::triu")
def triangle(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Entries are zero by their position in the last two axes."""
    for dim in x.dims[-2:]:
        call.fix(dim)
    return x


# ---------------------------------------------------------------------- tensors from nothing


@rule(
    "aten::zeros", "aten::ones", "aten::full", "aten::empty", "aten::empty_like", "aten::zeros_like", "aten::ones_like"
)
@rule(
    "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty", "aten::scalar_tensor"
)
@rule("aten::empty_strided", "aten::new_empty_strided", "aten::_efficientzerotensor")
def make_constant(call: RuleCall, *args: Any, **named: Any) -> Any:
    """All entries are equal, so that any order is right."""
    dims = tuple(call.new(size) for size in call.shape)
    return Traced(call.shape, dims, (NOWHERE,) * len(dims), constant=Constant())


@rule("aten::fill", "aten::zero")
def overwrite(call: RuleCall, x: Traced, *args: Any) -> Any:
    """All entries become equal; the tensors that share the memory keep their axes."""
    return x.dims


@rule("aten::arange", "aten::linspace", "aten::eye", "aten::rand", "aten::randn", "aten::randint", "aten::rand_like")
@rule("aten::randn_like", "aten::randperm", "aten::normal", "aten::uniform", "aten::tril_indices", "aten::triu_indices")
@rule("aten::hann_window", "aten::randint_like", "aten::logspace", "aten::exponential", "aten::random")
def make_fixed(call: RuleCall, *args: Any, **named: Any) -> Any:
    """Entries depend on their position."""
    return [tuple(call.new(size, f"made by {call.operation}") for size in call.shape)]


# ---------------------------------------------------------------------- views


@rule("aten::t", "aten::numpy_T", "aten::mT")
@view_rule
def transpose_last(call: RuleCall, x: Traced) -> Any:
    """The axes in reverse."""
    return x.pick(reversed(range(len(x.dims))))


@rule("aten::transpose", "aten::swapaxes")
@view_rule
def transpose(call: RuleCall, x: Traced, first: int, second: int) -> Any:
    """Two axes exchanged."""
    axes = list(range(len(x.dims)))
    axes[first], axes[second] = axes[second], axes[first]
    return x.pick(axes)


@rule("aten::permute")
@view_rule
def permute(call: RuleCall, x: Traced, dims: Sequence[int]) -> Any:
    """The axes in another order."""
    return x.pick([axis % len(x.dims) for axis in dims])


@rule("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::view_copy")
@view_rule
def view(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Axes are split into factors and joined; a view in another dtype keeps them where it can."""
    if math.prod(call.shape) != math.prod(x.shape):
        return [_refresh(call, x, call.shape)]
    if 0 in x.shape:
        return [tuple(call.new(size) for size in call.shape)]
    dims = tuple(call.atoms.regroup(x.dims, call.shape))
    origins = _regroup_origins(x, call.shape)
    return dataclasses.replace(x, shape=call.shape, dims=dims, origins=origins)


def _regroup_origins(x: Traced, shape: Sequence[int]) -> tuple[Origins, ...]:
    """Return the origins of the axes of a view: those of the smallest run of axes that has the same number of entries."""
    olds = [(size, origins) for size, origins in zip(x.shape, x.origins, strict=True) if size != 1]
    results: list[Origins] = []
    run: list[int] = []  # positions of the axes of the view that the current run has
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
def expand(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Axes of size one get equal entries."""
    missing = len(call.shape) - len(x.dims)
    grown = x.pick([*[None] * missing, *range(len(x.dims))])
    dims = tuple(
        call.new(size) if have == 1 and size != 1 else dim
        for dim, have, size in zip(grown.dims, grown.shape, call.shape, strict=True)
    )
    return dataclasses.replace(grown, shape=call.shape, dims=dims)


@rule("aten::repeat", "aten::tile")
@view_rule
def repeat(call: RuleCall, x: Traced, repeats: Sequence[int], *args: Any, **named: Any) -> Any:
    """An axis becomes a product with an axis of equal entries."""
    grown = x.pick([*[None] * (len(repeats) - len(x.dims)), *range(len(x.dims))])
    dims = tuple((*call.new(times), *dim) for dim, times in zip(grown.dims, repeats, strict=True))
    return dataclasses.replace(grown, shape=call.shape, dims=dims)


@rule("aten::unsqueeze")
@view_rule
def unsqueeze(call: RuleCall, x: Traced, dim: int) -> Any:
    """A new axis of size one."""
    axes: list[int | None] = list(range(len(x.dims)))
    axes.insert(dim % (len(axes) + 1), None)
    return x.pick(axes)


@rule("aten::squeeze")
@view_rule
def squeeze(call: RuleCall, x: Traced, dim: Any = None) -> Any:
    """Axes of size one are left out."""
    wanted = range(len(x.dims)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis % max(len(x.dims), 1) for axis in wanted}
    return x.pick([axis for axis, size in enumerate(x.shape) if axis not in gone or size != 1])


@rule("aten::cat", "aten::concat")
@keep_points
def cat(call: RuleCall, tensors: Sequence[Traced], dim: int = 0) -> Any:
    """An axis becomes segments; the others are the same."""
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
def stack(call: RuleCall, tensors: Sequence[Traced], dim: int = 0) -> Any:
    """A new axis, of which each tensor is an entry."""
    return cat(call, [unsqueeze(call, each, dim) for each in tensors], dim)


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
def split(call: RuleCall, x: Traced, size: Any, dim: int = 0) -> Any:
    """An axis is cut into segments."""
    dim %= len(x.dims)
    return _cut(call, x, dim, [shape[dim] for shape in call.shapes])


@rule("aten::unbind")
@view_rule
def unbind(call: RuleCall, x: Traced, dim: int = 0) -> Any:
    """Entries of an axis are told apart."""
    return [select(call, x, dim, 0)] * len(call.shapes)


@rule("aten::select")
@view_rule
def select(call: RuleCall, x: Traced, dim: int, index: Any) -> Any:
    """One entry of an axis is chosen by its position."""
    dim %= len(x.dims)
    call.fix(x.dims[dim], CHUNK)
    return x.pick([axis for axis in range(len(x.dims)) if axis != dim])


@rule("aten::slice")
@view_rule
def slice_(
    call: RuleCall, x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """A segment of an axis, or every n-th entry of it."""
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
def pad(call: RuleCall, x: Traced, pad: Sequence[int], value: Any = 0) -> Any:
    """Axes get segments of equal entries before and after them."""
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
def view_complex(call: RuleCall, x: Traced) -> Any:
    """Complex numbers as pairs, and back."""
    if len(call.shape) < len(x.shape):
        call.fix(x.dims[-1], "the parts of a complex number")
        return x.pick(range(len(x.dims) - 1))
    pairs = x.pick([*range(len(x.dims)), None])
    return pairs.change(len(x.dims), call.new(2, "the parts of a complex number"), 2)


@rule("aten::diagonal")
def diagonal(call: RuleCall, x: Traced, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Entries with equal positions on two axes."""
    one, two = dim1 % len(x.dims), dim2 % len(x.dims)
    if offset or x.shape[one] != x.shape[two]:
        call.fix(x.dims[one])
        call.fix(x.dims[two])
        tail = call.new(call.shape[-1], f"made by {call.operation}")
    else:
        tail = call.same(x.dims[one], x.dims[two])
    kept_axes = [axis for axis in range(len(x.dims)) if axis not in (one, two)]
    return (*(x.dims[axis] for axis in kept_axes), tail)
