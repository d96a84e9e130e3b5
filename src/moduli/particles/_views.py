"""The views that nytorch documents on every particle: made of the classes in `moduli.compat.nytorch`, when they are asked for.

It is the one place of this room that reaches up, declared with the order of the rooms.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from ._record import record_of

if TYPE_CHECKING:
    from ._version import Version


def kernel_of(root: nn.Module) -> Any:
    """Return the kernel of a particle. There is one, as long as something holds it."""
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
