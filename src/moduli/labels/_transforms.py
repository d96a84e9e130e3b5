"""Labelled tensors as pytrees, under vmap over a named axis, and in the samples of a batch.

Transforms flatten tensors to leaves and unflatten other leaves, which may have another rank (one axis fewer inside of
`torch.vmap`, one more in its result) or may not be tensors. So unflattening checks nothing. If it is certain which axis was
mapped, the labels of the others stay; otherwise the axes become `UnfitAxes`, which raise at every use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._torch import batch_axis, mark_constant, pytree, register_collate, transform_level
from ._axes import Axes, UnfitAxes, cache_by_axes, intern_pairs, make_unnamed
from ._concat import stack
from ._gather import gather
from ._pairing import Check, Moves, check_sizes, pair_labels
from ._space import Space
from ._tensor import Tensor, as_tensor, wrap

_Context = tuple[Axes, tuple[int, ...], int]


# The level is known while a compiler traces, which can't look into the interpreter stack itself.
_level = mark_constant(transform_level)


def _flatten(t: Tensor) -> tuple[list[Any], _Context]:
    axes = t._axes.meant if isinstance(t._axes, UnfitAxes) else t._axes
    shape = tuple(t._data.shape) if isinstance(t._data, torch.Tensor) else ()
    return [t._data], (axes, shape, _level())


def _flatten_with_keys(t: Tensor) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(t)
    return [(pytree.GetAttrKey("data"), leaves[0])], context


def _unflatten(leaves: Iterable[Any], context: _Context) -> Any:
    (leaf,) = leaves
    axes, shape, level = context
    if isinstance(leaf, Tensor):
        return _derivative(leaf, axes)
    if isinstance(leaf, (dict, list, tuple)):
        # A Jacobian: the derivatives by all inputs, in place of the output.
        return pytree.tree_map(lambda each: _derivative(each, axes), leaf, is_leaf=_is_labelled)
    if not isinstance(leaf, torch.Tensor):
        return wrap(leaf, axes)
    return wrap(leaf, _fit_leaf_axes(leaf, axes, shape, level))


def _fit_leaf_axes(leaf: torch.Tensor, axes: Axes, shape: tuple[int, ...], level: int) -> Axes:
    """Return the axes of a leaf after unflattening."""
    if leaf.ndim == axes.ndim and all(
        own is None or own == size for own, size in zip(_sizes(axes), leaf.shape, strict=True)
    ):
        return axes
    if leaf.ndim == axes.ndim - 1:
        taken = _find_taken_axis(leaf, shape, level)
        if taken is not None and tuple(leaf.shape) == shape[:taken] + shape[taken + 1 :]:
            return axes.run(Axes.drop, taken)
    return UnfitAxes.of(axes)


def _find_taken_axis(leaf: torch.Tensor, shape: tuple[int, ...], level: int) -> int | None:
    """Return the axis that vmap took, or None if that is not certain."""
    if torch.compiler.is_compiling():  # compiled code can't read the batch level, so only sizes can decide
        fits = [i for i in range(len(shape)) if tuple(leaf.shape) == shape[:i] + shape[i + 1 :]]
        return fits[0] if len(fits) == 1 else None
    # A batch level that did not exist at flattening is that of the vmap that mapped this axis.
    return batch_axis(leaf, level)


def _derivative(inner: Any, outer: Axes) -> Any:
    """Return a Jacobian, unflattened with the axes of both the output and the input."""
    if not isinstance(inner, Tensor):
        if not isinstance(inner, torch.Tensor) or inner.ndim < outer.ndim:
            return inner
        inner = wrap(inner, make_unnamed(inner.ndim - outer.ndim))
    meant = inner._axes.meant if isinstance(inner._axes, UnfitAxes) else inner._axes
    if not isinstance(inner._data, torch.Tensor) or inner._data.ndim != outer.ndim + meant.ndim:
        return wrap(inner._data, UnfitAxes.of(outer))
    return wrap(inner._data, _join_axes(outer, meant))


@cache_by_axes
def _sizes(axes: Axes) -> tuple[int | None, ...]:
    return tuple(None if space is None else len(space) for space in axes.spaces)


@cache_by_axes
def _join_axes(axes: Axes, other: Axes) -> Axes:
    """Return two sets of axes; a name of both stays with the first, because names are distinct."""
    return intern_pairs([*axes.pairs(), *((None if n in axes.names else n, s) for n, s in other.pairs())])


pytree.register_pytree_node(
    Tensor,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="moduli.labels.Tensor",
)


# -- vmap over a named axis --------------------------------------------------------------------------------------------


def vmap(
    function: Callable[..., Any],
    over: str,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Vectorise a function over a named axis.

    Inside, the function sees every labelled argument without that axis; arguments that do not have it, and everything
    that is not a labelled tensor, are the same for all. Every tensor it returns has the axis in front, with its labels.

    Args:
        function: The function for one entry of the axis.
        over: The name of the axis.
        randomness: ``"error"``, ``"same"`` or ``"different"`` random numbers for the entries, as in `torch.vmap`.
        chunk_size: How many entries at a time; all at once by default.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: When called, if no argument has the axis, or two have different labels or sizes on it.

    Example:
        >>> import moduli as mo
        >>> x = mo.tensor([[1.0, 2.0], [3.0, 4.0]], batch=["p", "q"], feature=["a", "b"])
        >>> w = mo.tensor([1.0, 10.0], feature=["b", "a"])
        >>> mo.vmap(lambda row: mo.dot(row, w, over="feature"), over="batch")(x)
        Tensor(batch: p=12., q=34.)
    """

    def call_mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_labelled)
        places = [i for i, leaf in enumerate(leaves) if _is_labelled(leaf) and over in leaf._axes.names]
        if not places:
            raise ValueError(f"no argument has an axis named {over!r} to map over")
        space, checks, plans = _map_labels(leaves[places[0]]._axes, tuple(leaves[i]._axes for i in places[1:]), over)
        data = [leaves[i]._data for i in places]
        check_sizes(checks, data)
        data = [_apply_plan(each, plan) for each, plan in zip(data, plans, strict=True)]
        returned: list[tuple[Any, list[Axes]]] = []

        def one(*slices: torch.Tensor) -> list[Any]:
            filled = list(leaves)
            for place, part, plan in zip(places, slices, plans, strict=True):
                filled[place] = wrap(part, plan[1])
            called_args, called_kwargs = pytree.tree_unflatten(filled, spec)
            results, out_spec = pytree.tree_flatten(function(*called_args, **called_kwargs), is_leaf=_is_labelled)
            plain = [result._data if _is_labelled(result) else result for result in results]
            returned.append((out_spec, [as_tensor(result)._axes for result in results]))
            return plain

        results = torch.vmap(
            one, tuple(None if plan[3] else plan[0] for plan in plans), 0, randomness, chunk_size=chunk_size
        )(*data)
        out_spec, out_axes = returned[-1]
        labelled = [
            wrap(result, axes.run(Axes.insert, 0, (over, space))[1])
            for result, axes in zip(results, out_axes, strict=True)
        ]
        return pytree.tree_unflatten(labelled, out_spec)

    return call_mapped


