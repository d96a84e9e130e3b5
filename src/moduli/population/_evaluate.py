"""Running a function of a model for every member: all at once, in chunks, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moduli._torch import pytree
from moduli.labels import Axes, drop_axis, put_in_front, wrap
from moduli.labels import Tensor as LabelledTensor
from moduli.particles import StructureError

from . import _stacked
from ._plan import Plan
from ._swap import Swap

__all__ = ["AXIS", "Arguments", "Results", "arguments", "evaluate"]

AXIS = "member"


class Arguments(NamedTuple):
    """The arguments of a call, flattened: which leaves differ from member to member, and along which dimension.

    There is no `spec` where the leaves are the arguments.
    """

    leaves: list[Any]
    spec: Any
    dims: list[int | None]
    kwargs: dict[str, Any]

    def rows(self, start: int, stop: int) -> list[Any]:
        """The leaves that differ, for some members."""
        made = []
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if dim is not None:
                made.append(_data(leaf).narrow(dim, start, stop - start))
        return made

    def filled(self, mapped: Sequence[Any], by_member: bool = True) -> tuple[Any, ...]:
        """The arguments of one call, with the leaves that differ put in."""
        if all(dim is None for dim in self.dims):
            return tuple(self.leaves if self.spec is None else pytree.tree_unflatten(self.leaves, self.spec))
        items = iter(mapped)
        made = []
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if dim is None:
                made.append(leaf)
                continue
            item = next(items)
            made.append(wrap(item, drop_axis(leaf._axes, dim)) if type(leaf) is LabelledTensor else item)
        return tuple(pytree.tree_unflatten(made, self.spec))


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any, count: int) -> Arguments:
    """Flatten the arguments of a call and check those that differ from member to member.

    Raises:
        StructureError: If one does not have `count` slices.
    """
    if in_dims is None and all(isinstance(each, Tensor) for each in args):
        return Arguments(list(args), None, [None] * len(args), kwargs)
    leaves, spec = pytree.tree_flatten(args, is_leaf=_is_labelled)
    if in_dims is None:
        return Arguments(leaves, spec, [None] * len(leaves), kwargs)
    per_argument = in_dims if isinstance(in_dims, tuple | list) else [in_dims] * len(args)
    if len(per_argument) != len(args):
        raise ValueError(f"in_dims has {len(per_argument)} items for {len(args)} arguments")
    dims: list[int | None] = []
    for position, (argument, dim) in enumerate(zip(args, per_argument, strict=True)):
        inside, _ = pytree.tree_flatten(argument, is_leaf=_is_labelled)
        for leaf in inside:
            if dim is None or not isinstance(leaf, Tensor | LabelledTensor):
                dims.append(None)
                continue
            shape = tuple(_data(leaf).shape)
            if not -len(shape) <= dim < len(shape):
                raise StructureError(
                    f"argument {position} has shape {shape}, which has no dimension {dim} for the members"
                )
            if shape[dim] != count:
                raise StructureError(
                    f"argument {position} has shape {shape}: dimension {dim} must be {count}, one slice per member; leave "
                    "in_dims out to give every member the whole of it"
                )
            dims.append(dim % len(shape))
    return Arguments(leaves, spec, dims, kwargs)


class Results:
    """What calls returned: tensors to be joined along the members, and the structure around them."""

    def __init__(self) -> None:
        self.spec: Any = None
        self.others: list[Any] = []
        self.axes: list[Axes | None] = []
        # Whether the output is one tensor and nothing else.
        self.lone = False

    def flat(self, output: Any) -> list[Tensor]:
        """The tensors of one output; the rest of it must be the same for all members."""
        if isinstance(output, Tensor) and self.spec is None:
            self.lone = True
            return [output]
        leaves, spec = pytree.tree_flatten(output, is_leaf=_is_labelled)
        others = [None if isinstance(leaf, Tensor | LabelledTensor) else leaf for leaf in leaves]
        axes = [leaf._axes if type(leaf) is LabelledTensor else None for leaf in leaves]
        if self.lone or (self.spec is not None and (spec != self.spec or not _equal(others, self.others))):
            raise TypeError(
                "members returned different things besides tensors; return tensors, which are stacked, or the same value "
                "for every member"
            )
        self.spec, self.others, self.axes = spec, others, axes
        self.places = [isinstance(leaf, Tensor | LabelledTensor) for leaf in leaves]
        return [_data(leaf) for leaf in leaves if isinstance(leaf, Tensor | LabelledTensor)]

    def joined(self, columns: list[Tensor]) -> Any:
        """The output with stacked tensors in it."""
        if self.lone:
            return columns[0]
        items = iter(columns)
        made = []
        for tensor, other, axes in zip(self.places, self.others, self.axes, strict=True):
            if not tensor:
                made.append(other)
                continue
            item = next(items)
            made.append(item if axes is None else wrap(item, put_in_front(axes, AXIS, None)))
        return pytree.tree_unflatten(made, self.spec)


def evaluate(
    swap: Swap,
    fn: Callable[..., Any],
    plan: Plan,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    args: Arguments,
    randomness: str,
    count: int,
    attentive: bool = True,
) -> Any:
    """Call `fn(model, *args, **kwargs)` for every member and stack what it returns.

    Args:
        swap: The model.
        fn: The function.
        plan: How: all at once, in chunks, or in a loop.
        parameters: One tensor of shape (N, *shape) per parameter.
        buffers: One tensor of shape (N, *shape) per buffer; what a call does to buffers is written there.
        args: The arguments.
        randomness: Whether random layers draw `"different"` numbers for each member, the `"same"`, or raise an `"error"`.
        count: How many members.
        attentive: Whether there may be attention in what is called.
    """
    # What a failed call did to the statistics of some members is taken back.
    kept = [buffer.clone() for buffer in buffers]
    try:
        with nullcontext() if plan.form == "stacked" or not attentive else _no_shortcuts():
            if plan.form == "loop" or count == 0:
                return _looped(swap, fn, parameters, buffers, args, randomness, count)
            run = _stacked.run if plan.form == "stacked" else _vmapped
            results = Results()
            columns: list[list[Tensor]] = []
            block = plan.block or count
            # Split and not sliced: the gradient of a slice is as large as the whole, that of a split is one concatenation.
            parts = (
                [list(parameters)]
                if block >= count
                else list(zip(*(torch.split(p, block) for p in parameters), strict=True))
            )
            for start, rows in zip(range(0, count, block), parts, strict=True):
                stop = min(count, start + block)
                kept_rows = [b[start:stop] for b in buffers]
                columns.append(run(swap, fn, list(rows), kept_rows, args, args.rows(start, stop), randomness, results))
            if len(columns) == 1:
                return results.joined(columns[0])
            return results.joined([torch.cat(parts) for parts in zip(*columns, strict=True)])
    except BaseException:
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
        raise


def _vmapped(
    swap: Swap,
    fn: Callable[..., Any],
    parameters: list[Tensor],
    buffers: list[Tensor],
    args: Arguments,
    mapped: list[Any],
    randomness: str,
    results: Results,
) -> list[Tensor]:
    changed: list[int] = []

    def one(own: tuple[Any, ...], kept: tuple[Any, ...], leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        before = swap.put(own, kept)
        try:
            output = results.flat(fn(swap.module, *args.filled(leaves), **args.kwargs))
            rebound = swap.rebound(kept)
        finally:
            swap.restore(before)
        changed[:] = list(rebound)
        return (*output, *rebound.values())

    # One flat list of tensors: torch takes structures apart and puts them together again several times.
    dims = tuple(dim for dim in args.dims if dim is not None)
    first, second = len(parameters), len(parameters) + len(buffers)

    def flat(*tensors: Any) -> tuple[Any, ...]:
        return one(tensors[:first], tensors[first:second], tensors[second:])

    made: tuple[Tensor, ...] = torch.vmap(flat, (0,) * second + dims, 0, randomness)(*parameters, *buffers, *mapped)
    outputs = len(made) - len(changed)
    _write(buffers, changed, made[outputs:])
    return list(made[:outputs])


def _write(buffers: Sequence[Tensor], places: list[int], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            if value.shape != buffers[place].shape:
                raise StructureError(
                    f"a call gave a buffer of shape {tuple(buffers[place].shape[1:])} the shape {tuple(value.shape[1:])}"
                )
            buffers[place].copy_(value)


def _looped(
    swap: Swap,
    fn: Callable[..., Any],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    args: Arguments,
    randomness: str,
    count: int,
) -> Any:
    """One member after the other."""
    results = Results()
    if count == 0:
        return _nothing(swap, fn, args, results)
    rows = [parameter.unbind(0) for parameter in parameters]
    kept = [buffer.unbind(0) for buffer in buffers]
    slices = [_data(x).unbind(dim) for x, dim in zip(args.leaves, args.dims, strict=True) if dim is not None]
    columns: list[list[Tensor]] = []
    start = torch.get_rng_state() if randomness != "different" else None
    for index in range(count):
        own, held = [row[index] for row in rows], [row[index] for row in kept]
        before = swap.put(own, held)
        try:
            output = results.flat(fn(swap.module, *args.filled([each[index] for each in slices]), **args.kwargs))
            rebound = swap.rebound(held)
        finally:
            swap.restore(before)
        _write(held, list(rebound), list(rebound.values()))
        columns.append(output)
        if start is not None:
            _repeat(start, randomness, index, count)
    try:
        return results.joined([torch.stack(parts) for parts in zip(*columns, strict=True)])
    except RuntimeError as error:
        shapes = {tuple(tuple(t.shape) for t in output) for output in columns}
        if len(shapes) > 1:
            raise StructureError(
                f"members returned tensors of different shapes, which cannot be stacked: {shapes}"
            ) from error
        raise


def _repeat(start: Tensor, randomness: str, index: int, count: int) -> None:
    """Put the state of torch's generator back, or object to its use."""
    if randomness == "same":
        if index < count - 1:
            torch.set_rng_state(start)
    elif not torch.equal(start, torch.get_rng_state()):
        raise RuntimeError('the model draws random numbers; say randomness="different" or randomness="same"')


