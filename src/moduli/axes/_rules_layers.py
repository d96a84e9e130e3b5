"""Rules of products, convolutions, normalisations, attention and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._atoms import Dim
from ._rules import broadcast
from ._tracer import RuleCall, Traced, rule

KERNEL = "positions of a kernel"

# ---------------------------------------------------------------------- products


@rule("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", "aten::matmul")
def _multiply(call: RuleCall, x: Traced, y: Traced, *args: Any, **named: Any) -> Any:
    """Contract the last axis of the first operand with the last but one of the second; axes before these are a batch."""
    right = max(len(y.dims) - 2, 0)
    call.contract(x, -1, y, right)
    batch = []
    for axis in range(max(len(x.dims) - 2, 0) if len(y.dims) > 2 else 0):
        batch.append(call.same(x.dims[axis], y.dims[axis]))
        _note_batch(call, x, y, axis)
    lead = len(batch)
    if y.varies:
        call.use_rest(x, *range(lead), len(x.dims) - 1)
    if x.varies:
        call.use_rest(y, *range(lead), right)
    rows = x.pick(range(lead, len(x.dims) - 1))
    columns = y.pick([axis for axis in range(lead, len(y.dims)) if axis != right])
    dims = (*batch, *rows.dims, *columns.dims)
    origins = (*(x.origins[axis] | y.origins[axis] for axis in range(lead)), *rows.origins, *columns.origins)
    return Traced(call.shape, dims, origins)


def _note_batch(call: RuleCall, x: Traced, y: Traced, axis: int) -> None:
    if x.varies and y.varies:
        # In a product of activations, a batch axis that a layer makes is the axis of heads.
        call.atoms.hint(x.dims[axis], "head")
    for weight in (x, y):
        call.use(weight, axis, "batch")


@rule("aten::addmm", "aten::baddbmm", "aten::addmv", "aten::_addmm_activation")
def _multiply_add(call: RuleCall, bias: Traced, x: Traced, y: Traced, *args: Any, **named: Any) -> Any:
    """Return the axes of a product plus a tensor."""
    product = _multiply(call, x, y)
    return broadcast(call, (product, bias), call.shape)


@rule("aten::linear", "aten::mkldnn_linear")
def _linear(call: RuleCall, x: Traced, weight: Traced, bias: Traced | None = None) -> Any:
    """Contract the last axis of the input with that of the weight."""
    call.contract(x, -1, weight, -1)
    call.use_rest(weight, len(weight.dims) - 1)
    if bias is not None and weight.dims:
        call.same(bias.dims[0], weight.dims[0])
    return (*x.dims[:-1], *weight.dims[:-1])


@rule("aten::_trilinear")
def _trilinear(
    call: RuleCall,
    first: Traced,
    second: Traced,
    third: Traced,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    *args: Any,
) -> Any:
    """Multiply three operands, each expanded by axes of size one, and sum over some axes, as in `nn.Bilinear`."""
    grown = []
    for operand, new in ((first, expand1), (second, expand2), (third, expand3)):
        axes: list[int | None] = list(range(len(operand.dims)))
        for position in new:
            axes.insert(position, None)
        grown.append(operand.pick(axes))
    rank = len(grown[0].dims)
    shape = [max(each.shape[axis] for each in grown) for axis in range(rank)]
    whole = broadcast(call, grown, shape)
    for weight in grown:
        for axis in range(rank):
            call.use(weight, axis, "in" if axis in sumdim else "out")
    return whole.pick([axis for axis in range(rank) if axis not in sumdim])


# ---------------------------------------------------------------------- convolutions


@rule("aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::mkldnn_convolution")
def _convolution(
    call: RuleCall,
    x: Traced,
    weight: Traced,
    bias: Traced | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    *args: Any,
) -> Any:
    """Contract channels within groups; fix the positions of the kernel and of the image."""
    space = len(weight.dims) - 2
    channels = len(x.dims) - space - 1
    group, inner = call.atoms.regroup([x.dims[channels]], [groups, x.shape[channels] // groups])
    # A weight is (out, in / groups, kernel), transposed (in, out / groups, kernel).
    first, second = call.atoms.regroup([weight.dims[0]], [groups, weight.shape[0] // groups])
    call.same(group, first)
    source, target = (second, weight.dims[1]) if transposed else (weight.dims[1], second)
    call.same(inner, source)
    _note_convolution(call, weight, transposed, groups)
    result = (*first, *target)
    if bias is not None:
        call.same(bias.dims[0], result)
    plain = all(size == 1 for size in weight.shape[2:]) and x.shape[channels + 1 :] == call.shape[channels + 1 :]
    if plain and not any(padding) and not any(output_padding):
        return (*x.dims[:channels], result, *x.dims[channels + 1 :])
    for dim in (*weight.dims[2:], *x.dims[channels + 1 :]):
        call.fix(dim, KERNEL)
    return (*x.dims[:channels], result, *(call.new(size, KERNEL) for size in call.shape[channels + 1 :]))


def _note_convolution(call: RuleCall, weight: Traced, transposed: bool, groups: int) -> None:
    call.use(weight, 0, "in" if transposed else "out")
    call.use(weight, 1, "out" if transposed else "in")
    for axis in range(2, len(weight.dims)):
        call.use(weight, axis, "kernel")


@rule("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices", "aten::max_pool1d", "aten::max_pool2d")
@rule(
    "aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d"
)
@rule(
    "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::upsample_nearest1d", "aten::upsample_nearest2d"
)
@rule("aten::upsample_nearest3d", "aten::upsample_linear1d", "aten::upsample_bilinear2d", "aten::upsample_bicubic2d")
@rule(
    "aten::upsample_trilinear3d",
    "aten::_upsample_bilinear2d_aa",
    "aten::_upsample_bicubic2d_aa",
    "aten::reflection_pad1d",
)
@rule("aten::reflection_pad2d", "aten::replication_pad1d", "aten::replication_pad2d", "aten::reflection_pad3d")
@rule("aten::replication_pad3d", "aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::pixel_shuffle_space")
@rule(
    "aten::_upsample_nearest_exact2d",
    "aten::_upsample_nearest_exact1d",
    "aten::_adaptive_avg_pool1d",
    "aten::max_pool3d",
)
def _pool(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Return the same channels; fix the axes that change their size and those after them, which are positions of an image."""
    lead = next(
        (axis for axis, sizes in enumerate(zip(x.shape, call.shape, strict=False)) if sizes[0] != sizes[1]), None
    )
    space = _count_space(call.operation)
    lead = len(x.dims) - space if lead is None else min(lead, len(x.dims) - space)
    for dim in x.dims[lead:]:
        call.fix(dim, "positions of an image")
    for other in args:
        if isinstance(other, Traced):  # the positions to sample
            for dim in other.dims[1:]:
                call.fix(dim, "positions of an image")
    dims = (*x.dims[:lead], *(call.new(size, "positions of an image") for size in call.shape[lead:]))
    return [dims for _ in call.shapes]


