"""What a module knows about itself as a particle, and results that are not modules yet.

A `ParticleRecord` belongs to each module of ours: its version, what it looked like last, and where its root is. It refers to the
root weakly and to no other module, so particles contain no reference cycles.

A `Pending` is the result of an operation before it was looked into: values, and a skeleton. The module that
holds one is an empty shell, which is built at the first access to anything in it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import call, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli._torch import keep_from_tracing, run_outside
from moduli.layout import Reading, Structure

from ._mode import is_watched
from ._skeleton import PENDING, RECORD, State, assemble, facts_of
from .errors import StructureError

if TYPE_CHECKING:
    from .base import VersionKernelImp


class Event(NamedTuple):
    """One edit of a species: which version it made, in words, and the names it added and removed.

    Example:
        >>> from moduli.particles import Event
        >>> Event(1, "'w' was deleted", frozenset(), frozenset({"w"})).number
        1
    """

    number: int
    sentence: str
    added: frozenset[str]
    removed: frozenset[str]


class Species:
    """All particles derived from each other.

    Attributes:
        events: The edits so far.
        rules: The configurations by name that were asked for: patterns, and what they change.
        configured: Whether any parameter has a configuration.
        lock: Edits are made and followed by one thread at a time.
        members: The live particles.
    """

    __slots__ = ("__weakref__", "configured", "events", "lock", "members", "rules")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.rules: list[tuple[str, dict[str, bool]]] = []
        self.configured = False
        self.lock = threading.RLock()
        self.members: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ParticleRecord:
    """What a module knows about itself as a particle."""

    __slots__ = (
        "__weakref__", "busy", "kernel", "modules", "order", "origin", "root", "states", "structure", "version", "wrapped",
    )  # fmt: skip

    def __init__(self, version: VersionKernelImp | None = None, order: tuple[str, ...] = ()) -> None:
        # None until another particle is derived from this one, or its version is asked for.
        self.version = version
        # What the particle looked like when it was last seen to be at its version.
        self.structure: Structure | None = None
        self.modules: list[weakref.ref[nn.Module]] = []
        self.states: list[State] = []
        # The module at the top of the particle; None when it is the module itself.
        self.root: weakref.ref[nn.Module] | None = None
        self.wrapped = False
        # Whether an edit is under way, so that the steps it consists of are not edits of their own.
        self.busy = False
        # Names of parameters and children in the order in which they were assigned.
        self.order: dict[str, None] = dict.fromkeys(order)
        self.kernel: weakref.ref[Any] | None = None
        # The identifier and the configurations of a version from elsewhere, which begins here when the module is restored.
        self.origin: tuple[str, dict[str, Any]] | None = None

    def saw(self, reading: Reading, states: list[State] | None = None) -> None:
        """Note what the particle looks like at its version."""
        self.structure = reading.structure
        self.modules = list(map(weakref.ref, reading.modules))
        if states is not None:
            self.states = states

    def looks_like(self, reading: Reading) -> bool:
        """Whether the particle is what it was when it was last seen to be at its version."""
        return self.structure is reading.structure and all(map(is_, map(call, self.modules), reading.modules))

    # Copies of a module are particles of the same species; what was seen of the original does not hold for them.
    def __deepcopy__(self, memo: dict[int, Any]) -> ParticleRecord:
        return ParticleRecord(self.version, tuple(self.order))

    def __reduce__(self) -> Any:
        from ._history import pack

        return pack(self)


@dataclass(eq=False, slots=True)
class Pending:
    """The result of an operation: values, and what to build around them."""

    structure: Structure
    states: list[State]
    tensors: list[Tensor]
    flags: tuple[bool, ...]
    buffers: list[Any]
    version: VersionKernelImp
    # The values are the tensors times this number.
    scale: float = 1
    # Whether some of the tensors are parameters of the operand itself.
    shared: bool = False
    # Classes of parameters, where some are not plain ones.
    kinds: dict[int, type[nn.Parameter]] = field(default_factory=dict)
    # Whether the tensors carry a graph, so that they are parameters as they are.
    graph: bool = False

    # Some classes copy the attributes of a module one by one: the copy of a shell is a shell.
    def __deepcopy__(self, memo: dict[int, Any]) -> Pending:
        tensors, buffers = [each.clone() for each in self.tensors], [each.detach().clone() for each in self.buffers]
        return replace(self, tensors=tensors, buffers=buffers, shared=False)

    @property
    def fresh(self) -> bool:
        """Whether the tensors may be written over, if nothing else refers to the result."""
        groups = self.structure.layout.groups
        return not (self.graph or self.shared) and all(g.dtype.is_floating_point for g in groups)

    def values(self) -> list[Tensor]:
        """The tensors, with the number multiplied in; several threads may ask for them."""
        if self.scale != 1:
            with _BUILDING, torch.no_grad():
                for tensor in self.tensors if self.scale != 1 else ():
                    tensor.mul_(self.scale)
                self.scale = 1
        return self.tensors


def record_of(module: nn.Module) -> ParticleRecord:
    """The record of a module; a module that was never initialised by us gets one."""
    state = module.__dict__
    record: ParticleRecord | None = state.get(RECORD)
    if record is None:
        record = state.setdefault(RECORD, ParticleRecord())
    return record


def refuse_wrapped(module: nn.Module, root: nn.Module) -> None:
    """Refuse to use a module by itself whose particle a `ParticleModule` wraps."""
    if record_of(root).wrapped:
        raise StructureError(
            f"this {type(module).__name__} is wrapped by a ParticleModule, so it has no kernel; use the wrapper, or "
            "`with GetNytoModule(wrapper) as module`"
        )


_BUILDING = threading.RLock()


def build(shell: nn.Module) -> None:
    """Make a module of a shell; several threads may ask for it."""
    with _BUILDING:
        pending: Pending | None = shell.__dict__.get(PENDING)
        if pending is None:
            return
        structure, states = pending.structure, pending.states
        if not pending.graph:
            if is_watched() or torch.is_inference_mode_enabled():
                run_outside(_make_parameters, pending)
            else:
                _make_parameters(pending)
        parameters = pending.tensors
        record = ParticleRecord(pending.version, states[0].get(RECORD, ()))
        # The record comes with the first look, or another thread would give the module one of its own.
        shell.__dict__[RECORD] = record
        modules = {0: shell}
        assemble(modules, structure, states, parameters, pending.buffers)
        adorn(modules, states, facts_of(structure).particles)
        ordered = [modules[place] for place in range(len(modules))]
        record.saw(Reading(structure, parameters, pending.buffers, ordered), states)
        pending.version.data.species.members.add(shell)
        del shell.__dict__[PENDING]


def adorn(modules: Mapping[int, nn.Module], states: list[State], places: tuple[int, ...]) -> None:
    """Tell the modules of ours below a root which particle they are in."""
    if places:
        reference = weakref.ref(modules[0])
        for place in places:
            inner = modules[place].__dict__[RECORD] = ParticleRecord(None, states[place].get(RECORD, ()))
            inner.root = reference


def _make_parameters(pending: Pending) -> None:
    """Turn fresh tensors into parameters where they are, as torch does with lazy ones; those of an operand stay."""
    tensors, flags = pending.values(), pending.flags
    for tensor, flag in zip(tensors, flags, strict=True):
        if type(tensor) is Tensor:
            tensor.__class__ = nn.Parameter
            if flag:
                tensor.requires_grad = True
    for place, kind in pending.kinds.items():
        if not isinstance(tensors[place], kind):
            tensors[place] = kind(tensors[place].detach(), requires_grad=flags[place])


keep_from_tracing(build)
