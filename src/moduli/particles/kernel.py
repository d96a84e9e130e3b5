"""The parts of which `moduli.compat.nytorch` makes its kernels: versions, live particles, and edits of their attributes."""

from __future__ import annotations

from .._deprecated import move as _move
from ._editing import edit as edit
from ._modes import is_composing as is_composing
from ._record import build as build
from ._record import record_of as record_of
from ._species import bring_up as bring_up
from ._species import identify as identify
from ._species import settle_journal as settle_journal
from ._version import Parts as Parts
from ._version import Version as Version

__getattr__ = _move(
    __name__,
    "moduli.compat.nytorch",
    (
        "VersionData",
        "ParticleData",
        "VersionUpdater",
        "ParticleUpdater",
        "VersionKernel",
        "ParticleKernel",
        "Product",
        "Particle",
    ),
    since="0.3",
    until="0.4",
)