def _nothing(swap: Swap, fn: Callable[..., Any], args: Arguments, results: Results) -> Any:
    """The output of no members: what one would return, with a leading dimension of 0."""
    state = torch.get_rng_state()
    kept = [(slots, name, slots[name]) for slots, name, _ in swap._buffers]
    for slots, name, held in kept:
        slots[name] = held.clone()
    mapped = []
    for leaf, dim in zip(args.leaves, args.dims, strict=True):
        if dim is not None:
            data = _data(leaf)
            mapped.append(data.new_zeros([size for d, size in enumerate(data.shape) if d != dim]))
    try:
        with torch.no_grad():
            output = results.flat(fn(swap.module, *args.filled(mapped), **args.kwargs))
    finally:
        for slots, name, held in kept:
            slots[name] = held
        torch.set_rng_state(state)
    return results.joined([value.new_empty((0, *value.shape)) for value in output])


@contextmanager
def _no_shortcuts() -> Iterator[None]:
    """Attention takes the form that can be vectorised and differentiated, as in training."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _is_labelled(value: Any) -> bool:
    return type(value) is LabelledTensor


def _data(value: Any) -> Tensor:
    return value._data if type(value) is LabelledTensor else value


def _equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(x is y or bool(x == y) for x, y in zip(ours, theirs, strict=True))