def _apply_plan(data: torch.Tensor, plan: tuple[int, Axes, Moves, bool]) -> torch.Tensor:
    """Return an operand with its labels rearranged, and without the mapped axis if it is shared."""
    at, _, moves, shared = plan
    for axis, move in moves:
        data = gather(data, axis, move, 0.0)
    return data.squeeze(at) if shared else data


def _is_labelled(value: Any) -> bool:
    return isinstance(value, Tensor)


@cache_by_axes
def _map_labels(
    axes: Axes, others: tuple[Axes, ...], over: str
) -> tuple[Space | None, tuple[Check, ...], tuple[tuple[int, Axes, Moves, bool], ...]]:
    """Return the labels of the mapped axis, and for each operand its position, the remaining axes, and the moves.

    Operands that are BROADCAST along the axis are shared, unless all are.
    """
    operands = (axes, *others)
    places = [each.axis(over) for each in operands]
    ((_, space),), moves, checks = pair_labels(operands, [(over, list(enumerate(places)))], "exact")
    stretched = space is not None and space.broadcast
    plans = tuple(
        (at, each.drop(at), move, each.stretches(at) and not stretched)
        for at, each, move in zip(places, operands, moves, strict=True)
    )
    return space, checks, plans


# -- where torch looks for tensors ---------------------------------------------------------------------------------------


# DistributedDataParallel and both kinds of FSDP search lists, dictionaries and dataclasses for tensors, to register hooks for
# the backward pass. So a labelled tensor has the fields of a dataclass.
@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Parts:
    data: Any
    dims: Any


for _name in ("__dataclass_fields__", "__dataclass_params__"):
    setattr(Tensor, _name, getattr(_Parts, _name))


def collate(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """Stack the samples of a batch along a new first axis, as `default_collate` does with plain tensors."""
    return stack(batch)


register_collate(Tensor, collate)
