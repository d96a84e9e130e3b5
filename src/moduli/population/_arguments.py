"""What goes into the calls of all members and what comes out of them, flattened to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli._torch import pytree
from moduli.labels import Axes, drop_axis, put_in_front, wrap
from moduli.labels import Tensor as LabelledTensor
from moduli.particles import StructureError

AXIS = "member"


class Call(NamedTuple):
    """A function of a model, and its arguments, flattened.

    Attributes:
        fn: The function.
        leaves: The arguments.
        spec: The structure around them; None where the leaves are the arguments.
        dims: Along which dimension each differs from member to member.
        kwargs: More arguments, the same for all members.
        vectorize: In which form it is asked for.
        chunk_size: At most how many members at a time, if that was asked for.
        randomness: Whether random layers draw `"different"` numbers for each member, the `"same"`, or raise an `"error"`.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    dims: list[int | None]
    kwargs: dict[str, Any]
    vectorize: str = "auto"
    chunk_size: int | None = None
    randomness: str = "different"

    @property
    def shared(self) -> bool:
        """Whether every member is given the same."""
        return all(dim is None for dim in self.dims)

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """The leaves that differ, for some members, with the members in front."""
        return [
            read_data(leaf).narrow(dim, start, stop - start).movedim(dim, 0)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
            if dim is not None
        ]

    def run(self, module: nn.Module, mapped: Sequence[Any]) -> Any:
        """Call the function on a model, with the leaves that differ put in."""
        leaves = self.leaves
        if not self.shared:
            items = iter(mapped)
            leaves = [
                leaf if dim is None else _drop_label(next(items), leaf, dim)
                for leaf, dim in zip(leaves, self.dims, strict=True)
            ]
        args = leaves if self.spec is None else pytree.tree_unflatten(leaves, self.spec)
        return self.fn(module, *args, **self.kwargs)


def read_call(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], in_dims: Any, count: int, *how: Any) -> Call:
    """Flatten the arguments of a call and check those that differ from member to member.

    Args:
        fn: The function.
        args: The arguments.
        kwargs: More arguments, the same for all members.
        in_dims: The dimension along which arguments differ, or one (or None) for each.
        count: How many members there are.
        *how: The last fields of the call: its form, the size of chunks and the randomness.

    Raises:
        StructureError: If an argument does not have `count` slices.
    """
    if in_dims is None and all(isinstance(each, Tensor) for each in args):
        return Call(fn, list(args), None, [None] * len(args), kwargs, *how)
    leaves, spec = pytree.tree_flatten(args, is_leaf=_is_labelled)
    if in_dims is None:
        return Call(fn, leaves, spec, [None] * len(leaves), kwargs, *how)
    per_argument = in_dims if isinstance(in_dims, tuple | list) else [in_dims] * len(args)
    if len(per_argument) != len(args):
        raise ValueError(f"in_dims has {len(per_argument)} items for {len(args)} arguments")
    for dim in per_argument:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise TypeError(f"in_dims has {dim!r}; it is a dimension, or one (or None) for each argument")
    dims: list[int | None] = []
    for position, (argument, dim) in enumerate(zip(args, per_argument, strict=True)):
        inside, _ = pytree.tree_flatten(argument, is_leaf=_is_labelled)
        for leaf in inside:
            if dim is None or not isinstance(leaf, Tensor | LabelledTensor):
                dims.append(None)
                continue
            shape = tuple(read_data(leaf).shape)
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
    return Call(fn, leaves, spec, dims, kwargs, *how)


class Outputs:
    """What calls returned: tensors to be joined along the members, and the structure around them."""

    def __init__(self) -> None:
        self.spec: Any = None
        self.others: list[Any] = []
        self.axes: list[Axes | None] = []
        # Whether the output is one tensor and nothing else.
        self.lone = False

    def flatten(self, output: Any) -> list[Tensor]:
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
        return [read_data(leaf) for leaf in leaves if isinstance(leaf, Tensor | LabelledTensor)]

    def concatenate(self, blocks: list[list[Tensor]]) -> Any:
        """The output with the tensors of all members in it, from those of each block of them."""
        columns = blocks[0] if len(blocks) == 1 else [torch.cat(parts) for parts in zip(*blocks, strict=True)]
        return self.unflatten(columns)

    def unflatten(self, columns: list[Tensor]) -> Any:
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


def read_data(value: Any) -> Tensor:
    """The plain tensor of a labelled one."""
    return value._data if type(value) is LabelledTensor else value


def _drop_label(data: Any, like: Any, dim: int) -> Any:
    """The slice of one member of a labelled tensor, with the labels of the other dimensions."""
    return wrap(data, drop_axis(like._axes, dim)) if type(like) is LabelledTensor else data


def _is_labelled(value: Any) -> bool:
    return type(value) is LabelledTensor


def _equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(x is y or bool(x == y) for x, y in zip(ours, theirs, strict=True))
