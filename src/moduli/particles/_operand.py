"""The operands of whole-model operations: particles, whose tensors are read in place, numbers, and tensors."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from moduli.layout import (
    AxesError,
    Layout,
    Reading,
    align,
    any_sharded,
    cut_like,
    diff,
    is_sharded,
    match_name,
    read,
    show_pieces,
)

from ._config import find_acting, policies_of
from ._facts import facts_of
from ._record import ParticleRecord, Pending, build, record_of, refuse_wrapped
from ._skeleton import PENDING, RECORD, State, capture_model
from ._species import bring_up, give_version
from .errors import StructureError
from .mtype import ParamConfig

if TYPE_CHECKING:
    from ._version import Version


_REQUIRES_GRAD = attrgetter("requires_grad")


class Operand:
    """One particle in an operation: its tensors, uncopied, and everything needed to make a particle like it.

    Args:
        source: The particle, or a part of one (see `only`).
        wrapped: Whether it may be inside a `ParticleModule`.
        live: Whether the module itself is needed, not only its values.
        whole: Whether all parameters take part, regardless of their configurations.
    """

    # The version of the species at which the operand was read; None if there is none yet.
    at: Version | None
    # The values of parameters, one per entry of the layout, without the deferred factor `scale`.
    tensors: list[Tensor]
    # An unbuilt result, or the reading of a module.
    held: Pending | Reading

    def __init__(self, source: Any, wrapped: bool = False, live: bool = False, whole: bool = False) -> None:
        self.source = source
        # Patterns of the names that the operation is restricted to; None for all.
        self.scope: tuple[str, ...] | None = None
        module: nn.Module = source
        if not isinstance(source, nn.Module):
            module, self.scope = source.module, source.patterns
        self.module = module
        self.scale: float = 1
        pending: Pending | None = module.__dict__.get(PENDING)
        if pending is not None and (live or pending.version.next_version is not None):
            build(module)
            pending = None
        if pending is not None:
            self.at = pending.version
            self.tensors, self.scale = pending.terms
            self.held = pending
        else:
            if not wrapped:
                refuse_wrapped(module, module)
            self.held = reading = self._read(record_of(module))
            self.tensors = reading.parameters
        self._states: list[State] | None = None
        self.structure, self.buffers = self.held.structure, self.held.buffers
        self.layout: Layout = self.structure.layout
        # Whether some parameters are sharded (DTensor).
        self.sharded = any_sharded(self.tensors)
        # The positions of buffers that take part like parameters.
        self.acting = find_acting(self.policies(), self.buffers) if self.buffers else ()
        # The configurations of parameters that take no part, by position; and, if there are any, the positions of the others.
        self.inert: dict[int, ParamConfig] = {}
        self.places: list[int] | None = None
        if self.scope is not None or (self.at is not None and self.at.species.configured):
            self.inert = self._find_inert()
        if self.inert and not whole:
            self.places = [p for p in range(len(self.tensors) + len(self.acting)) if p not in self.inert]

    def _read(self, record: ParticleRecord) -> Reading:
        """Read the module at the newest version of its species, also if other threads edit meanwhile."""
        while True:
            # Read before the module: an edit in between gives the version a successor, and the loop repeats.
            version = self.at = record.version
            reading, same = record.read(self.module)
            if facts_of(reading.structure).wrapped and show_pieces(reading.modules):
                reading, same = record.read(self.module)
            if version is None or (same and version.next_version is None):
                return reading
            bring_up(self.module)

    def _find_inert(self) -> dict[int, ParamConfig]:
        inert: dict[int, ParamConfig] = {}
        if self.at is not None and self.at.species.configured:
            configs = {name: config for name, config in self.at.configs.items() if not config.operational}
            inert = {place: configs[e.name] for place, e in enumerate(self.layout) if e.name in configs}
        if self.scope is not None:
            for place, entry in enumerate(self.layout):
                if not any(match_name(name, self.scope) for name in entry.names):
                    inert[place] = ParamConfig(operational=False)
        return inert

    @property
    def entries(self) -> list[Any]:
        """The layout's entries on which the operation acts: parameters, then buffers that take part."""
        return self.pick([*self.layout.entries, *(self.layout.buffers[place] for place in self.acting)])

    @property
    def lags(self) -> bool:
        """Whether the species was edited since the operand was read."""
        return self.at is not None and self.at.next_version is not None

    @property
    def is_scalable(self) -> bool:
        """Whether a factor can be deferred: the values are those of an unbuilt result."""
        if not isinstance(self.held, Pending) or self.held.graph or self.held.shared or self.acting or self.inert:
            return False
        if self.sharded:  # torch multiplies no list of DTensors with a number
            return False
        return len(self.tensors) > 0 and facts_of(self.structure).floating

    def pick(self, things: list[Any]) -> list[Any]:
        """Return the items, one per parameter and acting buffer, whose parameter or buffer takes part in the operation."""
        return things if self.places is None else [things[place] for place in self.places]

    def version(self) -> Any:
        """Return the version of the species; the first one is made if there is none."""
        if isinstance(self.held, Reading):
            record = record_of(self.module)
            if self.at is None:
                self.at = give_version(self.module, record, self.held, self.states)
            elif record.structure is self.structure:
                record.states = self.states
        return self.at

    @property
    def states(self) -> list[State]:
        """The plain attributes of every module."""
        if self._states is None:
            self._states = self.held.states if isinstance(self.held, Pending) else self._capture(self.held)
        return self._states

    def _capture(self, reading: Reading) -> list[State]:
        record = record_of(self.module)
        return capture_model(reading, record.states if record.structure is reading.structure else ())

    @property
    def attributes(self) -> list[State]:
        """The plain attributes of every module, live (not captured) if a module was read."""
        return self.held.states if isinstance(self.held, Pending) else [vars(module) for module in self.held.modules]

    @property
    def flags(self) -> tuple[bool, ...]:
        """Whether each parameter requires gradients."""
        return self.held.flags if isinstance(self.held, Pending) else tuple(map(_REQUIRES_GRAD, self.tensors))

    def parameters(self) -> list[Tensor]:
        """Return the values of all parameters, one per entry of the layout."""
        if self.scale != 1:
            self.tensors, self.scale = list(torch._foreach_mul(self.tensors, self.scale)), 1
        return self.tensors

    def unscaled(self) -> list[Tensor]:
        """Return one tensor per entry on which the operation acts, without the deferred factor."""
        if not self.acting:
            return self.pick(self.tensors)
        return self.pick([*self.tensors, *(self.buffers[place] for place in self.acting)])

    def values(self) -> list[Tensor]:
        """Return one tensor per entry on which the operation acts."""
        self.parameters()
        return self.unscaled()

    def policies(self, scoped: bool = True) -> list[str]:
        """Return the policy of each buffer; "copy" for those outside of the scope that would take part."""
        policies = policies_of(self.structure, self.attributes)
        if scoped and self.scope is not None:
            for place, entry in enumerate(self.layout.buffers):
                if policies[place] == "operate" and not match_name(entry.name, self.scope):
                    policies[place] = "copy"
        return policies


