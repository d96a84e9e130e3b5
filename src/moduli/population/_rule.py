"""The rule that chooses how a call of all members is evaluated, and its arguments and outputs, flattened to tensors.

The form is a function of shapes and layer types; how many members are taken together, and how products of stacked members are
computed, is measured (`_measured`):

1. **loop**, one member after the other: if `torch.vmap` has no rule for a layer (recurrent ones, `EmbeddingBag`) or failed on
   the model; if there is nothing to vectorise over; and if the activations of fewer than four members fit into the cache of a
   core, so that each operation is large enough.
2. **stacked**, one call on tensors that represent those of all members: if all parameters belong to linear layers, and there
   are no buffers, hooks, dropout or attention.
3. **sequence**, the same without the model's code: if the model is a sequence of such layers and activation functions that is
   called without gradients.
4. **vmap** otherwise.

Attention is vectorised operation by operation if gradients are recorded and in training; else torch's fused kernels are used.

Stacked members and vmap take blocks of members whose activations have the size that is measured to be fastest: vectorising
saves the overhead of each operation, but passes the activations of a whole block through memory at once. If gradients are
recorded, the activations of all members are stored in any case, and stacked members are evaluated in one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from moduli._torch import pytree
from moduli.labels import Axes, wrap
from moduli.labels import Tensor as LabelledTensor
from moduli.particles import StructureError

from ._measured import choose_block

FORMS = ("auto", "vmap", "loop", "chunked", "stacked")
# Layers that torch.vmap has no rule for.
_LOOPED = (nn.RNNBase, nn.EmbeddingBag)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FEWEST = 4
# The assumed number of rows of a batch if no argument is a tensor.
_ROWS = 64
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class EvaluationPlan(NamedTuple):
    """The form of an evaluation and the size of its blocks.

    Attributes:
        form: `"sequence"`, `"stacked"`, `"vmap"` or `"loop"`.
        block: The number of members at a time; 0 for all.
        reason: Why, as a sentence.
    """

    form: str
    block: int
    reason: str


class Kind(NamedTuple):
    """The properties of a model's layers that decide how it is evaluated.

    Attributes:
        looped: The first layer that cannot be vectorised, or None.
        not_plain: Why the model is not a plain network of linear layers, or None.
        width: The bytes of the widest activation of one row, estimated by the widest parameter.
    """

    looped: str | None
    not_plain: str | None
    width: int


def kind_of(template: nn.Module, layout: Any) -> Kind:
    """Return the properties of a model's layers that decide how it is evaluated."""
    width = max((max(entry.shape[:1], default=1) for entry in layout), default=1)
    size = max((entry.dtype.itemsize for entry in layout), default=4)
    return Kind(find_looped(template), _explain_not_plain(template, layout), width * size)


def find_looped(template: nn.Module) -> str | None:
    """Return the first layer that `torch.vmap` has no rule for, or None."""
    looped = ((path, type(layer).__name__) for path, layer in template.named_modules() if isinstance(layer, _LOOPED))
    return next((f"{path or 'the model'} ({kind})" for path, kind in looped), None)


def choose(kind: Kind, layout: Any, count: int, call: Call, recorded: bool = False) -> EvaluationPlan:
    """Choose how to evaluate.

    Args:
        kind: The properties of the layers, from `kind_of`.
        layout: The layout of a member.
        count: The number of members.
        call: The function of a model that is evaluated, and its arguments.
        recorded: Whether autograd records the whole call.

    Returns:
        The form, the size of blocks, and the reason.

    Raises:
        ValueError: If a setting of the call is unknown, or impossible for this model.
    """
    _check_settings(call, kind)
    form = call.vectorize
    if kind.looped is not None:
        return EvaluationPlan("loop", 0, f"loop: {kind.looped} has no batching rule")
    if form == "loop":
        return EvaluationPlan("loop", 0, "loop: asked for")
    if count == 0 or not (len(layout) or layout.buffers):
        return EvaluationPlan("loop", 0, "loop: there is nothing to vectorise over")
    if form == "stacked" and kind.not_plain is not None:
        raise ValueError(
            f"only networks of linear layers are evaluated stacked, and {kind.not_plain}; use vectorize='auto'"
        )
    if form == "vmap":
        return _make_plan("vmap", count, call.chunk_size or count, "asked for")
    return _choose_blocks(kind, layout, count, call, recorded)


def _check_settings(call: Call, kind: Kind) -> None:
    """Raise ValueError if a setting of a call is unknown, or the model can't be vectorised as requested."""
    form, chunk_size = call.vectorize, call.chunk_size
    if call.randomness not in ("different", "same", "error"):
        raise ValueError(f"randomness={call.randomness!r}; choose from different, same, error")
    if form not in FORMS:
        raise ValueError(f"vectorize={form!r}; choose from {', '.join(FORMS)}")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size is a positive number of members, not {chunk_size!r}")
    if kind.looped is not None and form not in ("auto", "loop"):
        raise ValueError(
            f"{kind.looped} has no batching rule, so members are called one after the other: use vectorize='loop' or 'auto'"
        )


