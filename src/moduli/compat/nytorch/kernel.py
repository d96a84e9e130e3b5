"""The abstract core of nytorch, to define other species: classes of versions, particles and edits.

* `VersionData` and `ParticleData` are the data of a version and of a particle;
* `VersionUpdater` and `ParticleUpdater` are the two parts of an edit, for the species and for each particle;
* `VersionKernel` and `ParticleKernel` run them, all or nothing;
* `Particle` and `Product` are the two forms of a value: a whole object, and the light form that arithmetic runs on.

The classes of `moduli.particles` are registered with these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from moduli.layout import Guard

from ...particles import InPlaceOperators, Operators, StructureError
from ...particles.edits import ParticleEdit
from ...particles.module import ParamProduct
from .base import NytoModuleBase, ParticleDataImp, ParticleKernelImp, VersionDataImp, VersionKernelImp
from .particle_updater import ParticleEditView
from .version_updater import VersionEdit

Tvdata = TypeVar("Tvdata")
Tpdata = TypeVar("Tpdata")
Tproduct = TypeVar("Tproduct")
Tparticle = TypeVar("Tparticle")


class VersionData(ABC, Generic[Tvdata, Tpdata]):
    """The metadata of one version of a species. Once made it does not change: the next version gets a changed copy.

    Example:
        >>> from moduli.compat.nytorch.kernel import VersionData
        >>> class Names(VersionData):
        ...     def __init__(self, names): self.names = names
        ...     def copy(self): return Names(list(self.names))
        ...     def init_kernel(self, kernel): pass
        ...     def init_particle(self, pdata): pass
        >>> Names(["w"]).copy().names
        ['w']
    """

    @abstractmethod
    def copy(self) -> Tvdata:
        """Return a deep copy."""

    @abstractmethod
    def init_kernel(self, kernel: VersionKernel) -> None:
        """Prepare the version that will have this metadata."""

    @abstractmethod
    def init_particle(self, pdata: Tpdata) -> None:
        """Put a particle's data in order when it enters the version."""


class ParticleData(ABC, Generic[Tvdata, Tpdata]):
    """The parts of one particle.

    Example:
        >>> from moduli.compat.nytorch.kernel import ParticleData
        >>> class Values(ParticleData):
        ...     def __init__(self, values): self.values = values
        ...     def copy(self, vdata): return Values(dict(self.values))
        ...     def init_kernel(self, kernel): pass
        >>> Values({"w": 1.0}).copy(None).values
        {'w': 1.0}
    """

    @abstractmethod
    def copy(self, vdata: Tvdata) -> Tpdata:
        """Return a copy that refers to the same parameters."""

    @abstractmethod
    def init_kernel(self, kernel: ParticleKernel) -> None:
        """Prepare the particle kernel that will have this data."""


class VersionUpdater(ABC, Generic[Tvdata, Tpdata]):
    """The part of an edit that changes the species. Its methods are called in the order below.

    Example:
        >>> from moduli.compat.nytorch.kernel import VersionUpdater
        >>> [name for name in ("set_version_data", "set_particle_data", "run") if name in VersionUpdater.__abstractmethods__]
        ['set_version_data', 'set_particle_data', 'run']
    """

    @abstractmethod
    def set_version_data(self, vdata: Tvdata) -> Self:
        """Receive the metadata of the current version."""

    @abstractmethod
    def set_particle_data(self, pdata: Tpdata) -> Self:
        """Receive the data of the particle that starts the edit."""

    @abstractmethod
    def run(self, vdata: Tvdata) -> tuple[Tvdata, ParticleUpdater[Tvdata, Tpdata]]:
        """Return the metadata of the next version, and the updater that changes particles to it."""


class ParticleUpdater(ABC, Generic[Tvdata, Tpdata]):
    """The part of an edit that changes a particle. The setters are called once, in the order below, and `run` once per particle.

    Example:
        >>> from moduli.compat.nytorch.kernel import ParticleUpdater
        >>> sorted(ParticleUpdater.__abstractmethods__)
        ['run', 'set_next_version_data', 'set_particle_data', 'set_version_data']
    """

    @abstractmethod
    def set_version_data(self, vdata: Tvdata) -> Self:
        """Receive the metadata of the version that particles come from."""

    @abstractmethod
    def set_next_version_data(self, vdata: Tvdata) -> Self:
        """Receive the metadata of the version that particles go to."""

    @abstractmethod
    def set_particle_data(self, pdata: Tpdata) -> Self:
        """Receive the data of the particle that starts the edit."""

    @abstractmethod
    def run(self, pdata: Tpdata) -> None:
        """Change one particle to the next version; if this fails, the particle is not changed."""


