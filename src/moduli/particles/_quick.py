"""The short way: sums, differences and multiples of ordinary models, without looking at every name in them.

Most operands are results that nobody looked into, or models in which nothing has changed since the last operation. The
latter is seen by a few comparisons of whole lists, which Python makes by identity: of the registries with copies of them, and
of every module's attributes with a copy of those. Whatever does not fit goes the long way, with the same result.
"""

from __future__ import annotations

import operator
from array import array
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from moduli.kernels._backend import native
from moduli.kernels._runtime import Runtime
from moduli.kernels._watch import Watch, watch

from . import _pass, _pool
from ._pool import Slab
from ._record import Lazy, Record, Unborn
from ._template import LAZY, RECORD, Memory, Template, Walk

__all__ = ["Quick", "multiple", "quicken", "total"]

_STATE = attrgetter("__dict__")
_OWNED = attrgetter("_parameters", "_modules")
_POINTER = Tensor.data_ptr
_IDLE = ("_buffers", "_non_persistent_buffers_set")
_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatchers = torch._C._len_torch_dispatch_stack
_set_grad = torch._C._set_grad_enabled
_SMALL = 1 << 19
_MANY = 24


class Quick:
    """Copies of what a model consists of, to compare it with. They refer to what is below the root, never to the root."""

    __slots__ = (
        "childless",
        "children",
        "children_before",
        "fixed",
        "flags",
        "flats",
        "get",
        "idle",
        "located",
        "modules",
        "owned",
        "parameters",
        "parameters_before",
        "pointers",
        "runtime",
        "size",
        "slab",
        "states",
        "tensors",
        "top",
        "values",
        "watch",
    )  # fmt: skip

    children: list[dict[str, Any]]
    children_before: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    parameters_before: list[dict[str, Any]]
    modules: list[nn.Module]
    states: list[dict[str, Any]]
    owned: list[tuple[Any, Any]]
    idle: tuple[Any, ...]
    childless: tuple[Any, ...]
    top: Any
    get: Any
    values: Any
    size: int
    tensors: list[Tensor]
    watch: Watch
    fixed: list[Tensor]
    pointers: list[int]
    runtime: Any
    located: Any
    flats: list[Tensor]
    slab: Slab | None
    flags: tuple[bool, ...]


def quicken(module: nn.Module, record: Record, memory: Memory, live: Walk, tensors: list[Tensor]) -> None:
    """Remember a model for the short way, if it is an ordinary one."""
    template = memory.template
    if not template.quick or not all(map(Tensor.is_contiguous, tensors)):
        return
    # Tensors of one element compare by value, so that others of the same value would be taken for them.
    if any(tensor.numel() < 2 for tensor in tensors):
        return
    distinct = list({id(each): each for each in live.modules if each is not None}.values())
    quick = Quick()
    quick.modules = distinct[1:]
    quick.states = [dict(each.__dict__) for each in quick.modules]
    quick.owned = list(map(_OWNED, quick.modules))
    quick.children = [each._modules for each in distinct if each._modules]
    quick.children_before = [dict(held) for held in quick.children]
    quick.parameters = [each._parameters for each in distinct]
    quick.parameters_before = [dict(held) for held in quick.parameters]
    keys = [key for key in module.__dict__ if key != RECORD]
    quick.get = itemgetter(*keys)
    quick.values = quick.get(module.__dict__)
    quick.size = len(module.__dict__)
    hooks = [key for key in nn.Module().__dict__ if key.endswith(("_hooks", "_hooks_with_kwargs", "_always_called"))]
    idle = [each.__dict__[key] for each in distinct for key in (*_IDLE, *hooks)]
    quick.idle = tuple(idle)
    quick.childless = tuple(each._modules for each in distinct if not each._modules)
    quick.top = module._modules
    quick.tensors = tensors
    quick.watch = watch(tensors)
    # Views and vectors hold while the addresses do; large parameters are read where they are.
    fixed = record.slab is not None or bool(record.flats)
    quick.fixed = tensors if fixed else []
    quick.pointers = record.pointers if fixed else []
    quick.runtime = native() if len(quick.fixed) >= _MANY else None
    quick.located = array("Q", quick.pointers) if isinstance(quick.runtime, Runtime) else None
    quick.flats = record.flats
    quick.slab = record.slab
    quick.flags = tuple(tensor.requires_grad for tensor in tensors)
    record.quick = quick


def _holds(quick: Quick, module: nn.Module, attributes: bool = True) -> bool:
    """Whether a model is what it was; without `attributes`, whether its values are where they were."""
    own = module.__dict__
    try:
        if attributes and (len(own) != quick.size or quick.get(own) != quick.values or any(quick.idle)):
            return False
        return (
            quick.children == quick.children_before
            and quick.parameters == quick.parameters_before
            and own["_parameters"] is quick.parameters[0]
            and own["_modules"] is quick.top
            and not any(quick.childless)
            and (
                list(map(_STATE, quick.modules)) == quick.states
                if attributes
                else list(map(_OWNED, quick.modules)) == quick.owned
            )
            and quick.watch.same(quick.tensors)
            and _in_place(quick)
        )
    except (KeyError, RuntimeError, ValueError, TypeError):
        # Something became a tensor or an array, whose comparison is no truth value.
        return False


def _in_place(quick: Quick) -> bool:
    """Whether the values are at the addresses where they were."""
    if quick.located is None:
        return list(map(_POINTER, quick.fixed)) == quick.pointers
    # In one call for all; it relies on the tensors having been looked at before.
    moved, _ = quick.runtime.pointers([quick.fixed], len(quick.fixed), quick.located)
    return not moved


