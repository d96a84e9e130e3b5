"""The abstract core of nytorch, for species of one's own: what versions, particles and edits consist of.

* `VersionData` and `ParticleData` are what a version and a particle consist of;
* `VersionUpdater` and `ParticleUpdater` are one edit, as seen by the species and by a particle;
* `VersionKernel` and `ParticleKernel` run them, all or nothing;
* `Particle` and `Product` are the two forms of a value: a whole object, and the light form that arithmetic runs on.

The classes of `moduli.particles` are registered with these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from ...particles import InPlaceOperators, Operators
from ...particles.base import NytoModuleBase, ParticleDataImp, VersionDataImp
from ...particles.edits import ParticleEdit, VersionEdit
from ...particles.kernel import ParticleKernel as ParticleKernel
from ...particles.kernel import VersionKernel as VersionKernel
from ...particles.module import ParamProduct

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
        """A deep copy."""

    @abstractmethod
    def init_kernel(self, kernel: VersionKernel) -> None:
        """Prepare the version that is about to hold this metadata."""

    @abstractmethod
    def init_particle(self, pdata: Tpdata) -> None:
        """Put a particle's data in order when it enters the version."""


class ParticleData(ABC, Generic[Tvdata, Tpdata]):
    """What one particle consists of.

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
        """A copy that refers to the same parameters."""

    @abstractmethod
    def init_kernel(self, kernel: ParticleKernel) -> None:
        """Prepare the particle kernel that is about to hold this data."""


class VersionUpdater(ABC, Generic[Tvdata, Tpdata]):
    """An edit, as the species sees it. Its methods are called in the order below.

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
        """Make the metadata of the next version, and what brings particles there."""


class ParticleUpdater(ABC, Generic[Tvdata, Tpdata]):
    """An edit, as a particle sees it. The setters are called once, in the order below, and `run` once per particle.

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
        """Bring one particle to the next version, or raise and leave it as it was."""


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
        """The particle with these values."""

    @abstractmethod
    def clone(self) -> Self:
        """A product with copies of the values."""

    @abstractmethod
    def rand(self) -> Self:
        """A product with values drawn uniformly from [0, 1)."""

    @abstractmethod
    def randn(self) -> Self:
        """A product with values drawn from the standard normal distribution."""


class Particle(InPlaceOperators, ABC, Generic[Tproduct]):
    """A whole object seen as one point of its species' space.

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
        """The product with this particle's values."""

    @abstractmethod
    def product_(self, product: Tproduct) -> Self:
        """Copy the values of a product into this particle."""

    def clone(self) -> Self:
        """A particle with copies of the values."""
        product: Any = self.product()
        return product.clone().particle()  # type: ignore[no-any-return]

    def rand(self) -> Self:
        """A particle with values drawn uniformly from [0, 1)."""
        product: Any = self.product()
        return product.rand().particle()  # type: ignore[no-any-return]

    def randn(self) -> Self:
        """A particle with values drawn from the standard normal distribution."""
        product: Any = self.product()
        return product.randn().particle()  # type: ignore[no-any-return]

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        if isinstance(other, Particle):
            other = other.product()
        made = fn(other, self.product()) if reflected else fn(self.product(), other)
        return made.particle()

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return fn(self.product()).particle()

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        if isinstance(other, Particle):
            other = other.product()
        return self.product_(fn(self.product(), other))


def _takes_part(config: Any) -> bool:
    return bool(getattr(config, "operational", True))


VersionData.register(VersionDataImp)
ParticleData.register(ParticleDataImp)
VersionUpdater.register(VersionEdit)  # type: ignore[type-abstract]
ParticleUpdater.register(ParticleEdit)
Product.register(ParamProduct)
Particle.register(NytoModuleBase)
