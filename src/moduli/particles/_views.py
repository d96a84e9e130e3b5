"""The views of particles and versions that nytorch documents, made by `moduli.compat.nytorch` on access.

Only this file of the room imports a room that is below it in the order of rooms; the exception is declared there.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from ._record import record_of

if TYPE_CHECKING:
    from ._version import Version


def kernel_of(root: nn.Module) -> Any:
    """Return the kernel of a particle, the same object as long as it is referenced."""
    record = record_of(root)
    kernel = None if record.kernel is None else record.kernel()
    if kernel is None:
        from ..compat.nytorch import ParticleKernelImp

        kernel = ParticleKernelImp(root)
        record.kernel = weakref.ref(kernel)
    return kernel


def data_of(version: Version) -> Any:
    """Return the metadata of a version by identifier."""
    from ..compat.nytorch import VersionDataImp

    return VersionDataImp(version)