def _ready(template: Template, version: Any) -> bool:
    """Whether results of a particle can be made the short way: nothing to follow, nothing configured."""
    if type(version) is Unborn:
        return (
            template.quick
            and not version.species.configured
            and (version.version is None or version.version.next_version is None)
        )
    return template.quick and version.next_version is None and not version.data.species.configured


def _made(
    template: Template, memory: Memory | None, version: Any, slab: Slab, flags: tuple[bool, ...], scale: float
) -> nn.Module:
    shell: nn.Module = object.__new__(template.nodes[0].kind)
    lazy = Lazy(template, memory, slab, flags, [], version)
    lazy.scale = scale
    state = shell.__dict__
    state.update(template.nodes[0].attributes)
    state[LAZY] = lazy
    return shell


def total(fn: Any, left: nn.Module, right: nn.Module, spare: bool = False) -> nn.Module | None:
    """The sum or difference of two particles; None if the long way must be taken.

    Args:
        fn: Which of the two.
        left: The one particle.
        right: The other one.
        spare: Whether nobody can read the other one after the operation, so that the result may be written over it.
    """
    if _interpreter() is not None or _dispatchers() or torch.is_inference_mode_enabled():
        return None
    x, y = left.__dict__.get(LAZY), right.__dict__.get(LAZY)
    a: Any = None
    b: Any = None
    if x is None:
        a = left.__dict__.get(RECORD)
        if a is None or a.quick is None or a.memory is None or a.wrapped or not _holds(a.quick, left):
            return None
        template, memory, version, flags = a.memory.template, a.memory, a.version, a.quick.flags
    else:
        template, memory, version, flags = x.template, x.memory, x.version, x.flags
    if not _ready(template, version):
        return None
    if y is None:
        b = right.__dict__.get(RECORD)
        if b is None or b.quick is None or b.memory is None or b.wrapped or not _holds(b.quick, right, False):
            return None
        other, theirs = b.memory.template, b.version
    else:
        other, theirs = y.template, y.version
    if other.layout is not template.layout or not _ready(other, theirs):
        return None
    sign = 1.0 if fn is operator.add else -1.0
    group = template.layout.groups[0]
    p = x.slab.vectors[0] if x is not None else a.quick.slab.vectors[0] if a.quick.slab is not None else None
    q = y.slab.vectors[0] if y is not None else b.quick.slab.vectors[0] if b.quick.slab is not None else None
    s = x.scale if x is not None else 1.0
    t = sign * y.scale if y is not None else sign
    large = group.numel * group.dtype.itemsize > _SMALL
    slab: Slab | None = None
    out: Any
    before = torch.is_grad_enabled()
    _set_grad(False)
    try:
        if large:
            if spare and y is not None and y.slab.users == 1:
                slab, out = y.slab, q
            else:
                out = _pool.take(group)
            vector = _large(template, a, b, p, q, s, t, out)
        elif p is None:
            vector = torch.cat(a.quick.flats)
            other_vector = torch.cat(b.quick.flats) if q is None else q
            if t == 1.0:
                vector.add_(other_vector)
            elif t == -1.0:
                vector.sub_(other_vector)
            else:
                vector.add_(other_vector, alpha=t)
        elif q is None:
            vector = torch.cat(b.quick.flats)
            if t != 1.0:
                vector.neg_()
            vector.add_(p, alpha=s)
        elif s == 1.0:
            vector = torch.add(p, q) if t == 1.0 else torch.add(p, q, alpha=t)
        elif t == 1.0:
            vector = torch.add(q, p, alpha=s)
        else:
            vector = torch.mul(p, s).add_(q, alpha=t)
    finally:
        _set_grad(before)
    return _made(template, memory, version, slab or Slab([vector], large), flags, 1.0)


def _large(template: Template, a: Any, b: Any, p: Any, q: Any, s: float, t: float, out: Any) -> Any:
    """The sum s p + t q in one pass over memory, into `out`, which may be q itself."""
    if p is not None and q is not None:
        if s == 1.0:
            return torch.add(p, q, alpha=t, out=out)
        if t == 1.0:
            return torch.add(q, p, alpha=s, out=out)
        if out is not q:
            return torch.mul(p, s, out=out).add_(q, alpha=t)
        return out.mul_(t).add_(p, alpha=s)
    sizes = [entry.numel for entry in template.layout.entries]
    first = list(a.quick.tensors) if p is None else list(torch.split(p, sizes))
    if q is not None and out is q:
        _pass.BLEND_OVER(first, list(torch.split(q, sizes)), s, t)
    else:
        _pass.BLEND(first, list(b.quick.tensors) if q is None else list(torch.split(q, sizes)), s, t, out=out)
    return out


def multiple(module: nn.Module, number: float) -> nn.Module | None:
    """A particle times a number; None if the long way must be taken."""
    if _interpreter() is not None or _dispatchers() or torch.is_inference_mode_enabled():
        return None
    x = module.__dict__.get(LAZY)
    if x is not None:
        if not _ready(x.template, x.version):
            return None
        # The values stay where they are; the number is multiplied in when they are needed.
        return _made(x.template, x.memory, x.version, x.slab, x.flags, x.scale * number)
    a = module.__dict__.get(RECORD)
    if a is None or a.quick is None or a.memory is None or a.wrapped or not _ready(a.memory.template, a.version):
        return None
    quick = a.quick
    if (quick.slab is None and not quick.flats) or not _holds(quick, module):
        return None
    before = torch.is_grad_enabled()
    _set_grad(False)
    try:
        if quick.slab is None:
            vector, number = torch.cat(quick.flats).mul_(number), 1.0
        else:
            group = a.memory.template.layout.groups[0]
            vector, number = torch.mul(quick.slab.vectors[0], number, out=_pool.take(group)), 1.0
    finally:
        _set_grad(before)
    return _made(a.memory.template, a.memory, a.version, Slab([vector]), quick.flags, number)