def _choose_blocks(kind: Kind, layout: Any, count: int, call: Call, recorded: bool) -> EvaluationPlan:
    """Return the plan of a call by stacking or vmap, with blocks whose activations have the fastest size."""
    form, chunk_size, rows = call.vectorize, call.chunk_size, _count_rows(call)
    stacked = form in ("auto", "stacked") and kind.not_plain is None
    if stacked and recorded:
        return _make_plan(
            "stacked", count, chunk_size or count, f"linear layers on {rows} rows, gradients are recorded"
        )
    fitting = choose_block(rows * kind.width, max(1, len(layout) // 2), count)
    if stacked:
        return _make_plan("stacked", count, min(chunk_size or count, fitting), f"linear layers on {rows} rows")
    if form == "chunked":
        return _make_plan("vmap", count, chunk_size or max(fitting, _FEWEST), "asked for")
    if fitting < min(_FEWEST, count) and chunk_size is None:
        return EvaluationPlan(
            "loop", 0, f"loop: the activations of {_FEWEST} members on {rows} rows do not fit into the cache"
        )
    return _make_plan("vmap", count, min(chunk_size or count, max(fitting, _FEWEST)), f"{rows} rows")


def _make_plan(form: str, count: int, block: int, why: str) -> EvaluationPlan:
    if block >= count:
        return EvaluationPlan(form, 0, f"{form}: all members at once; {why}")
    return EvaluationPlan(form, block, f"{form}: {block} members at a time; {why}")


def _explain_not_plain(template: nn.Module, layout: Any) -> str | None:
    """Return why a model is not a plain network of linear layers; None if it is one."""
    if layout.buffers:
        return f"{layout.buffers[0].name!r} is a buffer"
    if len(layout.groups) != 1 or not layout.groups[0].dtype.is_floating_point:
        return "its parameters differ in dtype or device"
    for path, module in template.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        kind = getattr(type(module), "_adopted", type(module))
        if (own and kind is not nn.Linear) or isinstance(module, (*_DROPOUTS, nn.MultiheadAttention)):
            return f"{path or 'the model'} is a {type(module).__name__}"
        if _has_hooks_itself(module):
            return f"{path or 'the model'} has hooks"
    return None


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a call of a model calls hooks of one of its modules."""
    return any(map(_has_hooks_itself, modules))


def _has_hooks_itself(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _count_rows(call: Call) -> int:
    """Return the number of rows in the batch of one member, by the shapes of the arguments."""
    counts = []
    for leaf, dim in (*zip(call.leaves, call.dims, strict=True), *((each, None) for each in call.kwargs.values())):
        if isinstance(leaf, Tensor | LabelledTensor):
            shape = list(leaf.shape)
            if dim is not None:
                del shape[dim]
            counts.append(math.prod(shape[:-1]))
    return max(counts, default=_ROWS)


# -- arguments and outputs -----------------------------------------------------------------------------------------------

AXIS = "member"


class Call(NamedTuple):
    """A function of a model, and its arguments, flattened.

    Attributes:
        fn: The function.
        leaves: The arguments.
        spec: The tree structure of the arguments.
        dims: The dimension along which each leaf has slices of members; None for shared ones.
        kwargs: More arguments, the same for all members.
        vectorize: The requested form.
        chunk_size: The most members at a time, or None.
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

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """Return the leaves that differ between members, for members `start` to `stop`, with the members in front."""
        return [
            read_data(leaf).narrow(dim, start, stop - start).movedim(dim, 0)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
            if dim is not None
        ]

    def run(self, module: nn.Module, mapped: Sequence[Any]) -> Any:
        """Call the function on a model, with `mapped` in place of the leaves that differ between members."""
        items = iter(mapped)
        leaves = [
            leaf if dim is None else _drop_label(next(items), leaf, dim)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return self.fn(module, *pytree.tree_unflatten(leaves, self.spec), **self.kwargs)


def read_call(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], in_dims: Any, count: int, *how: Any) -> Call:
    """Flatten the arguments of a call and check those that differ between members.

    Args:
        fn: The function.
        args: The arguments.
        kwargs: More arguments, the same for all members.
        in_dims: The dimension along which arguments differ, or one (or None) for each.
        count: The number of members.
        *how: The last fields of the call: its form, the size of chunks and the randomness.

    Returns:
        The call.

    Raises:
        StructureError: If an argument does not have `count` slices.
    """
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
    """The tree structure of a function's outputs, which flattens them to tensors and restores it around stacked ones."""

    def __init__(self) -> None:
        self.spec: Any = None
        # For each leaf: its axes if it is labelled, `Tensor` if it is a plain tensor, else the leaf itself.
        self.rest: list[Any] = []

    def flatten(self, output: Any) -> list[Tensor]:
        """Return the tensors of one output; raise TypeError if the other leaves differ between members."""
        leaves, spec = pytree.tree_flatten(output, is_leaf=_is_labelled)
        rest = [leaf._axes if _is_labelled(leaf) else Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if self.spec is not None and (
            spec != self.spec or any(x is not y and not bool(x == y) for x, y in zip(rest, self.rest, strict=True))
        ):
            raise TypeError(
                "members returned different things besides tensors; return tensors, which are stacked, or the same value "
                "for every member"
            )
        self.spec, self.rest = spec, rest
        return [read_data(leaf) for leaf in leaves if isinstance(leaf, Tensor | LabelledTensor)]

    def unflatten(self, columns: Sequence[Tensor]) -> Any:
        """Return the output with stacked tensors in place of its tensors."""
        items = iter(columns)
        leaves: list[Any] = []
        for each in self.rest:
            if each is Tensor:
                leaves.append(next(items))
            elif isinstance(each, Axes):
                leaves.append(wrap(next(items), each.run(Axes.insert, 0, (AXIS, None))[1]))
            else:
                leaves.append(each)
        return pytree.tree_unflatten(leaves, self.spec)


def read_data(value: Any) -> Tensor:
    """Return the plain tensor of a labelled one; other values unmodified."""
    return value._data if type(value) is LabelledTensor else value


def _drop_label(data: Any, like: Any, dim: int) -> Any:
    """Return the slice of one member with the labels of the other dimensions, if the whole tensor is labelled."""
    return wrap(data, like._axes.run(Axes.drop, dim)) if type(like) is LabelledTensor else data


def _is_labelled(value: Any) -> bool:
    return type(value) is LabelledTensor
