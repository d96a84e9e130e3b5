"""The records of particles, and results of operations that are not built yet.

A `ParticleRecord` belongs to each module of a particle: its version, its last structure, and its root. It refers to the
root weakly, so particles contain no reference cycles.

A `Pending` is an unbuilt result of an operation: values, and the structure and attributes of the modules around them. The
module that has one is an empty shell, which is built at the first access to anything in it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import call, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli._torch import keep_from_tracing, run_outside
from moduli.kernels import pause_collection
from moduli.layout import Reading, Structure, TreeWatch, read

from ._facts import facts_of
from ._modes import is_watched
from ._skeleton import PENDING, RECORD, State, assemble, capture, recompute
from .errors import StructureError

if TYPE_CHECKING:
    from ._version import Past, Version


class Event(NamedTuple):
    """One edit of a species: the number of its version, a sentence, and the names it added and removed.

    Two events are equal if number, sentence and names are, whenever the edits were made.

    Attributes:
        number: The version that the edit made.
        sentence: The edit in words.
        added: The names of parameters and buffers that it added, or whose shape it changed.
        removed: The names of those that it removed, or whose shape it changed.
        where: The names of the attributes that were edited.
        when: The time, in seconds since 1970; None if unknown.
        moved: The former and the new name of each parameter and buffer that has another name after it.

    Example:
        >>> from moduli.particles import Event
        >>> Event(1, "'w' was deleted", frozenset(), frozenset({"w"})).number
        1
    """

    number: int
    sentence: str
    added: frozenset[str]
    removed: frozenset[str]
    where: tuple[str, ...] = ()
    when: float | None = None
    moved: tuple[tuple[str, str], ...] = ()

    @property
    def what(self) -> str:
        """The edit in words."""
        return self.sentence

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self[:4] == other[:4]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:4])


@dataclass(eq=False)
class Species:
    """All particles derived from each other.

    Attributes:
        events: The edits so far.
        rules: The calls of `set_param_config`: patterns, and the changed fields.
        configured: Whether any parameter has a configuration.
        lock: The lock under which edits are made and followed.
        members: The live particles.
        depth: The number of edits that each particle can roll back.
    """

    events: list[Event] = field(default_factory=list)
    rules: list[tuple[str, dict[str, bool]]] = field(default_factory=list)
    configured: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    members: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    depth: int = 8


@dataclass(eq=False, slots=True, weakref_slot=True)
class ParticleRecord:
    """The state of a module as a particle."""

    # None until another particle is derived from this one, or its version is needed.
    version: Version | None = None
    # Names of parameters and children in the order in which they were assigned.
    order: dict[str, None] = field(default_factory=dict)
    # The particle's structure, modules and attributes when it was last known to be at its version.
    structure: Structure | None = None
    modules: Sequence[weakref.ref[nn.Module]] = ()
    states: Sequence[State] = ()
    # The module at the top of the particle; None when it is the module itself.
    root: weakref.ref[nn.Module] | None = None
    wrapped: bool = False
    # The watch of an unchanged reading, and `modules` at that time; made at the second reading without a change (`settled`).
    watch: tuple[TreeWatch, Sequence[weakref.ref[nn.Module]]] | None = None
    settled: bool = False
    # Whether an edit is running, so that the assignments it makes are not edits themselves.
    busy: bool = False
    kernel: weakref.ref[Any] | None = None
    # Why the module cannot be converted or moved; empty if it can.
    pinned: str = ""
    # Additions that have no version yet: modules with the added names, and copies of the added values.
    journal: list[tuple[weakref.ref[nn.Module], str]] | tuple[()] = ()
    snapshots: dict[int, tuple[Tensor, Tensor]] | None = None
    # The identifier and the configurations of an unpickled version, which is made when the module is restored.
    origin: tuple[str, dict[str, Any]] | None = None
    # The parts that the last edits removed from the particle, the latest last.
    past: tuple[Past, ...] = ()
    # The modules below it, kept alive: a removal from a plain module is detected later, and can be rolled back.
    below: Sequence[nn.Module] = ()

    def saw(self, reading: Reading, states: list[State] | None = None) -> None:
        """Store the particle's structure, modules and attributes as those of its version."""
        self.states = capture(reading.modules, reading, strict=False) if states is None else states
        self.modules = list(map(weakref.ref, reading.modules))
        self.below = reading.modules[1:]
        self.structure = reading.structure
        self.watch = None

    def read(self, module: nn.Module) -> tuple[Reading, bool]:
        """Read the particle; return also whether it is unchanged since it was last known to be at its version."""
        watch, modules = self.watch, self.modules
        if watch is not None and watch[1] is modules:
            reading = watch[0].read(module)
            if reading is not None:
                return reading, True
        reading = read(module)
        same = self.structure is reading.structure and all(map(is_, map(call, modules), reading.modules))
        watched = TreeWatch.of(module, reading) if same and self.settled else None
        self.watch = None if watched is None else (watched, modules)
        self.settled = same
        return reading, same

    # Copies of a module are particles of the same species; the stored structure of the original is not theirs.
    def __deepcopy__(self, memo: dict[int, Any]) -> ParticleRecord:
        return ParticleRecord(self.version, dict(self.order))

    def __reduce__(self) -> Any:
        from ._history import pack

        return pack(self)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Pending:
    """An unbuilt result of an operation: values, and the structure and attributes of the modules around them."""

    structure: Structure
    states: list[State]
    tensors: list[Tensor]
    flags: tuple[bool, ...]
    buffers: list[Any]
    version: Version
    # The values are the tensors times this number.
    scale: float = 1
    # Whether some of the tensors are parameters of the operand itself.
    shared: bool = False
    # Whether the tensors carry a graph, so that they become parameters unmodified.
    graph: bool = False
    # Other results that have, or had, the same list of tensors.
    partners: tuple[weakref.ref[Pending], ...] = ()

    # Some classes copy the attributes of a module one by one: the copy of a shell is a shell.
    def __deepcopy__(self, memo: dict[int, Any]) -> Pending:
        tensors, buffers = [each.clone() for each in self.tensors], [each.detach().clone() for each in self.buffers]
        return replace(self, tensors=tensors, buffers=buffers, shared=False, partners=())

    @property
    def terms(self) -> tuple[list[Tensor], float]:
        """The tensors, and the deferred factor, for an operation that only reads them."""
        with _BUILDING:
            return self.tensors, self.scale

    def share_with(self, source: Pending) -> None:
        """Record that this result shares its tensors with another one."""
        with _BUILDING:
            self.partners = (*source.partners, weakref.ref(source))
            for each in self.partners:
                partner = each()
                if partner is not None:
                    partner.partners = (*partner.partners, weakref.ref(self))

    @property
    def is_lent(self) -> bool:
        """Whether another result refers to the tensors, so that a module needs copies."""
        partners = (each() for each in self.partners)
        return any(partner is not None and partner.tensors is self.tensors for partner in partners)

    @property
    def is_sole(self) -> bool:
        """Whether no other result refers to the tensors, so that an operation may overwrite them."""
        return facts_of(self.structure).floating and not (self.graph or self.shared or self.is_lent)

    def take(self) -> list[Tensor]:
        """Return the values in tensors that no other result refers to; safe to call from several threads."""
        with _BUILDING:
            if self.scale != 1:
                self.tensors, self.scale = list(torch._foreach_mul(self.tensors, self.scale)), 1
            elif self.is_lent:
                self.tensors = [tensor.clone() if type(tensor) is Tensor else tensor for tensor in self.tensors]
            return self.tensors