def inert_parameters(module: nn.Module) -> frozenset[int]:
    """Return the positions in the layout of the parameters of a module that take no part in operations.

    Example:
        >>> from moduli.particles import adopt, inert_parameters
        >>> net = adopt(nn.Linear(2, 1))
        >>> net.set_param_config(operational=False, name="bias")
        >>> inert_parameters(net)
        frozenset({1})
    """
    record = module.__dict__.get(RECORD)
    return frozenset(Operand(module, wrapped=True).inert if record is not None and record.version is not None else ())


def buffer_policies(module: nn.Module) -> dict[str, str]:
    """Return the policy of each buffer of a module, by name; see `buffer_policy`.

    Example:
        >>> from moduli.particles import adopt, buffer_policies, buffer_policy
        >>> net = buffer_policy(adopt(nn.BatchNorm1d(2)), "operate", "running_*")
        >>> buffer_policies(net)
        {'running_mean': 'operate', 'running_var': 'operate', 'num_batches_tracked': 'copy'}
    """
    reading = read(module)
    policies = policies_of(reading.structure, [vars(each) for each in reading.modules])
    return {entry.name: policy for entry, policy in zip(reading.structure.layout.buffers, policies, strict=True)}


def pair(left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """Return two operands that can be combined: at the newest version, of one structure, with labels in the order of the left.

    Raises:
        StructureError: If they differ, with the first difference.
    """
    while left.lags or right.lags:
        # Bringing one side to the newest version may have found an edit that the other side must follow.
        left, right = (Operand(each.source, wrapped=True) if each.lags else each for each in (left, right))
    ours, theirs = left.layout, _align(left, right)
    if left.buffers or right.buffers:
        _pair_buffers(left, right)
    if ours is not theirs and ours.entries != theirs.entries:
        _check_layouts(left, right, theirs)
    if left.sharded or right.sharded:
        _check_pieces(left, right)
    right.places = left.places
    return left, right


def _check_layouts(left: Operand, right: Operand, theirs: Layout) -> None:
    """Raise StructureError if the structures or devices differ; `theirs` is the aligned layout of the right."""
    ours = left.layout
    if ours.fingerprint != theirs.fingerprint:
        numbers = [0 if each.at is None else each.at.number for each in (left, right)]
        raise StructureError(
            f"{_refuse(left, right)}: {diff(ours, theirs)}; the left is at version {numbers[0]}, the right is at version "
            f"{numbers[1]}. "
            "If one is an older version of the other, call its touch(), or take its values over with "
            "moduli.particles.migrate; otherwise build both from the same structure and convert them to one dtype"
        )
    for x, y in zip(ours, theirs, strict=True):
        if x.device != y.device:
            raise StructureError(
                f"{_refuse(left, right)}: {x.name!r} is on {x.device} on the left and on {y.device} on the right; move one "
                "of them with .to()"
            )


def _pair_buffers(left: Operand, right: Operand) -> None:
    """Set the acting buffers of the right to those with the names of the left's.

    Raises:
        StructureError: If a buffer takes part in only one of the operands, or their shapes differ.
    """
    ours, theirs = (
        {e.name: p for e, p in zip(o.layout.buffers, o.policies(False), strict=True)} for o in (left, right)
    )
    for name in (*ours, *theirs):
        if (ours.get(name) == "operate") != (theirs.get(name) == "operate"):
            texts = [
                f"has the policy {policies[name]!r}" if name in policies else "is missing"
                for policies in (ours, theirs)
            ]
            raise StructureError(
                f"the buffer {name!r} {texts[0]} on the left and {texts[1]} on the right; say "
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
    """Raise StructureError for parameters that are sharded differently on the left and on the right."""
    tensors: list[Any]
    for entry, *tensors in zip(left.layout, left.tensors, right.tensors, strict=True):
        placed = [(t.placements, t.device_mesh) if is_sharded(t) else None for t in tensors]
        if placed[0] != placed[1]:
            ours, theirs = ("whole (no DTensor)" if p is None else f"a DTensor placed {p[0]} on {p[1]}" for p in placed)
            raise StructureError(
                f"{_refuse(left, right)}: {entry.name!r} is "
                f"{ours} on the left and {theirs} on the right; wrap both alike, or redistribute one"
            )


def _refuse(left: Operand, right: Operand) -> str:
    """Return the beginning of the error text for two operands that cannot be combined."""
    return f"cannot combine {type(left.module).__name__} and {type(right.module).__name__}"


def _align(left: Operand, right: Operand) -> Layout:
    """Reorder the axes and labels of the right operand like those of the left one; return its layout after that."""
    try:
        alignment = align(left.layout, right.layout)
    except AxesError as error:
        raise StructureError(f"{_refuse(left, right)}: {error}") from error
    if alignment is None:
        return right.layout
    right.tensors = alignment.reorder_parameters(right.parameters())
    right.buffers = alignment.reorder_buffers(right.buffers)
    return alignment.layout


def read_number(other: Any) -> Any:
    """Return a number or array as one that torch accepts; None if it is neither.

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
    """Return a tensor expanded to the shape of every parameter that takes part.

    Raises:
        StructureError: If it cannot be expanded to the shape of a parameter.
    """
    parts = []
    for entry, own in zip(left.entries, left.unscaled(), strict=True):
        try:
            parts.append(cut_like(value.expand(entry.shape), own))
        except RuntimeError as error:
            raise StructureError(
                f"a tensor of shape {tuple(value.shape)} does not fit {entry.name!r} of shape {entry.shape}: operations keep "
                "the shape of every parameter; use moduli.particles.only to act on some parameters"
            ) from error
    return parts


def check_kept(name: str, dtype: torch.dtype, value: Any, divides: bool, owner: str = "") -> None:
    """Raise if an operation cannot keep the dtype of a parameter, before anything is computed.

    Args:
        name: The parameter.
        dtype: Its dtype.
        value: The other operand: a number or a tensor.
        divides: Whether integers would become fractions.
        owner: The prefix of `set_param_config` in the error, such as `"net."`.

    Raises:
        TypeError: If real values would become complex, or integers fractions.

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
