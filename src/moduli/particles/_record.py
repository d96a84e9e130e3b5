"""What a module knows about itself as a particle, and results that are not yet modules.

A `Record` belongs to each module of ours: its species and version, what was read of it last, and where its root is. It
refers to the root weakly and to no other module, so particles contain no reference cycles.

A `Lazy` is the result of an operation before anybody looked inside: vectors of values, and a template. The module that
holds one is an empty shell, which is built at the first access to anything in it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from . import _pool
from ._pool import Slab
from ._template import LAZY, RECORD, Memory, Template, Walk, read, recognised, renewed, walk

if TYPE_CHECKING:
    from .base import VersionKernelImp

__all__ = ["Event", "Lazy", "Record", "Species", "Unborn", "build", "inspect", "record_of", "transformed"]


class Event(NamedTuple):
    """One edit of a species: which version it made, in words, and the names it added and removed."""

    number: int
    sentence: str
    added: frozenset[str]
    removed: frozenset[str]


class Species:
    """All particles derived from each other: the edits so far, and whether any parameter was configured."""

    __slots__ = ("__weakref__", "configured", "events")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.configured = False


class Unborn:
    """The first version of a species before anybody asked for it. All its particles refer to this one object.

    Attributes:
        species: The species.
        version: The version, once it was made; a particle that sees it refers to it from then on.
        uid: What identifies it in pickles, once it was in one.
        config: Configurations by name that were found in a pickle.
    """

    __slots__ = ("__weakref__", "config", "species", "uid", "version")

    def __init__(self) -> None:
        self.species = Species()
        self.version: VersionKernelImp | None = None
        self.uid: str | None = None
        self.config: dict[str, Any] = {}


class Record:
    """What a module knows about itself as a particle."""

    __slots__ = (
        "__weakref__", "busy", "flats", "kernel", "memory", "order", "pointers", "quick", "root", "slab", "version", "wrapped",
    )  # fmt: skip

    def __init__(self, version: VersionKernelImp | Unborn | None = None) -> None:
        # None until another particle is derived from this one, or somebody asks for its version.
        self.version = version
        self.memory: Memory | None = None
        # The module at the top of the particle; None when it is the module itself.
        self.root: weakref.ref[nn.Module] | None = None
        self.wrapped = False
        # Whether an edit is under way, so that the steps it consists of are not edits of their own.
        self.busy = False
        self.order: dict[str, None] = {}
        self.kernel: weakref.ref[Any] | None = None
        # The vectors that the parameters were views of when the module was built, and where each was.
        self.slab: Slab | None = None
        self.pointers: list[int] = []
        self.flats: list[Tensor] = []
        # What the short way compares the module with.
        self.quick: Any = None

    def __del__(self) -> None:
        # Views go first, so that nobody holds the vectors when they are given back.
        self.forget_values()

    def forget(self) -> None:
        """Drop what was read of the module; it is read again at the next operation."""
        self.memory = None
        self.forget_values()

    def remember_values(self, tensors: list[Tensor]) -> None:
        """Keep one-dimensional views of small parameters at hand, with the addresses that tell whether they hold."""
        if self.slab is None and all(map(Tensor.is_contiguous, tensors)):
            self.flats = [tensor.detach().view(-1) for tensor in tensors]
            self.pointers = list(map(Tensor.data_ptr, tensors))

    def forget_values(self) -> None:
        """Let go of views and vectors of the parameters."""
        self.quick = None
        self.flats = []
        if self.slab is not None:
            slab, self.slab = self.slab, None
            slab.release()

    # Copies of a module are particles of the same species; what was read of the original does not hold for them.
    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        twin = Record(self.version)
        twin.order = dict(self.order)
        return twin

    def __reduce__(self) -> Any:
        from ._identity import pack

        return pack(self)


class Lazy:
    """The result of an operation: values, and what to build around them."""

    __slots__ = (
        "buffers", "flags", "graph", "memory", "scale", "shared", "slab", "template", "version",
    )  # fmt: skip

    def __init__(
        self,
        template: Template,
        memory: Memory | None,
        slab: Slab,
        flags: tuple[bool, ...],
        buffers: list[Any],
        version: VersionKernelImp | Unborn,
    ) -> None:
        self.template = template
        self.memory = memory
        self.slab = slab
        slab.users += 1
        self.flags = flags
        self.buffers = buffers
        self.version = version
        # The values are the vectors times this number.
        self.scale: float = 1.0
        # Parameters that are shared with the operand instead of being views of the vectors.
        self.shared: dict[int, nn.Parameter] | None = None
        # Whether the vectors carry a graph, so that parameters are plain views of them.
        self.graph = False

    def __del__(self) -> None:
        self.slab.release()

    def own(self) -> list[Tensor]:
        """The values as vectors that no other result uses."""
        slab = self.slab
        if slab.users > 1:
            vectors = _pool.empty(self.template.layout)
            for vector, source in zip(vectors, slab.vectors, strict=True):
                torch.mul(source, self.scale, out=vector) if self.scale != 1.0 else vector.copy_(source)
            slab.release()
            self.slab = Slab(vectors)
            self.slab.users = 1
        elif self.scale != 1.0:
            for vector in slab.vectors:
                vector.mul_(self.scale)
        self.scale = 1.0
        return self.slab.vectors


def record_of(module: nn.Module) -> Record:
    """The record of a module; a module that was never initialised by us gets one."""
    state = module.__dict__
    record: Record | None = state.get(RECORD)
    if record is None:
        record = state[RECORD] = Record()
    return record


def inspect(module: nn.Module, attributes: bool = True) -> tuple[Record, Memory, list[Tensor], Walk]:
    """Read a live module, or recognise it as read before.

    Returns:
        Its record, its memory, its parameters in the order of the layout, and the walk over it.
    """
    record = record_of(module)
    memory = record.memory
    if memory is not None:
        live = walk(module, memory.limit)
        tensors = recognised(memory, live, attributes)
        if tensors is not None:
            return record, memory, tensors, live
    memory, live, tensors = read(module)
    record.memory = memory
    record.quick = None
    record.flats = []
    return record, memory, tensors, live


def transformed() -> bool:
    """Whether torch is doing something with operations other than running them."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0


