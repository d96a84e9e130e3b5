"""The operands of whole-model operations: particles read where they are, numbers, and tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moduli.layout import Group, diff

from . import _quick
from ._pass import Part
from ._record import Lazy, Record, Unborn, build, transformed
from ._species import conflicts, current, is_lagging, resolved
from ._template import LAZY, RECORD, Memory, Template, Walk, distinct_buffers
from ._temporary import beyond
from .errors import StructureError
from .mtype import ParamConfig

__all__ = [
    "Operand",
    "broadcast",
    "differentiable",
    "graphing",
    "keeps_graph",
    "leaves",
    "matching",
    "number",
    "recording",
    "refuse_graph",
    "spare_of",
    "tensors_of",
]

_REQUIRES_GRAD = attrgetter("requires_grad")
_SMALL = 1 << 19


class _Mode(threading.local):
    graph = False


_mode = _Mode()


@contextmanager
def differentiable() -> Iterator[None]:
    """Let operations on models keep the graph, so that gradients reach operands and coefficients.

    The parameters of a result are then tensors with a history instead of new leaves. Operations in place are refused.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt, differentiable
        >>> a, b = adopt(torch.nn.Linear(1, 1)), adopt(torch.nn.Linear(1, 1))
        >>> t = torch.tensor(0.5, requires_grad=True)
        >>> with differentiable():
        ...     merged = a + t * (b - a)
        >>> merged(torch.ones(1)).sum().backward()
        >>> t.grad is not None
        True
    """
    before = _mode.graph
    _mode.graph = True
    try:
        yield
    finally:
        _mode.graph = before


class Operand:
    """One particle in an operation: its values where they are, and what is needed to make another one like it."""

    __slots__ = ("lazy", "live", "memory", "module", "record", "scope", "template", "tensors", "version")

    module: nn.Module
    template: Template
    memory: Memory | None
    record: Record | None
    lazy: Lazy | None
    tensors: list[Tensor]
    live: Walk | None
    version: Any

    def part(self, index: int, group: Group) -> Part:
        """The values of one group."""
        if self.lazy is not None:
            return Part(self.lazy.slab.vectors[index], self.lazy.scale)
        record, tensors = self.record, self.tensors
        single = len(self.template.layout.groups) == 1
        if record is not None and not torch.is_grad_enabled():
            if record.slab is not None or record.flats:
                same = list(map(Tensor.data_ptr, tensors)) == record.pointers and all(
                    map(Tensor.is_contiguous, tensors)
                )
                if same and record.slab is not None:
                    if record.quick is None and self.memory is not None and self.live is not None:
                        _quick.quicken(self.module, record, self.memory, self.live, tensors)
                    return Part(record.slab.vectors[index])
                if not same:
                    record.forget_values()
            chosen = tensors if single else [tensors[i] for i in group.indices]
            if not record.flats and group.numel * group.dtype.itemsize <= _SMALL:
                record.remember_values(tensors)
            if record.quick is None and single and self.memory is not None and self.live is not None:
                _quick.quicken(self.module, record, self.memory, self.live, tensors)
            flats = record.flats if single or not record.flats else [record.flats[i] for i in group.indices]
            return Part(None, 1.0, chosen, flats)
        return Part(None, 1.0, tensors if single else [tensors[i] for i in group.indices])

    def flags(self) -> tuple[bool, ...]:
        """Which parameters require gradients."""
        return self.lazy.flags if self.lazy is not None else tuple(map(_REQUIRES_GRAD, self.tensors))

    def buffers(self) -> list[Any]:
        """The buffers, each once."""
        if self.lazy is not None:
            return self.lazy.buffers
        return distinct_buffers(self.live) if self.live is not None and self.live.buffers else []

    def parameter(self, place: int) -> nn.Parameter:
        """One parameter itself."""
        if self.lazy is not None:
            build(self.module)
            self.__init__(self.module, scope=self.scope)  # type: ignore[misc]
        return self.tensors[place]  # type: ignore[return-value]

    def __init__(
        self, module: nn.Module, attributes: bool = True, scope: tuple[str, ...] | None = None, wrapped: bool = False
    ) -> None:
        self.module = module
        # Patterns of names, if the operation is to act on those parameters only.
        self.scope = scope
        lazy: Lazy | None = module.__dict__.get(LAZY)
        if lazy is not None and is_lagging(lazy.version):
            build(module)
            lazy = None
        self.lazy = lazy
        if lazy is not None:
            self.template, self.memory, self.record, self.live = lazy.template, lazy.memory, None, None
            self.tensors = []
            self.version = lazy.version
            return
        known = module.__dict__.get(RECORD)
        # A model that is not remembered for the short way yet is read in full, so that it can be.
        attributes = attributes or known is None or known.quick is None
        self.record, self.memory, self.tensors, self.live = current(module, attributes)
        if self.record.wrapped and not wrapped:
            raise StructureError(
                f"this {type(module).__name__} is wrapped by a ParticleModule; use the wrapper, or `with GetNytoModule(wrapper)`"
            )
        self.template = self.memory.template
        if self.record.version is None:
            self.record.version = Unborn()
        self.version = self.record.version

    def config(self) -> dict[int, ParamConfig]:
        """The configurations of parameters that have one, by place in the layout."""
        outside = {}
        if self.scope is not None:
            for place, entry in enumerate(self.template.layout):
                if not any(fnmatchcase(name, pattern) for name in entry.names for pattern in self.scope):
                    outside[place] = ParamConfig(operational=False)
        species = self.version.species if type(self.version) is Unborn else self.version.data.species
        if not species.configured:
            return outside
        version = self.version.version if isinstance(self.version, Unborn) else self.version
        if version is None:
            version = resolved(self.record or Record(self.version), self.template)
        places = {entry.name: place for place, entry in enumerate(self.template.layout.entries)}
        names = version.data.names
        plain = ParamConfig()
        found = {places[names[pid]]: config for pid, config in version.data.config.items() if config != plain}
        return {**outside, **found}


def keeps_graph() -> bool:
    """Whether `differentiable` is in force."""
    return _mode.graph


def graphing() -> bool:
    """Whether operations are only composed of torch's own, for gradients or transforms to follow."""
    return _mode.graph or transformed()


