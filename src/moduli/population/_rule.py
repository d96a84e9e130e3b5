"""The rule by which a population is evaluated: a function of shapes and layer types alone, so that runs can be repeated.

1. **loop**, one member after the other: where `torch.vmap` has no rule for a layer (recurrent ones, `EmbeddingBag`), or turned
   out to be unable to follow the model; where there is nothing to vectorise over; and where the activations of not even four
   members fit into the cache of a core, so that each operation is large enough.
2. **stacked**, one call on tensors that stand for those of all members: where all parameters belong to linear layers, and there
   are no buffers, hooks, dropout or attention. Members that are given the same batch share the product of the first layer.
3. **vmap**, everything else.

Attention is vectorised operation by operation where gradients are wanted, in training and on few rows; else torch's fused
operations are used.

For the last two, as many members are taken together as have activations that fit into the cache: vectorising saves the
overhead of each operation, but lets the activations of all members through memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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
# From how many rows on fused attention of one member after the other pays.
_FUSED_ROWS = 16
# How many rows a batch is taken to have when nothing tells.
_ROWS = 64
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class EvaluationPlan(NamedTuple):
    """How to evaluate.

    Attributes:
        form: `"stacked"`, `"vmap"` or `"loop"`.
        block: How many members at a time; 0 for all.
        reason: Why, as a sentence.
        fused_attention: Whether attention takes torch's fused operations where it can, which `torch.vmap` runs one member after
            the other: from a few rows on that is faster than to vectorise what they are made of.
    """

    form: str
    block: int
    reason: str
    fused_attention: bool = False


class Kind(NamedTuple):
    """What the layers of a model allow.

    Attributes:
        looped: The first layer that cannot be vectorised, or None.
        not_plain: Why the model is not a plain network of linear layers, or None.
        width: The bytes of the widest activation of one row, going by the widest parameter.
        attentive: Whether there may be attention in it: all but torch's other layers may use it.
    """

    looped: str | None
    not_plain: str | None
    width: int
    attentive: bool


def kind_of(template: nn.Module, layout: Any) -> Kind:
    """What the layers of a model allow."""
    width = max((max(entry.shape[:1], default=1) for entry in layout), default=1)
    size = max((entry.dtype.itemsize for entry in layout), default=4)
    attentive = not all(_is_known(module) for module in template.modules())
    return Kind(_unbatchable(template), _is_plain(template, layout), width * size, attentive)


def _is_known(module: nn.Module) -> bool:
    kind = getattr(type(module), "_adopted", type(module))
    home = kind.__module__
    attends = kind is nn.MultiheadAttention or home.endswith(".transformer")
    return home.startswith("torch.nn.modules.") and not attends


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
        return _make_plan("vmap", count, chunk_size or count, "asked for", rows)
    fitting = int(_CACHE // max(1, rows * kind.width))
    if form in ("auto", "stacked") and plain is None:
        return _make_plan("stacked", count, min(chunk_size or count, max(fitting, 8)), f"linear layers on {rows} rows")
    if form == "chunked":
        return _make_plan("vmap", count, chunk_size or max(fitting, _FEWEST), "asked for", rows)
    if fitting < _FEWEST and chunk_size is None:
        return EvaluationPlan(
            "loop", 0, f"loop: the activations of {_FEWEST} members on {rows} rows do not fit into the cache"
        )
    return _make_plan("vmap", count, min(chunk_size or count, max(fitting, _FEWEST)), f"{rows} rows", rows)


def _make_plan(form: str, count: int, block: int, why: str, rows: int = 0) -> EvaluationPlan:
    fused = rows >= _FUSED_ROWS
    if block >= count:
        return EvaluationPlan(form, 0, f"{form}: all members at once; {why}", fused)
    return EvaluationPlan(form, block, f"{form}: {block} members at a time; {why}", fused)


def _unbatchable(template: nn.Module) -> str | None:
    """The path and type of the first layer that cannot be vectorised, or None."""
    for path, module in template.named_modules():
        if isinstance(module, _LOOPED):
            return f"{path or 'the model'} ({_name(module)})"
    return None


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _is_plain(template: nn.Module, layout: Any) -> str | None:
    """Why a model is not a plain network of linear layers; None if it is one."""
    if layout.buffers:
        return f"{layout.buffers[0].name!r} is a buffer"
    if len(layout.groups) != 1 or not layout.groups[0].dtype.is_floating_point:
        return "its parameters differ in dtype or device"
    for path, module in template.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        kind = getattr(type(module), "_adopted", type(module))
        if own and kind is not nn.Linear:
            return f"{path or 'the model'} is a {_name(module)}"
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{path or 'the model'} has hooks"
        if isinstance(module, (*_DROPOUTS, nn.MultiheadAttention)):
            return f"{path or 'the model'} is a {_name(module)}"
    return None


def _count_rows(call: Call) -> int:
    """How many rows the batch of one member has, going by the arguments, or by what the function refers to."""
    found = [_count(leaf, dim) for leaf, dim in zip(call.leaves, call.dims, strict=True) if _is_tensor(leaf)]
    found += [_count(leaf, None) for leaf in call.kwargs.values() if _is_tensor(leaf)]
    if not found:
        found = [_count(tensor, None) for tensor in _find_captured(call.fn)]
    return max(found, default=_ROWS)


def _count(leaf: Any, dim: int | None) -> int:
    shape = list(leaf.shape)
    if dim is not None:
        del shape[dim]
    total = 1
    for size in shape[:-1]:
        total *= size
    return max(total, 1)


def _find_captured(fn: Any) -> Iterator[Any]:
    """The tensors that a function closes over or refers to by a global name."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    held = [cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell)]
    held += [fn.__globals__[name] for name in code.co_names if name in fn.__globals__]
    held += list(fn.__defaults__ or ())
    yield from (each for each in held if _is_tensor(each))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | LabelledTensor) and (
        not isinstance(value, Tensor) or value.layout is torch.strided
    )