class VersionKernel(ABC):  # noqa: B024 - those of modules are registered with it
    """One version of a species: it holds the metadata of the structure at that time.

    Attributes:
        next_version: The version that an edit made from this one, or None while it is the newest.
        particle_updater: The updater that changes particles to that version.
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
        self.next_version: VersionKernel | None = None
        self.particle_updater: Any = None
        data.init_kernel(self)
        self.data = data

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
        self.next_version, self.particle_updater = VersionKernel(data), updater

    def particle_update(self, particle_data: Any) -> None:
        """Change a particle from this version to the next.

        Raises:
            StructureError: If this is the newest version.
        """
        if self.next_version is None or self.particle_updater is None:
            raise StructureError("this is the newest version; there is nothing to update a particle to")
        self.particle_updater.run(particle_data)
        self.next_version.data.init_particle(particle_data)

    def del_next_version(self) -> None:
        """Undo an edit that failed."""
        self.next_version = None
        self.particle_updater = None

    def copy(self) -> VersionKernel:
        """Return a version that shares this one's metadata and has no successor."""
        return VersionKernel(self.data)


class ParticleKernel(ABC):  # noqa: B024 - those of modules are registered with it
    """One particle: its version, and its data.

    Attributes:
        version: The version it is at.
        data: Its data.

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
        """Return another particle of the species, at the same version."""
        return ParticleKernel(self.version, data)

    def version_update(self, version_updater: Any) -> None:
        """Make an edit: a new version, to which this particle is changed; if either fails, nothing changes."""
        self.particle_update()
        version, data = self.version, self.data
        with Guard(deferred=True) as guard:
            version.version_update(version_updater, data)
            guard.add(version.del_next_version)
            version.particle_update(data)
            if version.next_version is not None:
                self.version = version.next_version

    def particle_update(self) -> None:
        """Change the particle to the newest version, through all versions in between."""
        while self.version.next_version is not None:
            self.version.particle_update(self.data)
            self.version = self.version.next_version

    def detach(self) -> ParticleKernel:
        """Return the same data as a particle of a new species, which starts with a copy of this version's metadata."""
        data = self.version.data.copy()
        version: VersionKernel = VersionKernel(data)
        return ParticleKernel(version, self.data.copy(data))


class Product(Operators, ABC, Generic[Tparticle]):
    """The light form of a particle, on which chains of operations run; made and left by `product()` and `particle()`.

    A subclass that defines `unary_operator(fn)`, with `fn(value, config)`, and `binary_operator(other, fn)`, with
    `fn(value, other_value, config)`, has all operators; it may also define operators itself.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt
        >>> net = adopt(torch.nn.Linear(3, 2))
        >>> torch.equal((2 * net.product() + 1).particle().weight, 2 * net.weight + 1)
        True
    """

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        apply = getattr(self, "unary_operator", None)
        if apply is None:
            return super()._unary(fn)
        return apply(lambda value, config: fn(value) if _takes_part(config) else value)

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        apply = getattr(self, "binary_operator", None)
        if apply is None:
            return super()._binary(fn, other, reflected)
        if not isinstance(other, Product):
            return self._unary(lambda value: fn(other, value) if reflected else fn(value, other))
        left, right = (other, self) if reflected else (self, other)
        act: Callable[[Any, Any, Any], Any] = lambda x, y, config: fn(x, y) if _takes_part(config) else x  # noqa: E731
        return getattr(left, "binary_operator")(right, act)  # noqa: B009

    @abstractmethod
    def particle(self) -> Tparticle:
        """Return the particle with these values."""

    @abstractmethod
    def clone(self) -> Self:
        """Return a product with copies of the values."""

    @abstractmethod
    def rand(self) -> Self:
        """Return a product with values drawn uniformly from [0, 1)."""

    @abstractmethod
    def randn(self) -> Self:
        """Return a product with values drawn from the standard normal distribution."""


class Particle(InPlaceOperators, ABC, Generic[Tproduct]):
    """A whole object as one point of the space of its species.

    A subclass says how it becomes a `Product` and takes one over; every operation follows from that.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> from moduli.compat.nytorch.kernel import Particle
        >>> isinstance(NytoModule(), Particle)
        True
    """

    @abstractmethod
    def product(self) -> Tproduct:
        """Return the product with this particle's values."""

    @abstractmethod
    def product_(self, product: Tproduct) -> Self:
        """Copy the values of a product into this particle."""

    def clone(self) -> Self:
        """Return a particle with copies of the values."""
        product: Any = self.product()
        return product.clone().particle()  # type: ignore[no-any-return]

    def rand(self) -> Self:
        """Return a particle with values drawn uniformly from [0, 1)."""
        product: Any = self.product()
        return product.rand().particle()  # type: ignore[no-any-return]

    def randn(self) -> Self:
        """Return a particle with values drawn from the standard normal distribution."""
        product: Any = self.product()
        return product.randn().particle()  # type: ignore[no-any-return]

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        if isinstance(other, Particle):
            other = other.product()
        result = fn(other, self.product()) if reflected else fn(self.product(), other)
        return result.particle()

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return fn(self.product()).particle()

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        if isinstance(other, Particle):
            other = other.product()
        return self.product_(fn(self.product(), other))


def _takes_part(config: Any) -> bool:
    return bool(getattr(config, "operational", True))


VersionKernel.register(VersionKernelImp)
ParticleKernel.register(ParticleKernelImp)
VersionData.register(VersionDataImp)
ParticleData.register(ParticleDataImp)
VersionUpdater.register(VersionEdit)  # type: ignore[type-abstract]
ParticleUpdater.register(ParticleEdit)
ParticleUpdater.register(ParticleEditView)
Product.register(ParamProduct)
Particle.register(NytoModuleBase)
