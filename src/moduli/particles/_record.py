"""What a module knows about itself as a particle, and results that are not modules yet.

A `ParticleRecord` belongs to each module of ours: its version, what it looked like last, and where its root is. It refers to the
root weakly and to no other module, so particles contain no reference cycles.

A `Pending` is the result of an operation before it was looked into: values, and a skeleton. The module that
holds one is an empty shell, which is built at the first access to anything in it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import call, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli._torch import (
    has_dispatch_mode,
    in_transform,
    keep_from_tracing,
    run_outside,
    set_grad_enabled,
)
from moduli.kernels import pause_collection
from moduli.layout import Reading, Structure, TreeWatch, read

from ._skeleton import PENDING, RECORD, State, assemble, capture, facts_of, recompute
from .errors import StructureError

if TYPE_CHECKING:
    from ._version import Past, Version


class Event(NamedTuple):
    """One edit of a species: which version it made, in words, and the names it added and removed.

    Two events are equal if they say the same, wherever and whenever the edits were made.

    Attributes:
        number: The version that the edit made.
        sentence: The edit in words.
        added: The names of parameters and buffers that it added, or gave another shape.
        removed: Those that it removed, or gave another shape.
        where: The names of the attributes that were edited.
        when: The time, in seconds since 1970; None where that is not known.

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
        rules: The configurations by name that were asked for: patterns, and what they change.
        configured: Whether any parameter has a configuration.
        lock: Edits are made and followed by one thread at a time.
        members: The live particles.
        depth: How many edits each particle can go back.
    """

    events: list[Event] = field(default_factory=list)
    rules: list[tuple[str, dict[str, bool]]] = field(default_factory=list)
    configured: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    members: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    depth: int = 8


@dataclass(eq=False, slots=True, weakref_slot=True)
class ParticleRecord:
    """What a module knows about itself as a particle."""

    # None until another particle is derived from this one, or its version is asked for.
    version: Version | None = None
    # Names of parameters and children in the order in which they were assigned.
    order: dict[str, None] = field(default_factory=dict)
    # What the particle looked like when it was last seen to be at its version.
    structure: Structure | None = None
    modules: Sequence[weakref.ref[nn.Module]] = ()
    states: Sequence[State] = ()
    # The module at the top of the particle; None when it is the module itself.
    root: weakref.ref[nn.Module] | None = None
    wrapped: bool = False
    # A reading that was found to be what it was, and `modules` at that time; it is made at the second look.
    watch: tuple[TreeWatch, Sequence[weakref.ref[nn.Module]]] | None = None
    settled: bool = False
    # Whether an edit is under way, so that the steps it consists of are not edits of their own.
    busy: bool = False
    kernel: weakref.ref[Any] | None = None
    # Why the module cannot be converted or moved; empty if it can.
    pinned: str = ""
    # Additions that have no version yet: modules with the names that they got, and copies of the values they got then.
    journal: list[tuple[weakref.ref[nn.Module], str]] | tuple[()] = ()
    snapshots: dict[int, tuple[Tensor, Tensor]] | None = None
    # The identifier and the configurations of a version from elsewhere, which begins here when the module is restored.
    origin: tuple[str, dict[str, Any]] | None = None
    # What the last edits removed from the particle, the latest last.
    past: tuple[Past, ...] = ()
    # The modules below it: what a plain module loses is noticed later, and can come back.
    below: Sequence[nn.Module] = ()

    def saw(self, reading: Reading, states: list[State] | None = None) -> None:
        """Note what the particle looks like at its version."""
        self.states = capture(reading.modules, reading, strict=False) if states is None else states
        self.modules = list(map(weakref.ref, reading.modules))
        self.below = reading.modules[1:]
        self.structure = reading.structure
        self.watch = None

    def read(self, module: nn.Module) -> tuple[Reading, bool]:
        """Read the particle; return also whether it is what it was when it was last seen to be at its version."""
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

    # Copies of a module are particles of the same species; what was seen of the original does not hold for them.
    def __deepcopy__(self, memo: dict[int, Any]) -> ParticleRecord:
        return ParticleRecord(self.version, dict(self.order))

    def __reduce__(self) -> Any:
        from ._history import pack

        return pack(self)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Pending:
    """The result of an operation: values, and what to build around them."""

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
    # Whether the tensors carry a graph, so that they are parameters as they are.
    graph: bool = False
    # Other results that have, or had, the same list of tensors.
    partners: tuple[weakref.ref[Pending], ...] = ()

    # Some classes copy the attributes of a module one by one: the copy of a shell is a shell.
    def __deepcopy__(self, memo: dict[int, Any]) -> Pending:
        tensors, buffers = [each.clone() for each in self.tensors], [each.detach().clone() for each in self.buffers]
        return replace(self, tensors=tensors, buffers=buffers, shared=False, partners=())

    @property
    def terms(self) -> tuple[list[Tensor], float]:
        """The tensors, and the number that they are still to be multiplied with, for an operation that only reads them."""
        with _BUILDING:
            return self.tensors, self.scale

    def share_with(self, source: Pending) -> None:
        """Note that another result has the same tensors."""
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
        """Whether no other result refers to the tensors, and an operation may write over them."""
        return facts_of(self.structure).floating and not (self.graph or self.shared or self.is_lent)

    def take(self) -> list[Tensor]:
        """Return the values in tensors that nothing else refers to; several threads may ask for them."""
        with _BUILDING:
            if self.scale != 1:
                self.tensors, self.scale = list(torch._foreach_mul(self.tensors, self.scale)), 1
            elif self.is_lent:
                self.tensors = [tensor.clone() if type(tensor) is Tensor else tensor for tensor in self.tensors]
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


def pin(module: nn.Module, reason: str) -> None:
    """Refuse `to`, `double` and the like of a particle from now on; copies of it can be converted.

    Args:
        module: A particle whose parameters are views of other storage.
        reason: Why, and what to do instead.

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
    """Make a module of a shell; several threads may ask for it."""
    if PENDING not in shell.__dict__:
        return
    with _BUILDING, pause_collection():
        pending: Pending | None = shell.__dict__.get(PENDING)
        if pending is None:
            return
        structure, states = pending.structure, pending.states
        parameters = _make_parameters(pending)
        record = ParticleRecord(pending.version, dict(states[0].get(RECORD, {})))
        # The record comes with the first look, or another thread would give the module one of its own.
        shell.__dict__[RECORD] = record
        modules = assemble(structure, states, parameters, pending.buffers, shell)
        # The modules of ours below know which particle they are in.
        reference = weakref.ref(shell)
        for place in facts_of(structure).particles:
            inner = modules[place].__dict__[RECORD] = ParticleRecord(None, dict(states[place].get(RECORD, {})))
            inner.root = reference
        record.saw(Reading(structure, parameters, pending.buffers, modules), states)
        pending.version.species.members.add(shell)
        before = shell.__dict__
        # Torch and its compiler expect a plain dictionary. Others may hold the one before, which is complete by now.
        object.__setattr__(shell, "__dict__", {key: value for key, value in before.items() if key != PENDING})
        del before[PENDING]
        recompute(states, modules)