def record_of(module: nn.Module) -> ParticleRecord:
    """Return the record of a module; one is made if there is none yet."""
    state = module.__dict__
    record: ParticleRecord | None = state.get(RECORD)
    if record is None:
        record = state.setdefault(RECORD, ParticleRecord())
    return record


def refuse_wrapped(module: nn.Module, root: nn.Module) -> None:
    """Raise StructureError if a `ParticleModule` wraps the particle of a module, which then can't be used by itself."""
    if record_of(root).wrapped:
        raise StructureError(
            f"this {type(module).__name__} is wrapped by a ParticleModule, so it has no kernel; use the wrapper, or "
            "`with GetNytoModule(wrapper) as module`"
        )


def pin(module: nn.Module, reason: str) -> None:
    """Make `to`, `double` and the like of a particle raise from now on; copies of it can be converted.

    Args:
        module: A particle whose parameters are views of other storage.
        reason: The reason and the alternative, for the error.

    Example:
        >>> from moduli.particles import adopt, pin
        >>> net = adopt(nn.Linear(2, 1))
        >>> pin(net, "its memory belongs to a file")
        >>> net.double()
        Traceback (most recent call last):
        ...
        moduli.particles.errors.StructureError: this Linear cannot be converted: its memory belongs to a file
    """
    for each in module.modules():
        record = each.__dict__.get(RECORD)
        if record is not None:
            record.pinned = reason


