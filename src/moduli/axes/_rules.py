"""Rules of pointwise operations and reductions: how each operation of torch pairs the axes of its tensors.

A rule is right if permuting an axis in every operand that has it permutes it in the result, and changes nothing else. Products
and normalisations are in `_rules_layers`, views in `_rules_views`, indexing in `_rules_index`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ._atoms import Dim
from ._tracer import NOWHERE, Constant, Origins, Rule, RuleCall, Traced, rule

CHUNK = "the index of a chunk"


def keep_points(function: Rule) -> Rule:
    """Mark a rule that handles tensors of indices; for other rules, the axis into which indices point is fixed."""
    function.reads_points = True  # type: ignore[attr-defined]
    return function


def view_rule(function: Rule) -> Rule:
    """Mark the rule of an operation that returns entries of its operand unmodified, in memory that may be shared."""
    function.views = True  # type: ignore[attr-defined]
    return keep_points(function)


def broadcast(call: RuleCall, operands: Sequence[Traced], shape: Sequence[int]) -> Traced:
    """Unify the axes of operands that torch broadcasts from the right, and return those of the result.

    Args:
        call: The operation.
        operands: The axes of the operands.
        shape: The shape of the result.
    """
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
    "pointwise",
    "aten::_prelu_kernel",
    "aten::masked_fill",
    "aten::where",
    "aten::log_sigmoid_forward",
    "aten::copy",
    "aten::rrelu_with_noise",
)
def _align_pointwise(call: RuleCall, *args: Any, **named: Any) -> Any:
    """Align the operands, entry by entry: the rule of every operation with torch's tag `pointwise`."""
    operands = [each for each in (*args, *named.values()) if isinstance(each, Traced)]
    return [broadcast(call, operands, shape) for shape in call.shapes]


@rule(
    "aten::clone", "aten::detach", "aten::alias", "aten::_to_copy", "aten::contiguous", "aten::lift_fresh", "aten::lift"
)
@rule("aten::_conj", "aten::resolve_conj", "aten::resolve_neg", "aten::_neg_view", "aten::lift_fresh_copy")
@view_rule
def _copy(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Return the same axes: the result has the same entries."""
    return x


@rule("aten::native_dropout", "aten::bernoulli", "aten::dropout", "aten::feature_dropout", "aten::alpha_dropout")
def _drop(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Return the same axes: entries are dropped independently of their position."""
    return [x.dims, x.dims]


@rule("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax", "aten::softmax", "aten::log_softmax")
@rule("aten::_unsafe_masked_index_put_accumulate", "aten::renorm")
def _normalize(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Return the same axes: entries are divided by a sum over an axis."""
    return x.dims


@rule("aten::_weight_norm_interface")
def _weight_norm(call: RuleCall, v: Traced, g: Traced, dim: int = 0) -> Any:
    """Unify the axis of the slices that are scaled with that of the scales `g`."""
    call.same(v.dims[dim], g.dims[dim])
    return [v, g.dims]


@rule("aten::glu")
def _glu(call: RuleCall, x: Traced, dim: int = -1) -> Any:
    """Unify the two halves of an axis, whose entries are multiplied."""
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
def _reduce(call: RuleCall, x: Traced, *args: Any, dim: Any = None, **named: Any) -> Any:
    """Drop the reduced axes, whose entries may be permuted; results that are indices point into the reduced axis."""
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
    """Return the reduced axes: the argument `dim`, or the first positional argument that is one in the schemas of aten."""
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
def _order(call: RuleCall, x: Traced, *args: Any, dim: Any = None, dims: Any = None, **named: Any) -> Any:
    """Fix the axes in which the order of entries matters."""
    axes = dim if dim is not None else dims if dims is not None else args[-1 if "roll" in call.operation else 0]
    for axis in [axes] if isinstance(axes, int) else axes:
        call.fix(x.dims[axis])
    return [refresh(call, x, shape) for shape in call.shapes]


def refresh(call: RuleCall, x: Traced, shape: Sequence[int]) -> tuple[Dim, ...]:
    """Return the axes of a result: those of the operand with the same sizes, and fixed ones for the others.

    Args:
        call: The operation.
        x: The axes of the operand.
        shape: The shape of the result.
    """
    return tuple(
        x.dims[axis] if axis < len(x.dims) and x.shape[axis] == size else call.new(size, f"made by {call.operation}")
        for axis, size in enumerate(shape)
    )


@rule("aten::tril", "aten::triu")
def _triangle(call: RuleCall, x: Traced, *args: Any, **named: Any) -> Any:
    """Fix the last two axes: entries are zero by their position."""
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
def _make_constant(call: RuleCall, *args: Any, **named: Any) -> Any:
    """Return new axes of a tensor with equal entries, which any permutation leaves unchanged."""
    dims = tuple(call.new(size) for size in call.shape)
    return Traced(call.shape, dims, (NOWHERE,) * len(dims), constant=Constant())


@rule("aten::fill", "aten::zero")
def _overwrite(call: RuleCall, x: Traced, *args: Any) -> Any:
    """Return the same axes: all entries become equal, and tensors that share the memory keep their axes."""
    return x.dims


@rule("aten::arange", "aten::linspace", "aten::eye", "aten::rand", "aten::randn", "aten::randint", "aten::rand_like")
@rule("aten::randn_like", "aten::randperm", "aten::normal", "aten::uniform", "aten::tril_indices", "aten::triu_indices")
@rule("aten::hann_window", "aten::randint_like", "aten::logspace", "aten::exponential", "aten::random")
def _make_fixed(call: RuleCall, *args: Any, **named: Any) -> Any:
    """Return new fixed axes: entries depend on their position."""
    return [tuple(call.new(size, f"made by {call.operation}") for size in call.shape)]
