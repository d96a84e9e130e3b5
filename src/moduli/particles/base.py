"""`NytoModuleBase`, the base class of particles."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401 - for the examples
from torch import nn

from .._deprecated import move as _move
from ._record import record_of as record_of
from ._record import refuse_wrapped
from ._version import Version
from ._views import kernel_of as kernel_of

__getattr__ = _move(
    __name__,
    "moduli.compat.nytorch",
    ("VersionDataImp", "ParticleDataImp", "VersionKernelImp", "ParticleKernelImp", "create_new_group"),
    since="0.3",
    until="0.4",
)


class NytoModuleBase(nn.Module):
    """The base class of particles: of `NytoModule` and of adopted modules.

    Attributes:
        _module_id: The identifier of the module in its particle.
        _particle_kernel: The kernel of the particle; None while a `ParticleModule` wraps it.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net, net.inner = NytoModule(), NytoModule()
        >>> net.is_root, net.inner.is_root, net.inner._module_id
        (True, False, 1)
    """

    @property
    def _particle_root(self) -> nn.Module:
        """The root module of the particle that contains this module."""
        record = record_of(self)
        if record.root is None:
            return self
        root = record.root()
        if root is not None and any(module is self for module in root.modules()):
            return root
        # The root was garbage-collected, or this module was removed from it.
        record.root = None
        return self

    @property
    def is_root(self) -> bool:
        """Whether this module is the root of its particle."""
        return self._particle_root is self

    @property
    def _particle_kernel(self) -> Any:
        from ._species import version_of

        root = self._particle_root
        if record_of(root).wrapped:
            return None
        version_of(root)
        return kernel_of(root)

    @property
    def _module_id(self) -> int:
        from ._species import identify

        root = self._particle_root
        if root is self:
            return 0
        version, reading = identify(root)
        modules = zip(version.modules, reading.modules, strict=True)
        return next(key for key, module in modules if module is self)

    @property
    def _version_kernel(self) -> Version:
        from ._species import version_of

        root = self._particle_root
        refuse_wrapped(self, root)
        return version_of(root)