def refuse_pinned(module: nn.Module, fn: Any) -> None:
    """Raise StructureError if a conversion would give the parameters of a pinned module other storage."""
    reason = record_of(module).pinned
    if not reason:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        converted = fn(empty)
        if (converted.dtype, converted.device) != (empty.dtype, empty.device):
            raise StructureError(f"this {type(module).__name__} cannot be converted: {reason}")


_BUILDING = threading.RLock()


def build(shell: nn.Module) -> None:
    """Build the module of a shell; safe to call from several threads."""
    if PENDING not in shell.__dict__:
        return
    with _BUILDING, pause_collection():
        pending: Pending | None = shell.__dict__.get(PENDING)
        if pending is None:
            return
        structure, states = pending.structure, pending.states
        parameters = _make_parameters(pending)
        record = ParticleRecord(pending.version, dict(states[0].get(RECORD, {})))
        # Set before the shell is readable, or another thread would make a record for it.
        shell.__dict__[RECORD] = record
        modules = assemble(structure, states, parameters, pending.buffers, shell)
        # Particles below this one refer to their root.
        reference = weakref.ref(shell)
        for place in facts_of(structure).particles:
            inner = modules[place].__dict__[RECORD] = ParticleRecord(None, dict(states[place].get(RECORD, {})))
            inner.root = reference
        record.saw(Reading(structure, parameters, pending.buffers, modules), states)
        pending.version.species.members.add(shell)
        before = shell.__dict__
        # Torch and its compiler expect a plain dictionary. Other references to the former one stay valid: it is complete.
        object.__setattr__(shell, "__dict__", {key: value for key, value in before.items() if key != PENDING})
        del before[PENDING]
        recompute(states, modules)


_BUILT = frozenset(("_parameters", "_buffers", "_modules", "_labelled"))


class ShellState(dict[str, Any]):
    """The attributes of a shell: `vars(2 * net)["_modules"]` builds it, and so does `get`.

    Attributes:
        kind: The class of the shell.
        shell: The shell.
    """

    __slots__ = ("kind", "shell")

    kind: type[nn.Module]
    shell: weakref.ref[nn.Module]

    def __missing__(self, key: str) -> Any:
        if PENDING not in self:
            raise KeyError(key)
        shell = self.shell()
        if shell is None:  # the shell was garbage-collected while its attributes are still referenced
            shell = object.__new__(self.kind)
            object.__setattr__(shell, "__dict__", self)
        build(shell)
        return self[key]

    def get(self, key: str, default: Any = None, /) -> Any:
        """Return an attribute; registries and records of labelled tensors are there after building only."""
        if key in _BUILT and key not in self and PENDING in self:
            with contextlib.suppress(KeyError):
                return self[key]
        return super().get(key, default)


def take_result(shell: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the parameters and buffers of a result that is not used otherwise, without building it."""
    pending: Pending | None = shell.__dict__.get(PENDING)
    if pending is None:
        reading = read(shell)
        return reading.parameters, reading.buffers
    return _make_parameters(pending), pending.buffers


def _make_parameters(pending: Pending) -> list[Any]:
    if not pending.graph:
        if is_watched() or torch.is_inference_mode_enabled():
            run_outside(_turn_into_parameters, pending)
        else:
            _turn_into_parameters(pending)
    return pending.tensors


def _turn_into_parameters(pending: Pending) -> None:
    pending.tensors = turn_into_parameters(pending.take(), pending.flags)


def turn_into_parameters(tensors: list[Any], flags: Iterable[bool]) -> list[Any]:
    """Turn new tensors into parameters by assigning their class, as torch does with lazy ones; parameters are unmodified."""
    for place, (tensor, flag) in enumerate(zip(tensors, flags, strict=True)):
        if type(tensor) is Tensor:
            tensor.__class__ = nn.Parameter
            if flag:
                tensor.requires_grad = True
        elif not isinstance(tensor, nn.Parameter):
            tensors[place] = nn.Parameter(tensor.detach(), requires_grad=flag)
    return tensors


keep_from_tracing(build)