def _count_space(operation: str) -> int:
    return next((int(digit) for digit in reversed(operation) if digit in "123"), 2)


@rule("aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::channel_shuffle")
def _shuffle(call: RuleCall, x: Traced, factor: int, *args: Any) -> Any:
    """Turn channels into positions or back, by their order."""
    channels = x.dims[-3]
    if call.operation == "aten::pixel_shuffle":
        head: Dim
        head, rest = call.atoms.regroup([channels], [call.shape[-3], factor * factor])
        call.fix(rest)
    elif call.operation == "aten::pixel_unshuffle":
        head = (*channels, *call.new(factor * factor, "positions of an image"))
    else:
        call.fix(channels)
        head = channels
    for dim in x.dims[-2:]:
        call.fix(dim, "positions of an image")
    return (*x.dims[:-3], head, *(call.new(size, "positions of an image") for size in call.shape[-2:]))


# ---------------------------------------------------------------------- normalisations


@rule("aten::native_layer_norm", "aten::layer_norm", "aten::_fused_rms_norm", "aten::rms_norm")
def _layer_norm(call: RuleCall, x: Traced, shape: Sequence[int], *weights: Any, **named: Any) -> Any:
    """Unify the last axes, which are normalised together, with those of the scale and shift."""
    for weight in (*weights, *named.values()):
        if isinstance(weight, Traced):
            for back in range(1, len(weight.dims) + 1):
                call.same(weight.dims[-back], x.dims[-back])
    lead = len(x.dims) - len(shape)
    statistics = (*x.dims[:lead], *((),) * len(shape))
    return [x.dims, statistics, statistics]


