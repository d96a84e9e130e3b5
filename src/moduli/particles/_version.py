"""Versions of a species: each has a structure of `layout`, and the edit that leads to the next one.

Parts of a particle have identifiers that edits do not change, whatever their names: one number for each module of the
structure, one for each entry of its layout. Strong references point to later versions only, so a version that no particle is at
is freed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from moduli.layout import Reading, Structure

from ._moves import list_moves
from ._record import Event, Species
from ._skeleton import RECORD
from ._views import data_of
from .errors import StructureError
from .mtype import ParamConfig

if TYPE_CHECKING:
    from .edits import ParticleEdit


class SlotNames(NamedTuple):
    """The names in the registries of one module, with the identifiers of the parts.

    Attributes:
        modules: The identifier of each child; None for an empty place.
        params: The identifier of each parameter; None for an empty place.
        buffers: Whether each buffer is persistent.
    """

    modules: dict[str, int | None]
    params: dict[str, int | None]
    buffers: dict[str, bool]


class Parts(NamedTuple):
    """The live modules and parameters of a particle, by identifier."""

    modules: dict[int, nn.Module]
    params: dict[int, nn.Parameter]

    def find(self, key: Any) -> Any:
        """Return a parameter by identifier, or a buffer by its module and name; None if there is none."""
        if not isinstance(key, tuple):
            return self.params.get(key)
        module = self.modules.get(key[0])
        return None if module is None else module._buffers.get(key[1])


class Past(NamedTuple):
    """The parts that one edit removed from one particle, stored for `rollback`.

    Attributes:
        start: The number of the version before the edit.
        stop: The number of the version after the edit.
        removed: The removed modules and parameters.
        slots: The former contents of the edited modules.
    """

    start: int
    stop: int
    removed: Parts
    slots: tuple[Any, ...] = ()

    def find(self, key: Any) -> Any:
        """Return a removed parameter by identifier, or a removed buffer by its module and name; None if there is none."""
        for slot in self.slots if isinstance(key, tuple) else ():
            if slot.key == key[0] and key[1] in slot.registries["_buffers"]:
                value = slot.registries["_buffers"][key[1]]
                return value if isinstance(value, Tensor) else None
        return self.removed.find(key)


class Version:
    """One version of a species.

    Attributes:
        structure: The structure of its particles, except for dtypes and devices.
        modules: The identifier of each module of the structure.
        params: The identifier of each entry of the layout.
        species: The species.
        number: The number of edits before.
        configs: The configurations of parameters, by name; others have the default.
        uid: The identifier of the version in pickles, once it was pickled.
        particle_updater: The edit that leads to the next version, or None while this is the newest.
        previous: A weak reference to the version before, or None.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> first = net._version_kernel
        >>> net.w = torch.nn.Parameter(torch.zeros(2))
        >>> first.is_newest, first.next_version is net._version_kernel
        (False, True)
    """

    def __init__(
        self, structure: Structure, modules: Sequence[int], params: Sequence[int], species: Species, number: int = 0
    ) -> None:
        self.structure = structure
        self.modules = tuple(modules)
        self.params = tuple(params)
        self.species = species
        self.number = number
        self.configs: dict[str, ParamConfig] = {}
        self.uid: str | None = None
        self._next: Version | None = None
        # Makes the next version from recorded additions, when it is needed.
        self.unsettled: Callable[[], None] | None = None
        self.particle_updater: ParticleEdit | None = None
        self.previous: weakref.ref[Version] | None = None

    @classmethod
    def of(cls, reading: Reading, configs: dict[str, ParamConfig] | None = None) -> Version:
        """Return the first version of a new species, for a module without history.

        Args:
            reading: The module.
            configs: Configurations by name.
        """
        numbering = Numbering(reading)
        numbering.add_module(0)
        version = cls(reading.structure, numbering.modules, numbering.params, Species())
        version.inherit_configs(reading, range(1, len(reading.modules)))
        if configs:
            version.configs.update(configs)
            version.species.configured = True
        return version

    @property
    def next_version(self) -> Version | None:
        """The version that an edit made from this one, or None while it is the newest."""
        if self.unsettled is not None:
            self.unsettled()
        return self._next

    @property
    def is_newest(self) -> bool:
        """Whether no edit has been made from this version."""
        return self.next_version is None

    def link(self, following: Version, edit: ParticleEdit) -> None:
        """Set the next version.

        Args:
            following: The version.
            edit: The edit that brings particles there.
        """
        following.previous = weakref.ref(self)
        edit.start, edit.stop = self.number, following.number
        # Other threads may read both: they are assigned in one statement without a call in between.
        self._next, self.particle_updater = following, edit

    def particle_update(self, parts: Parts, past: Sequence[Past] = ()) -> Parts:
        """Bring a particle from this version to the next, and return its parts after that.

        Args:
            parts: The parts of the particle.
            past: The parts that earlier edits removed from it.

        Raises:
            StructureError: If this is the newest version.
        """
        following = self.next_version
        if following is None or self.particle_updater is None:
            raise StructureError("this is the newest version; there is nothing to update a particle to")
        return self.particle_updater.run(parts, following, past)

    def locate(self, reading: Reading) -> Parts:
        """Return the parts of a particle that is at this version."""
        params: Any = zip(self.params, reading.parameters, strict=True)
        return Parts(dict(zip(self.modules, reading.modules, strict=True)), dict(params))

    def list_names(self, place: int) -> SlotNames:
        """Return the names in the registries of the module at a position of the structure."""
        entry = self.structure.modules[place]
        return SlotNames(
            {name: None if child < 0 else self.modules[child] for name, child in entry.children},
            {name: None if param < 0 else self.params[param] for name, param in entry.parameters},
            {name: name not in entry.transient for name, _ in entry.buffers},
        )

    def config(self, name: str) -> ParamConfig:
        """Return the configuration of a parameter, which may be changed."""
        return self.configs.setdefault(name, ParamConfig())

    def list_configured(self) -> dict[str, ParamConfig]:
        """Return the configurations that are not the default, by name."""
        return {name: config for name, config in self.configs.items() if config != ParamConfig()}

    def inherit_configs(self, reading: Reading, places: Iterable[int]) -> None:
        """Copy the configurations of modules that are particles themselves.

        Args:
            reading: A particle at this version.
            places: The positions of those modules in the structure.
        """
        names: dict[str, str] = {}
        for place in places:
            record = reading.modules[place].__dict__.get(RECORD)
            if record is None or record.version is None or not record.version.species.configured:
                continue
            names = names or {name: entry.name for entry in self.structure.layout for name in entry.names}
            path = self.structure.modules[place].path
            for name, config in record.version.list_configured().items():
                if f"{path}.{name}" in names:
                    self.configs[names[f"{path}.{name}"]] = config.copy()
                    self.species.configured = True

    def event(self, before: Version, sentence: str, where: tuple[str, ...] = ()) -> Event:
        """Return the event of the edit that made this version.

        Args:
            before: The version before.
            sentence: The edit in words.
            where: The names of the attributes that were edited.
        """
        slots: list[set[Any]] = []
        for layout in (self.structure.layout, before.structure.layout):
            slots.append({(name, entry.shape) for entry in layout for name in entry.names})
            slots[-1] |= {(name, None) for entry in layout.buffers for name in (entry.name, *entry.ties)}
        here, there = slots
        added, removed = (frozenset(name for name, _ in each) for each in (here - there, there - here))
        return Event(self.number, sentence, added, removed, where, time.time(), list_moves(before, self))

    def copy(self, species: Species) -> Version:
        """Return a version of another species with the same structure and configurations, and no successor."""
        version = Version(self.structure, self.modules, self.params, species)
        version.configs = {name: config.copy() for name, config in self.configs.items()}
        return version

    @property
    def data(self) -> Any:
        """The metadata of the version by identifier, in the form of nytorch."""
        return data_of(self)

    def version_update(self, version_updater: Any, particle_data: Any) -> None:
        """Apply an edit in the form of nytorch to a particle at this version.

        Args:
            version_updater: The edit.
            particle_data: The data of the particle.

        Raises:
            StructureError: If an edit was already made from this version.
        """
        if self.next_version is not None:
            raise StructureError(
                "an edit was already made from this version; update the particle to the newest one first"
            )
        particle_data.modules[0]._particle_kernel.version_update(version_updater)


class Numbering:
    """Gives identifiers to the parts of a live model that have none: the next numbers, in the order of assignment if known.

    Args:
        reading: The model.
        before: Its version; identifiers of removed parts are not used again.

    Attributes:
        modules: The identifier of each module, -1 where it has none yet.
        params: The identifier of each parameter, -1 where it has none yet.
    """

    def __init__(self, reading: Reading, before: Version | None = None) -> None:
        self.reading = reading
        self.modules = [-1] * len(reading.modules)
        self.params = [-1] * len(reading.parameters)
        taken: Any = ((), ()) if before is None else (before.modules, before.params)
        self._next_module, self._next_param = (count(max(numbers, default=-1) + 1) for numbers in taken)

    def add_module(self, place: int) -> int:
        """Give identifiers to a module and all parts below it; return that of the module."""
        if self.modules[place] < 0:
            self.modules[place] = next(self._next_module)
            entry, record = self.reading.structure.modules[place], self.reading.modules[place].__dict__.get(RECORD)
            params, children = dict(entry.parameters), dict(entry.children)
            for name in dict.fromkeys((*(() if record is None else record.order), *params, *children)):
                if params.get(name, -1) >= 0:
                    self.add_param(params[name])
                elif children.get(name, -1) >= 0:
                    self.add_module(children[name])
        return self.modules[place]

    def add_param(self, place: int) -> int:
        """Give a parameter an identifier, and return it."""
        if self.params[place] < 0:
            self.params[place] = next(self._next_param)
        return self.params[place]
