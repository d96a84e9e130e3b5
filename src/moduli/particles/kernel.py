"""Versions: which edits lead from one structure of a species to the next, and what brings particles along.

A species of particles has versions, each a `VersionKernel` that holds the metadata of the structure at that time. An
edit links a new version behind the newest one, together with an updater that repeats the edit on any particle which is
still at the old version. Links that count point forward only, so a version that no particle is at is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from moduli.layout import Guard

from .._deprecated import move as _move
from .errors import StructureError

__getattr__ = _move(
    __name__,
    "moduli.compat.nytorch",
    ("VersionData", "ParticleData", "VersionUpdater", "ParticleUpdater", "Product", "Particle"),
    since="0.3",
    until="0.4",
)


class VersionKernel:
    """One version of a species.

    Attributes:
        next_version: The version that an edit made from this one, or None while it is the newest.
        particle_updater: What brings particles there.
        previous: A weak reference to the version that this one was made from, or None.
        data: The metadata of this version.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> first = net._version_kernel
        >>> net.w = torch.nn.Parameter(torch.zeros(2))
        >>> first.is_newest, first.next_version is net._version_kernel
        (False, True)
    """

    def __init__(self, data: Any) -> None:
        self._next: VersionKernel | None = None
        # Makes the next version of edits that were made already, when it is asked for.
        self.unsettled: Callable[[], None] | None = None
        self.particle_updater: Any = None
        self.previous: weakref.ref[VersionKernel] | None = None
        data.init_kernel(self)
        self.data = data

    @property
    def next_version(self) -> VersionKernel | None:
        """The version that an edit made from this one, or None while it is the newest."""
        if self.unsettled is not None:
            self.unsettled()
        return self._next

    @next_version.setter
    def next_version(self, version: VersionKernel | None) -> None:
        self._next = version

    @property
    def is_newest(self) -> bool:
        """Whether no edit has been made from this version."""
        return self.next_version is None

    def version_update(self, version_updater: Any, particle_data: Any) -> None:
        """Link the next version. No particle is moved yet.

        Args:
            version_updater: The edit.
            particle_data: The data of the particle that starts it.

        Raises:
            StructureError: If an edit was already made from this version.
        """
        if self.next_version is not None or self.particle_updater is not None:
            raise StructureError(
                "an edit was already made from this version; update the particle to the newest one first"
            )
        version_updater.set_version_data(self.data)
        version_updater.set_particle_data(particle_data)
        data, updater = version_updater.run(self.data)
        updater.set_version_data(self.data).set_next_version_data(data).set_particle_data(particle_data)
        following: VersionKernel = VersionKernel(data)
        self.link(following, updater)

    def link(self, following: VersionKernel, updater: Any) -> None:
        """Let a version be the next one after this.

        Args:
            following: The version.
            updater: What brings particles there.
        """
        following.previous = weakref.ref(self)
        # Other threads may read meanwhile: there is no call in between.
        self.next_version, self.particle_updater = following, updater

    def particle_update(self, particle_data: Any) -> None:
        """Bring a particle from this version to the next.

        Raises:
            StructureError: If this is the newest version.
        """
        if self.next_version is None or self.particle_updater is None:
            raise StructureError("this is the newest version; there is nothing to update a particle to")
        self.particle_updater.run(particle_data)
        self.next_version.data.init_particle(particle_data)

    def del_next_version(self) -> None:
        """Take back an edit that failed."""
        self.next_version = None
        self.particle_updater = None

    def copy(self) -> VersionKernel:
        """A version that shares this one's metadata and has no successor."""
        return VersionKernel(self.data)


class ParticleKernel:
    """One particle: its version, and its data.

    Attributes:
        version: The version it is at.
        data: What it consists of.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt
        >>> kernel = adopt(torch.nn.Linear(3, 2))._particle_kernel
        >>> [tuple(p.shape) for p in kernel.data.params.values()]
        [(2, 3), (2,)]
    """

    def __init__(self, version: VersionKernel, data: Any) -> None:
        self.version = version
        data.init_kernel(self)
        self.data = data

    def create(self, data: Any) -> ParticleKernel:
        """Another particle of the species, at the same version."""
        return ParticleKernel(self.version, data)

    def version_update(self, version_updater: Any) -> None:
        """Make an edit: a new version, and this particle brought to it; if either fails, neither happens."""
        self.particle_update()
        version, data = self.version, self.data
        with Guard(deferred=True) as guard:
            version.version_update(version_updater, data)
            guard.add(version.del_next_version)
            version.particle_update(data)
            if version.next_version is not None:
                self.version = version.next_version

    def particle_update(self) -> None:
        """Bring the particle to the newest version, through all those in between."""
        while self.version.next_version is not None:
            self.version.particle_update(self.data)
            self.version = self.version.next_version

    def detach(self) -> ParticleKernel:
        """The same data as a particle of a new species, which starts with a copy of this version's metadata."""
        data = self.version.data.copy()
        version: VersionKernel = VersionKernel(data)
        return ParticleKernel(version, self.data.copy(data))
