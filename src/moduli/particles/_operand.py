"""The operands of whole-model operations: particles read where they are, numbers, and tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from moduli._torch import is_fake
from moduli.labels import Tensor as LabelledTensor
from moduli.layout import (
    Layout,
    Reading,
    any_sharded,
    cut_like,
    diff,
    is_sharded,
    layout_of,
    read,
    show_pieces,
)

from ._config import find_acting, fits, policies_of
from ._record import ParticleRecord, Pending, build, record_of, refuse_wrapped
from ._skeleton import PENDING, RECORD, State, capture, facts_of
from ._species import bring_up, give_version
from .errors import StructureError
from .mtype import ParamConfig

if TYPE_CHECKING:
    from .base import VersionKernelImp


_REQUIRES_GRAD = attrgetter("requires_grad")
_PLAIN = frozenset((nn.Parameter, Tensor))


class Operand:
    """One particle in an operation: its values where they are, and what is needed to make another one like it."""

    # The version of the species that the operand was read at; None while there is none.
    at: VersionKernelImp | None
    # The values of parameters, one per entry of the layout, without a number that they are still to be multiplied with.
    tensors: list[Tensor]
    buffers: list[Tensor]

    def __init__(
        self,
        module: nn.Module,
        scope: tuple[str, ...] | None = None,
        wrapped: bool = False,
        live: bool = False,
        spare: bool = False,
    ) -> None:
        # Patterns of names, if the operation is to act on those only.
        self.module, self.scope = module, scope
        # Whether the tensors may be written over, because nothing refers to them after the operation.
        self.spare = spare
        self.scale: float = 1
        # The places of buffers that take part like parameters.
        self.acting: tuple[int, ...] = ()
        # A result that was not looked into yet; otherwise the module is read.
        self.reading: Reading | None = None
        self.record: ParticleRecord | None = None
        pending: Pending | None = module.__dict__.get(PENDING)
        if pending is not None and (live or pending.version.next_version is not None):
            build(module)
            pending = None
        self.pending = pending
        if pending is not None:
            self.structure, self.buffers, self.at = pending.structure, pending.buffers, pending.version
            # Another thread may multiply the number in, unless the result exists only inside this expression.
            self.tensors = pending.tensors if spare else pending.values()
            self.scale = pending.scale
        else:
            self.record = record_of(module)
            if not wrapped:
                refuse_wrapped(module, module)
            self.reading = reading = self._read(self.record)
            self.structure, self.tensors, self.buffers = reading.structure, reading.parameters, reading.buffers
        if self.buffers:
            self.acting = find_acting(self.policies(), self.buffers)

    def _read(self, record: ParticleRecord) -> Reading:
        """Read the module at the newest version of its species, whatever other threads edit meanwhile."""
        while True:
            # Asked before the module is read: an edit that comes between is noticed by the version.
            version = self.at = record.version
            reading = read(self.module)
            if "torch.distributed.fsdp" in sys.modules and show_pieces(reading.modules):
                reading = read(self.module)
            if version is None or (version.next_version is None and record.looks_like(reading)):
                return reading
            bring_up(self.module)

    @property
    def layout(self) -> Layout:
        """The layout of the parameters."""
        return self.structure.layout

    @property
    def sharded(self) -> bool:
        """Whether several processes hold pieces of some parameters."""
        return not _PLAIN.issuperset(map(type, self.tensors)) and any_sharded(self.tensors)

    @property
    def entries(self) -> Sequence[Any]:
        """What the operation acts on: the entries of the layout, and those of buffers that take part."""
        layout = self.structure.layout
        return (*layout.entries, *(layout.buffers[place] for place in self.acting)) if self.acting else layout.entries

    @property
    def lags(self) -> bool:
        """Whether an edit was made since the operand was read, from which it would differ."""
        return self.at is not None and self.at.next_version is not None

    def version(self, states: list[State]) -> Any:
        """The version of the species, which begins now if there was none."""
        if self.reading is not None and self.record is not None:
            if self.at is None:
                self.at = give_version(self.module, self.record, self.reading, states)
            elif self.record.structure is self.reading.structure:
                self.record.states = states
        return self.at

    def states(self) -> list[State]:
        """The plain attributes of every module."""
        if self.pending is not None:
            return self.pending.states
        return [] if self.reading is None else capture(self.reading.modules, self.reading)

    def flags(self) -> tuple[bool, ...]:
        """Which parameters require gradients."""
        return self.pending.flags if self.pending is not None else tuple(map(_REQUIRES_GRAD, self.tensors))

    def kinds(self) -> dict[int, type[nn.Parameter]]:
        """The classes of parameters that are not plain ones."""
        if self.pending is not None:
            return self.pending.kinds
        found: dict[int, type[nn.Parameter]] = {}
        if _PLAIN.issuperset(map(type, self.tensors)):
            return found
        for place, held in enumerate(self.tensors):
            kind = type(held)
            if kind in _PLAIN or is_fake(held):
                continue
            if is_sharded(kind):
                kind = nn.Parameter  # which makes a DTensor of a DTensor
            elif not issubclass(kind, nn.Parameter):
                raise StructureError(
                    f"{self.layout.entries[place].name!r} is a {kind.__name__}; arithmetic on whole models works on plain "
                    "tensors and on DTensors"
                )
            found[place] = kind
        return found

    def parameters(self) -> list[Tensor]:
        """The values of parameters, one per entry of the layout."""
        if self.scale != 1 and self.pending is not None:
            self.tensors, self.scale = self.pending.values(), 1
        return self.tensors

    def values(self) -> list[Tensor]:
        """One tensor per entry that the operation acts on."""
        return self.unscaled() if self.scale == 1 else [*self.parameters(), *self.unscaled()[len(self.tensors) :]]

    def unscaled(self) -> list[Tensor]:
        """The same, without a number that parameters are still to be multiplied with."""
        return [*self.tensors, *(self.buffers[place] for place in self.acting)] if self.acting else self.tensors

    def parameter(self, place: int) -> nn.Parameter:
        """One parameter itself."""
        if self.pending is not None:
            build(self.module)
            return Operand(self.module).tensors[place]  # type: ignore[return-value]
        return self.tensors[place]  # type: ignore[return-value]

    def find_labelled(self) -> dict[str, Any]:
        """The axes of labelled tensors, by dotted name."""
        found: dict[str, Any] = {}
        for place in facts_of(self.structure).labelling:
            if self.pending is not None:
                labels = getattr(self.pending.states[place].get("_labelled"), "value", None)
            else:
                labels = self.reading.modules[place].__dict__.get("_labelled")  # type: ignore[union-attr]
            if labels:
                path = self.structure.modules[place].path
                found |= {f"{path}.{key}" if path else key: axes for key, axes in labels.values()}
        return found

    def config(self) -> dict[int, ParamConfig]:
        """The configurations of parameters that have one, by place in the layout."""
        found: dict[int, ParamConfig] = {}
        version = self.at
        if version is not None and version.data.species.configured:
            places = {entry.name: place for place, entry in enumerate(self.layout.entries)}
            names = version.data.names
            plain = ParamConfig()
            found = {
                places[names[pid]]: config
                for pid, config in version.data.config.items()
                if config != plain and names[pid] in places
            }
        if self.scope is not None:
            for place, entry in enumerate(self.layout):
                if not any(fits(name, self.scope) for name in entry.names):
                    found[place] = ParamConfig(operational=False)
        return found

    def find_inert(self) -> set[int]:
        """The places of parameters that take no part in operations."""
        return {place for place, config in self.config().items() if not config.operational}

    def places(self) -> list[int]:
        """The places of parameters that take part in operations."""
        inert = self.find_inert()
        return [place for place in range(len(self.entries)) if place not in inert]

    def policies(self, scoped: bool = True) -> list[str]:
        """What becomes of each buffer."""
        states = self.pending.states if self.pending is not None else [vars(m) for m in self.reading.modules]  # type: ignore[union-attr]
        found = policies_of(self.structure, states)
        if scoped and self.scope is not None:
            for place, entry in enumerate(self.layout.buffers):
                if found[place] == "operate" and not fits(entry.name, self.scope):
                    found[place] = "copy"
        return found


def inert_parameters(module: nn.Module) -> frozenset[int]:
    """Which parameters of a module take no part in operations, by place in its layout.

    Example:
        >>> from moduli.particles import adopt, inert_parameters
        >>> net = adopt(nn.Linear(2, 1))
        >>> net.set_param_config(operational=False, name="bias")
        >>> inert_parameters(net)
        frozenset({1})
    """
    record = module.__dict__.get(RECORD)
    version = None if record is None else record.version
    if version is None or not version.data.species.configured:
        return frozenset()
    return frozenset(Operand(module, wrapped=True).find_inert())


def buffer_policies(module: nn.Module) -> dict[str, str]:
    """What becomes of each buffer of a module in the results of operations, by name; see `buffer_policy`.

    Example:
        >>> from moduli.particles import adopt, buffer_policies, buffer_policy
        >>> net = buffer_policy(adopt(nn.BatchNorm1d(2)), "operate", "running_*")
        >>> buffer_policies(net)
        {'running_mean': 'operate', 'running_var': 'operate', 'num_batches_tracked': 'copy'}
    """
    seen = read(module)
    found = policies_of(seen.structure, [vars(each) for each in seen.modules])
    return {entry.name: policy for entry, policy in zip(seen.structure.layout.buffers, found, strict=True)}


def matching_values(module: nn.Module, other: nn.Module) -> list[Tensor]:
    """The parameters of another model, in the order of this one's layout, with labels in the order that they have here.

    Args:
        module: A module.
        other: A module of the same structure.

    Raises:
        StructureError: If the structures or labels differ, with the first difference.

    Example:
        >>> from moduli.particles import adopt, matching_values
        >>> a, b = adopt(nn.Linear(2, 1)), adopt(nn.Linear(2, 1))
        >>> matching_values(a, b)[1] is b.bias
        True
    """
    return pair(Operand(module, wrapped=True), Operand(other, wrapped=True))[1].parameters()


def pair(left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """Bring two operands together: both at the newest version, of one structure, with labels in the order of the left.

    Raises:
        StructureError: If they differ, with the first difference.
    """
    while left.lags or right.lags:
        # To bring up one side may have noticed an edit that the other side has to follow.
        left, right = (
            Operand(each.module, each.scope, each.record is not None and each.record.wrapped) if each.lags else each
            for each in (left, right)
        )
    ours, theirs = left.layout, right.layout
    refused = f"cannot combine {type(left.module).__name__} and {type(right.module).__name__}"
    moved = _align(left, right)
    if left.buffers or right.buffers:
        _pair_buffers(left, right)
    if ours is not theirs and ours.entries != theirs.entries:
        if moved:
            pairs = zip(theirs, right.tensors, strict=True)
            theirs = layout_of((name, tensor) for entry, tensor in pairs for name in entry.names)
        if ours.fingerprint != theirs.fingerprint:
            raise StructureError(
                f"{refused}: {diff(ours, theirs)}; the left is {_describe(left.module)}, the right is {_describe(right.module)}. "
                "If one is an older version of the other, call its touch(), or take its values over with "
                "moduli.particles.migrate; otherwise build both from the same structure and convert them to one dtype"
            )
        for x, y in zip(ours, theirs, strict=True):
            if x.device != y.device:
                raise StructureError(
                    f"{refused}: {x.name!r} is on {x.device} on the left and on {y.device} on the right; move one of them with "
                    ".to()"
                )
    if left.sharded or right.sharded:
        _check_pieces(left, right)
    return left, right


def _pair_buffers(left: Operand, right: Operand) -> None:
    """Let the buffers that take part on the left meet those of the right.

    Raises:
        StructureError: If only one of the operands says that a buffer does, or has it.
    """
    ours, theirs = (
        {e.name: p for e, p in zip(o.layout.buffers, o.policies(False), strict=True)} for o in (left, right)
    )
    for name in (*ours, *theirs):
        if (ours.get(name) == "operate") != (theirs.get(name) == "operate"):
            told = [f"has the policy {held[name]!r}" if name in held else "is missing" for held in (ours, theirs)]
            raise StructureError(
                f"the buffer {name!r} {told[0]} on the left and {told[1]} on the right; say "
                "moduli.particles.buffer_policy for both"
            )
    places = {entry.name: place for place, entry in enumerate(right.layout.buffers)}
    entries = [left.layout.buffers[place] for place in left.acting]
    right.acting = tuple(places[entry.name] for entry in entries)
    for entry, place in zip(entries, right.acting, strict=True):
        if right.buffers[place].shape != entry.shape:
            raise StructureError(
                f"the buffer {entry.name!r} has shape {entry.shape} on the left and "
                f"{tuple(right.buffers[place].shape)} on the right"
            )


def _check_pieces(left: Operand, right: Operand) -> None:
    """Refuse parameters that processes hold in other pieces on the left than on the right."""
    for entry, ours, theirs in zip(left.layout, left.tensors, right.tensors, strict=True):
        where = [_describe_pieces(each) for each in (ours, theirs)]
        if where[0] != where[1]:
            raise StructureError(
                f"cannot combine {type(left.module).__name__} and {type(right.module).__name__}: {entry.name!r} is "
                f"{where[0]} on the left and {where[1]} on the right; wrap both alike, or redistribute one"
            )


def _describe_pieces(tensor: Any) -> str:
    if not is_sharded(tensor):
        return "whole (no DTensor)"
    return f"a DTensor placed {tuple(tensor.placements)} on {tensor.device_mesh}"


def _align(left: Operand, right: Operand) -> bool:
    """Put the axes and labels of the right operand in the order that the left one has; whether any moved."""
    ours = left.find_labelled()
    theirs = right.find_labelled() if ours else ours
    if ours == theirs or not theirs:
        return False
    shapes = {name: entry.shape for entry in left.layout for name in entry.names}
    shapes |= {entry.name: entry.shape for entry in left.layout.buffers}
    tensors, buffers, moved = list(right.parameters()), list(right.buffers), False
    tables: list[tuple[Sequence[Any], list[Tensor]]] = [
        (right.layout.entries, tensors),
        (right.layout.buffers, buffers),
    ]
    for entries, held in tables:
        for place, entry in enumerate(entries):
            axes, wanted = theirs.get(entry.name), ours.get(entry.name)
            if axes is None or wanted is None or axes == wanted:
                continue
            try:
                held[place] = align(entry.name, held[place], axes, wanted, shapes[entry.name])
            except StructureError as error:
                raise StructureError(
                    f"cannot combine {type(left.module).__name__} and {type(right.module).__name__}: {error}"
                ) from error
            moved = True
    right.tensors, right.buffers, right.spare = tensors, buffers, False
    return moved


def align(name: str, source: Tensor, axes: Any, wanted: Any, shape: tuple[int, ...]) -> Tensor:
    """A labelled tensor with its axes and labels in another order, in which it has a shape.

    Raises:
        StructureError: If they are not the same axes and labels.
    """
    try:
        if len(shape) != source.dim():
            raise ValueError(f"can't align {source.dim()} axes to {len(shape)}")
        return LabelledTensor(source, axes.dims(tuple(source.shape))).align_to(wanted.dims(tuple(shape))).data
    except ValueError as error:
        raise StructureError(f"{name!r} is labelled differently on the left and on the right: {error}") from error


def _describe(module: nn.Module) -> str:
    pending = module.__dict__.get(PENDING)
    version = pending.version if pending is not None else record_of(module).version
    if version is None:
        return "at version 0"
    return f"at version {version.data.number}" + ("" if version.is_newest else " (not the newest)")


def read_number(other: Any) -> Any:
    """A number or tensor as torch takes it, or None if it is neither.

    Example:
        >>> from moduli.particles import read_number
        >>> read_number(np.float32(0.5)), read_number("half")
        (0.5, None)
    """
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
    inert = left.find_inert()
    for place, (entry, held) in enumerate(zip(left.entries, left.unscaled(), strict=True)):
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
        parts.append(cut_like(value.expand(entry.shape), held))
    return parts


def check_kept(name: str, dtype: torch.dtype, value: Any, divides: bool, owner: str = "") -> None:
    """Check that an operation keeps the dtype of a parameter, before anything is computed.

    Args:
        name: The parameter.
        dtype: What it holds.
        value: The other operand: a number or a tensor.
        divides: Whether the values become fractions, even of whole numbers.
        owner: What has the method that leaves a parameter out.

    Raises:
        TypeError: If it would become another kind of number.

    Example:
        >>> from moduli.particles import check_kept
        >>> check_kept("weight", torch.float32, 0.5, divides=False)
    """
    if dtype.is_complex:
        return
    turned = isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())
    real = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    if turned or (not dtype.is_floating_point and (real or divides)):
        raise TypeError(
            f"the operation would turn {name!r} from {dtype} into another kind of number; convert the model first, or leave "
            f"the parameter out with {owner}set_param_config(operational=False, name={name!r})"
        )