@rule("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")
@rule("aten::_native_batch_norm_legit_no_training", "aten::batch_norm", "aten::_batch_norm_with_update")
@rule("aten::_batch_norm_with_update_functional", "aten::_batch_norm_no_update", "aten::cudnn_batch_norm")
def _batch_norm(call: RuleCall, x: Traced, *weights: Any, **named: Any) -> Any:
    """Unify the axis of channels with those of the scale, the shift and the running statistics."""
    channels = x.dims[1] if len(x.dims) > 1 else x.dims[0]
    for weight in (*weights, *named.values()):
        if isinstance(weight, Traced) and weight.dims:
            call.same(weight.dims[0], channels)
    return [x.dims, *((channels,) if len(shape) == 1 and shape != (0,) else None for shape in call.shapes[1:])]


@rule("aten::native_group_norm", "aten::group_norm")
def _group_norm(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Split channels into groups, and unify them with the axes of the scale and shift."""
    weights = [each for each in args if isinstance(each, Traced)]
    groups = args[0] if call.operation == "aten::group_norm" else args[5]
    call.atoms.regroup([x.dims[1]], [groups, x.shape[1] // groups])
    for weight in weights:
        call.same(weight.dims[0], x.dims[1])
    return [x.dims]


# ---------------------------------------------------------------------- attention


@rule("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention")
@rule("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_attention_math")
@rule("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable")
@rule("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math_for_mps")
def _attention(call: RuleCall, query: Traced, key: Traced, value: Traced, *args: Any, **named: Any) -> Any:
    """Pair heads, contract the sizes of queries and keys; a key head may serve a group of query heads."""
    call.same(query.dims[-1], key.dims[-1])
    call.same(key.dims[-2], value.dims[-2])
    for axis in range(len(query.dims) - 2):
        _pair_heads(call, query, key, axis)
        _pair_heads(call, query, value, axis)
    scores = (*query.dims[:-1], key.dims[-2])
    for mask in (*args, *named.values()):
        if isinstance(mask, Traced):
            shape = (*query.shape[:-1], key.shape[-2])
            broadcast(call, (Traced(shape, scores, (frozenset(),) * len(shape)), mask), shape)
    if any(flag is True for flag in (*args, *(value for name, value in named.items() if name == "is_causal"))):
        call.fix(query.dims[-2], "the order of a causal mask")
        call.fix(key.dims[-2], "the order of a causal mask")
    return [(*query.dims[:-1], value.dims[-1])]


def _pair_heads(call: RuleCall, query: Traced, key: Traced, axis: int) -> None:
    heads, groups = query.shape[axis], key.shape[axis]
    if heads == groups:
        call.same(query.dims[axis], key.dims[axis])
    elif groups and heads % groups == 0:
        outer, _ = call.atoms.regroup([query.dims[axis]], [groups, heads // groups])
        call.same(outer, key.dims[axis])
    if axis == len(query.dims) - 3:
        call.atoms.hint(query.dims[axis], "head")
