"""The short way: sums, differences and multiples of ordinary models, without looking at every name in them.

Most operands are results that nobody looked into, or models in which nothing has changed since the last operation. The
latter is seen by one compiled call (`moduli.kernels.live`), or else by a few comparisons of whole lists, which Python
makes by identity: of the registries with copies of them, and of every module's attributes with a copy of those. Whatever
does not fit goes the long way, with the same result.
"""

from __future__ import annotations

import operator
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from moduli.kernels import live

from . import _pass, _pool
from ._pool import Slab
from ._record import Lazy, Record, Unborn
from ._template import LAZY, RECORD, Memory, Template, Walk, recognised
from ._temporary import is_temporary

__all__ = ["Quick", "multiple", "quicken", "total"]

_STATE = attrgetter("__dict__")
_POINTER = Tensor.data_ptr
_IDLE = ("_buffers", "_non_persistent_buffers_set")
_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatchers = torch._C._len_torch_dispatch_stack
_grad = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_set_grad = torch._C._set_grad_enabled
_SMALL = 1 << 19
_SUMS = 32


class Quick:
    """Copies of what a model consists of, to compare it with. They refer to what is below the root, never to the root."""

    __slots__ = (
        "childless",
        "children",
        "children_before",
        "comparable",
        "fixed",
        "flags",
        "flats",
        "get",
        "guard",
        "idle",
        "kind",
        "kinds",
        "memory",
        "modules",
        "parameters",
        "parameters_before",
        "pointers",
        "size",
        "slab",
        "states",
        "sums",
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
    kind: type
    kinds: list[type]
    memory: Memory
    idle: tuple[Any, ...]
    childless: tuple[Any, ...]
    top: Any
    get: Any
    values: Any
    size: int
    comparable: bool
    tensors: list[Tensor]
    watch: live.Watch
    guard: live.Guard | None
    # Sums that read the tensors where they are, by what the other operand is.
    sums: dict[int, live.Sum]
    fixed: list[Tensor]
    pointers: list[int]
    flats: list[Tensor]
    slab: Slab | None
    flags: tuple[bool, ...]


def quicken(module: nn.Module, record: Record, memory: Memory, seen: Walk, tensors: list[Tensor]) -> None:
    """Remember a model for the short way, if it is an ordinary one."""
    template = memory.template
    if not template.quick or not all(map(Tensor.is_contiguous, tensors)):
        return
    # The template is what results are made of, so it must be that of the model as it is now.
    if recognised(memory, seen, True) is None:
        return
    distinct = list({id(each): each for each in seen.modules if each is not None}.values())
    quick = Quick()
    quick.guard = live.guard(module, distinct, tensors)
    # Tensors of one element compare by value, so that others of the same value would be taken for them.
    quick.comparable = all(tensor.numel() > 1 for tensor in tensors)
    if quick.guard is None and not quick.comparable:
        return
    quick.sums = {}
    quick.memory = memory
    quick.kind = type(module)
    quick.kinds = list(map(type, distinct[1:]))
    quick.modules = distinct[1:]
    quick.states = [dict(each.__dict__) for each in quick.modules]
    quick.children = [each._modules for each in distinct if each._modules]
    quick.children_before = [dict(held) for held in quick.children]
    quick.parameters = [each._parameters for each in distinct]
    quick.parameters_before = [dict(held) for held in quick.parameters]
    keys = [key for key in module.__dict__ if key != RECORD]
    quick.get = itemgetter(*keys)
    quick.values = quick.get(module.__dict__)
    quick.size = len(module.__dict__)
    hooks = [key for key in nn.Module().__dict__ if key.endswith(("_hooks", "_hooks_with_kwargs", "_always_called"))]
    quick.idle = tuple(each.__dict__[key] for each in distinct for key in (*_IDLE, *hooks))
    quick.childless = tuple(each._modules for each in distinct if not each._modules)
    quick.top = module._modules
    quick.tensors = tensors
    quick.watch = live.watch(tensors)
    # Views and vectors hold while the addresses do; large parameters are read where they are.
    fixed = record.slab is not None or bool(record.flats)
    quick.fixed = tensors if fixed else []
    quick.pointers = record.pointers if fixed else []
    quick.flats = record.flats
    quick.slab = record.slab
    quick.flags = tuple(tensor.requires_grad for tensor in tensors)
    record.quick = quick


def _known(module: nn.Module, flags: bool) -> bool:
    """Whether a model is what it was when it was remembered for the short way; otherwise it is forgotten."""
    own = module.__dict__
    record = own[RECORD]
    quick = record.quick
    if quick.guard is not None and type(module) is quick.kind and quick.guard.same(own, flags):
        return True
    if quick.comparable and _holds(quick, module):
        if quick.guard is not None:
            # Something was written that left everything as it was.
            quick.guard, quick.sums = live.guard(module, [module, *quick.modules], quick.tensors), {}
        return True
    record.quick = None
    return False


def _holds(quick: Quick, module: nn.Module) -> bool:
    """Whether a model is what it was, by comparisons."""
    own = module.__dict__
    try:
        return (
            len(own) == quick.size
            and quick.get(own) == quick.values
            and not any(quick.idle)
            and quick.children == quick.children_before
            and quick.parameters == quick.parameters_before
            and own["_parameters"] is quick.parameters[0]
            and own["_modules"] is quick.top
            and type(module) is quick.kind
            and not any(quick.childless)
            and list(map(type, quick.modules)) == quick.kinds
            and list(map(_STATE, quick.modules)) == quick.states
            and quick.watch.same(quick.tensors)
            and list(map(_POINTER, quick.fixed)) == quick.pointers
        )
    except (KeyError, RuntimeError, ValueError, TypeError):
        # Something became a tensor or an array, whose comparison is no truth value.
        return False


def _sum_of(template: Template, a: Quick | None, b: Quick | None) -> live.Sum | None:
    """The compiled sum of two models, of which those that are None are vectors; None where it cannot be had."""
    holder = a or b
    if holder is None or holder.guard is None:
        return None
    x = a.guard if a is not None else None
    y = b.guard if b is not None else None
    if b is not None and y is None:
        return None
    key = id(y) if a is not None else -1
    found = holder.sums.get(key)
    if found is None or not found.fits(x, y):
        if len(holder.sums) >= _SUMS:
            holder.sums.clear()
        layout = template.layout
        found = live.Sum.of([entry.numel for entry in layout.entries], layout.groups[0].dtype, x, y)
        if found is not None:
            holder.sums[key] = found
    return found


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


def total(fn: Any, left: nn.Module, right: nn.Module, count: int) -> nn.Module | None:
    """The sum or difference of two particles; None if the long way must be taken.

    Args:
        fn: Which of the two.
        left: The one particle.
        right: The other one.
        count: How many references to the other one the operator counts: if nobody can read it after the operation, the
            result is written over it.
    """
    if _interpreter() is not None or _dispatchers() or _inference():
        return None
    mine, others = left.__dict__, right.__dict__
    x, y = mine.get(LAZY), others.get(LAZY)
    a: Any = None
    b: Any = None
    p: Any = None
    q: Any = None
    s, t = 1.0, (1.0 if fn is operator.add else -1.0)
    if x is None:
        record = mine.get(RECORD)
        if record is None or record.quick is None or record.wrapped:
            return None
        a = record.quick
        template, memory, version, flags = a.memory.template, a.memory, record.version, a.flags
        if a.slab is not None:
            p = a.slab.vectors[0]
    else:
        template, memory, version, flags = x.template, x.memory, x.version, x.flags
        if not template.quick:
            return None
        p, s = x.slab.vectors[0], x.scale
    if y is None:
        record = others.get(RECORD)
        if record is None or record.quick is None or record.wrapped:
            return None
        b = record.quick
        other, theirs = b.memory.template, record.version
        if b.slab is not None:
            q = b.slab.vectors[0]
    else:
        other, theirs = y.template, y.version
        if not other.quick:
            return None
        q, t = y.slab.vectors[0], t * y.scale
    if other.layout is not template.layout or not _ready(template, version) or not _ready(other, theirs):
        return None
    group = template.layout.groups[0]
    large = group.numel * group.dtype.itemsize > _SMALL
    slab: Slab | None = None
    before = _grad()
    if before:
        _set_grad(False)
    try:
        compiled = _sum_of(template, a if p is None else None, b if q is None else None)
        if compiled is not None and not large:
            # To look whether the models are what they were, and to add them, is one call.
            vector = compiled.blank.new_empty(group.numel)
            first, second = 0 if p is None else p.data_ptr(), 0 if q is None else q.data_ptr()
            # The class of the root is not in its dict.
            kept = (a is None or type(left) is a.kind) and (b is None or type(right) is b.kind)
            if kept and compiled.guarded(mine, others, first, second, s, t, vector):
                if (p is None or a is None or _known(left, True)) and (q is None or b is None or _known(right, False)):
                    return _made(template, memory, version, Slab([vector], False), flags, 1.0)
                return None
        if (a is not None and not _known(left, True)) or (b is not None and not _known(right, False)):
            return None
        out: Any = None
        if large:
            if y is not None and y.slab.users == 1 and is_temporary(count):
                slab, out = y.slab, q
            else:
                out = _pool.take(group)
        if p is not None and q is not None:
            vector = _vectors(p, q, s, t, out)
        else:
            vector = _mixed(template, a if p is None else None, b if q is None else None, p, q, s, t, out)
    finally:
        if before:
            _set_grad(True)
    return _made(template, memory, version, slab or Slab([vector], large), flags, 1.0)


def _vectors(p: Tensor, q: Tensor, s: float, t: float, out: Any) -> Any:
    """The sum s p + t q of vectors, into `out`, which may be q itself, or into a new one."""
    if s == 1.0:
        return torch.add(p, q, out=out) if t == 1.0 else torch.add(p, q, alpha=t, out=out)
    if t == 1.0:
        return torch.add(q, p, alpha=s, out=out)
    if out is not q:
        return torch.mul(p, s, out=out).add_(q, alpha=t)
    return q.mul_(t).add_(p, alpha=s)


def _mixed(template: Template, a: Any, b: Any, p: Any, q: Any, s: float, t: float, out: Any) -> Any:
    """The same where at least one operand is live tensors."""
    compiled = _sum_of(template, a, b)
    if compiled is not None:
        if out is None:
            out = template.layout.groups[0].empty()
        compiled(0 if p is None else p.data_ptr(), 0 if q is None else q.data_ptr(), s, t, out)
        if out is q:
            increment_version(out)
        return out
    if out is None:
        first = torch.cat(a.flats) if p is None else torch.mul(p, s)
        second = torch.cat(b.flats) if q is None else q
        return first.add_(second, alpha=t)
    sizes = [entry.numel for entry in template.layout.entries]
    values = list(a.tensors) if p is None else list(torch.split(p, sizes))
    if q is not None and out is q:
        _pass.BLEND_OVER(values, list(torch.split(q, sizes)), s, t)
    else:
        _pass.BLEND(values, list(b.tensors) if q is None else list(torch.split(q, sizes)), s, t, out=out)
    return out


def multiple(module: nn.Module, number: float) -> nn.Module | None:
    """A particle times a number; None if the long way must be taken."""
    if _interpreter() is not None or _dispatchers() or _inference():
        return None
    x = module.__dict__.get(LAZY)
    if x is not None:
        if not _ready(x.template, x.version):
            return None
        # The values stay where they are; the number is multiplied in when they are needed.
        return _made(x.template, x.memory, x.version, x.slab, x.flags, x.scale * number)
    record = module.__dict__.get(RECORD)
    if record is None or record.quick is None or record.wrapped:
        return None
    quick = record.quick
    template = quick.memory.template
    if not _ready(template, record.version) or not _known(module, True):
        return None
    group = template.layout.groups[0]
    large = group.numel * group.dtype.itemsize > _SMALL
    before = _grad()
    if before:
        _set_grad(False)
    try:
        compiled = _sum_of(template, quick, None) if quick.slab is None else None
        if quick.slab is not None:
            vector = torch.mul(quick.slab.vectors[0], number, out=_pool.take(group))
        elif compiled is not None:
            vector = _pool.take(group) if large else group.empty()
            compiled(0, 0, float(number), 0.0, vector)
        elif quick.flats:
            vector = torch.cat(quick.flats).mul_(number)
        else:
            return None
    finally:
        if before:
            _set_grad(True)
    return _made(template, quick.memory, record.version, Slab([vector], large), quick.flags, 1.0)