@contextmanager
def leaves() -> Iterator[None]:
    """Results are leaves that can be trained, whatever mode the caller is in."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(before)


@contextmanager
def recording() -> Iterator[None]:
    """No gradients are recorded, except where `differentiable` asks for them."""
    if graphing():
        yield
    else:
        with leaves():
            yield


def refuse_graph() -> None:
    """Refuse operations in place where a graph is kept."""
    if _mode.graph:
        raise RuntimeError("inside differentiable() operations in place are refused: write a = a + b instead of a += b")


def tensors_of(which: Operand) -> list[Tensor]:
    """The values of an operand, one tensor per entry of its layout."""
    if which.lazy is None:
        return which.tensors
    vectors = which.lazy.slab.vectors if which.lazy.scale == 1.0 else which.lazy.own()
    return which.template.layout.views(vectors)


_LARGE = 1 << 20


def spare_of(right: Operand, count: int) -> Lazy | None:
    """The result that an operand is, if it exists only inside the expression that is being computed."""
    lazy = right.lazy
    if lazy is None or lazy.slab.users > 1 or lazy.shared or lazy.graph:
        return None
    groups = right.template.layout.groups
    if len(groups) != 1 or groups[0].numel * groups[0].dtype.itemsize < _LARGE or right.template.rich:
        return None
    alone = beyond()
    # The operand refers to the module once more than the probe did.
    return lazy if alone and count <= alone + 1 else None


def matching(left: Operand, right: Operand) -> None:
    """Check that two operands have the same structure.

    Raises:
        StructureError: If they do not, with the first difference.
    """
    ours, theirs = left.template.layout, right.template.layout
    if ours is theirs:
        return
    if ours.entries is not theirs.entries and ours.fingerprint != theirs.fingerprint:
        raise conflicts(left.module, right.module, diff(ours, theirs))
    for x, y in zip(ours, theirs, strict=True):
        if x.device != y.device:
            raise StructureError(
                f"cannot combine {type(left.module).__name__} and {type(right.module).__name__}: {x.name!r} is on {x.device} "
                f"on the left and on {y.device} on the right; move one of them with .to()"
            )


def number(other: Any) -> Any:
    """A scalar operand as torch takes it, or None if it is no scalar or tensor."""
    if isinstance(other, bool | int | float | complex | Tensor):
        return other
    if isinstance(other, np.generic):
        return other.item()
    if isinstance(other, np.ndarray):
        return torch.from_numpy(other)
    return None


def broadcast(left: Operand, value: Tensor) -> list[Tensor]:
    """A tensor in the shape of every parameter.

    Raises:
        StructureError: If it does not fit, or would change the shape of a parameter.
    """
    parts = []
    inert = {place for place, config in left.config().items() if not config.operational}
    for place, entry in enumerate(left.template.layout):
        if place in inert:
            parts.append(torch.zeros((), dtype=entry.dtype, device=entry.device).expand(entry.shape))
            continue
        try:
            shape = tuple(torch.broadcast_shapes(entry.shape, value.shape))  # type: ignore[no-untyped-call]
        except RuntimeError:
            shape = ()
        if shape != entry.shape:
            raise StructureError(
                f"a tensor of shape {tuple(value.shape)} does not fit {entry.name!r} of shape {entry.shape}: operations keep "
                "the shape of every parameter; use moduli.particles.only to act on some parameters"
            )
        parts.append(value.expand(entry.shape))
    return parts