def build(shell: nn.Module) -> None:
    """Make a module of a shell."""
    lazy: Lazy = shell.__dict__[LAZY]
    template = lazy.template
    if lazy.graph:
        with torch.enable_grad():
            parameters: list[Any] = template.layout.views(lazy.slab.vectors)
        for place, shared in (lazy.shared or {}).items():
            parameters[place] = shared
        modules = template.shell(shell, parameters, lazy.buffers)
        _adorn(modules, Record(lazy.version))
        del shell.__dict__[LAZY]
        return
    with temporarily_clear_interpreter_stack(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        with torch.no_grad():
            vectors = lazy.own()
            parameters, pointers = parameters_in(template, vectors, lazy.flags, lazy.shared)
        record = Record(lazy.version)
        modules = template.shell(shell, parameters, lazy.buffers)
    _adorn(modules, record)
    if pointers and not lazy.shared:
        record.slab, record.pointers = lazy.slab, pointers
        record.slab.users += 1
    if lazy.memory is not None:
        record.memory = renewed(lazy.memory, template, walk(shell), modules)
    del shell.__dict__[LAZY]


def parameters_in(
    template: Template, vectors: list[Tensor], flags: tuple[bool, ...], shared: dict[int, nn.Parameter] | None = None
) -> tuple[list[Any], list[int]]:
    """Parameters whose values are in vectors, and their addresses.

    On the CPU each has a storage of its own that covers its part of the vector only, so saving one of them writes that
    part only, and each has a version counter of its own. Elsewhere they are copies.
    """
    made: list[Any] = [None] * len(flags)
    direct = True
    for group, vector in zip(template.layout.groups, vectors, strict=True):
        array: Any = None
        if vector.device.type == "cpu" and vector.layout is torch.strided:
            array = vector.numpy() if vector.dtype is not torch.bfloat16 else vector.view(torch.int16).numpy()
        else:
            direct = False
        for place in group.indices:
            entry = template.layout.entries[place]
            if array is None:
                part = vector.narrow(0, entry.offset, entry.numel).clone().view(entry.shape)
            else:
                piece = array[entry.offset : entry.offset + entry.numel].reshape(entry.shape)
                part = torch.from_numpy(piece)
                if entry.dtype is torch.bfloat16:
                    part = part.view(torch.bfloat16)
            made[place] = nn.Parameter(part, requires_grad=flags[place])
    for place, parameter in (shared or {}).items():
        made[place] = parameter
    return made, [p.data_ptr() for p in made] if direct else []


def _adorn(modules: list[nn.Module], record: Record) -> None:
    """Give the modules of a new particle their records."""
    root, *others = modules
    root.__dict__[RECORD] = record
    reference: weakref.ref[nn.Module] | None = None
    for module in others:
        if hasattr(type(module), "_particle_kernel"):
            reference = reference or weakref.ref(root)
            inner = module.__dict__[RECORD] = Record()
            inner.root = reference
