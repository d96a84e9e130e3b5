"""The rule by which a population is evaluated: a function of shapes and layer types alone, so that runs can be repeated.

1. **loop**, one member after the other: where `torch.vmap` has no rule for a layer (recurrent ones, `EmbeddingBag`), or turned
   out to be unable to follow the model; where there is nothing to vectorise over; and where the activations of not even four
   members fit into the cache of a core, so that each operation is large enough.
2. **stacked**, one call on tensors that stand for those of all members: where all parameters belong to linear layers, and there
   are no buffers, hooks, dropout or attention. Members that are given the same batch share the product of the first layer.
3. **vmap**, everything else.

Attention is vectorised operation by operation where gradients are wanted and in training; else torch's fused operations are used.

For the last two, as many members are taken together as have activations that fit into the cache: vectorising saves the
overhead of each operation, but lets the activations of all members through memory at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

from moduli.labels import Tensor as LabelledTensor

from ._arguments import Call

FORMS = ("auto", "vmap", "loop", "chunked", "stacked")
# Layers that torch.vmap has no rule for.
_LOOPED = (nn.RNNBase, nn.EmbeddingBag)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# The second-level cache of one core, about.
_CACHE = 1 << 20
_FEWEST = 4
# How many rows a batch is taken to have when nothing tells.
_ROWS = 64
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class EvaluationPlan(NamedTuple):
    """How to evaluate.

    Attributes:
        form: `"stacked"`, `"vmap"` or `"loop"`.
        block: How many members at a time; 0 for all.
        reason: Why, as a sentence.
    """

    form: str
    block: int
    reason: str


class Kind(NamedTuple):
    """What the layers of a model allow.

    Attributes:
        looped: The first layer that cannot be vectorised, or None.
        not_plain: Why the model is not a plain network of linear layers, or None.
        width: The bytes of the widest activation of one row, going by the widest parameter.
    """

    looped: str | None
    not_plain: str | None
    width: int


def kind_of(template: nn.Module, layout: Any) -> Kind:
    """What the layers of a model allow."""
    width = max((max(entry.shape[:1], default=1) for entry in layout), default=1)
    size = max((entry.dtype.itemsize for entry in layout), default=4)
    looped = (_name(path, module) for path, module in template.named_modules() if isinstance(module, _LOOPED))
    return Kind(next(looped, None), _is_plain(template, layout), width * size)


def choose(kind: Kind, layout: Any, count: int, call: Call) -> EvaluationPlan:
    """Choose how to evaluate.

    Args:
        kind: What the layers allow, from `kind_of`.
        layout: The layout of a member.
        count: How many members.
        call: The function of a model that is evaluated, and its arguments.

    Raises:
        ValueError: If what is asked for is unknown, or impossible for this model.
    """
    form, chunk_size = call.vectorize, call.chunk_size
    if call.randomness not in ("different", "same", "error"):
        raise ValueError(f"randomness={call.randomness!r}; choose from different, same, error")
    if form not in FORMS:
        raise ValueError(f"vectorize={form!r}; choose from {', '.join(FORMS)}")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size is a positive number of members, not {chunk_size!r}")
    layer = kind.looped
    if layer is not None:
        if form not in ("auto", "loop"):
            raise ValueError(
                f"{layer} has no batching rule, so members are called one after the other: use vectorize='loop' or 'auto'"
            )
        return EvaluationPlan("loop", 0, f"loop: {layer} has no batching rule")
    if form == "loop":
        return EvaluationPlan("loop", 0, "loop: asked for")
    if count == 0 or not (len(layout) or layout.buffers):
        return EvaluationPlan("loop", 0, "loop: there is nothing to vectorise over")
    plain = kind.not_plain
    if form == "stacked" and plain is not None:
        raise ValueError(f"only networks of linear layers are evaluated stacked, and {plain}; use vectorize='auto'")
    rows = _count_rows(call)
    if form == "vmap":
        return _make_plan("vmap", count, chunk_size or count, "asked for")
    fitting = int(_CACHE // max(1, rows * kind.width))
    if form in ("auto", "stacked") and plain is None:
        return _make_plan("stacked", count, min(chunk_size or count, max(fitting, 8)), f"linear layers on {rows} rows")
    if form == "chunked":
        return _make_plan("vmap", count, chunk_size or max(fitting, _FEWEST), "asked for")
    if fitting < _FEWEST and chunk_size is None:
        return EvaluationPlan(
            "loop", 0, f"loop: the activations of {_FEWEST} members on {rows} rows do not fit into the cache"
        )
    return _make_plan("vmap", count, min(chunk_size or count, max(fitting, _FEWEST)), f"{rows} rows")


def _make_plan(form: str, count: int, block: int, why: str) -> EvaluationPlan:
    if block >= count:
        return EvaluationPlan(form, 0, f"{form}: all members at once; {why}")
    return EvaluationPlan(form, block, f"{form}: {block} members at a time; {why}")


def _name(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


def _is_plain(template: nn.Module, layout: Any) -> str | None:
    """Why a model is not a plain network of linear layers; None if it is one."""
    if layout.buffers:
        return f"{layout.buffers[0].name!r} is a buffer"
    if len(layout.groups) != 1 or not layout.groups[0].dtype.is_floating_point:
        return "its parameters differ in dtype or device"
    for path, module in template.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        kind = getattr(type(module), "_adopted", type(module))
        if (own and kind is not nn.Linear) or isinstance(module, (*_DROPOUTS, nn.MultiheadAttention)):
            return f"{path or 'the model'} is a {type(module).__name__}"
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{path or 'the model'} has hooks"
    return None


def _count_rows(call: Call) -> int:
    """How many rows the batch of one member has, going by the arguments."""
    found = []
    for leaf, dim in (*zip(call.leaves, call.dims, strict=True), *((each, None) for each in call.kwargs.values())):
        if isinstance(leaf, Tensor | LabelledTensor):
            shape = list(leaf.shape)
            if dim is not None:
                del shape[dim]
            found.append(math.prod(shape[:-1]))
    return max(found, default=_ROWS)