class ShellState(dict[str, Any]):
    """The attributes of a shell: `vars(2 * net)["_modules"]` builds it.

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
        if shell is None:  # it went when its attributes had been asked for
            shell = object.__new__(self.kind)
            object.__setattr__(shell, "__dict__", self)
        build(shell)
        return self[key]


def take_result(shell: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the parameters and buffers of the result of an operation, which is not used otherwise."""
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
    """Turn fresh tensors into parameters where they are, as torch does with lazy ones; parameters stay what they are."""
    for place, (tensor, flag) in enumerate(zip(tensors, flags, strict=True)):
        if type(tensor) is Tensor:
            tensor.__class__ = nn.Parameter
            if flag:
                tensor.requires_grad = True
        elif not isinstance(tensor, nn.Parameter):
            tensors[place] = nn.Parameter(tensor.detach(), requires_grad=flag)
    return tensors


keep_from_tracing(build)


# -- what operations record ----------------------------------------------------------------------------------------------


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


def is_differentiable() -> bool:
    """Whether operations on models keep the graph, inside `differentiable`.

    Example:
        >>> from moduli.particles import differentiable, is_differentiable
        >>> with differentiable():
        ...     print(is_differentiable())
        True
    """
    return _mode.graph


def is_composing() -> bool:
    """Whether operations are only composed of torch's own, for gradients or transforms to follow."""
    return _mode.graph or is_watched()


class LeafMode:
    """A block in which results are leaves that can be trained, whatever mode the caller is in.

    Python looks for no cycles of garbage meanwhile: for thousands of layers it would look through all of them many times.
    """

    __slots__ = ("_collecting", "_inference", "_recording")

    def __enter__(self) -> None:
        self._collecting = gc.isenabled()
        gc.disable()
        # Every operation begins one: torch's own blocks take longer than small operations do.
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._recording = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self._recording)
        if self._inference is not None:
            self._inference.__exit__(*error)
        if self._collecting:
            gc.enable()


def record_nothing() -> AbstractContextManager[None]:
    """A block in which no gradients are recorded, except where `differentiable` asks for them."""
    return nullcontext() if is_composing() else LeafMode()


def refuse_graph() -> None:
    """Refuse operations in place where a graph is kept.

    Raises:
        RuntimeError: Inside `differentiable`.
    """
    if _mode.graph:
        raise RuntimeError("inside differentiable() operations in place are refused: write a = a + b instead of a += b")


def is_watched() -> bool:
    """Whether torch is doing something with operations other than running them."""
    return in_transform() or bool(has_dispatch_mode())
