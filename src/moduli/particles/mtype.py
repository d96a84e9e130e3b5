"""`ParamConfig`: the configuration of a parameter in operations."""

from __future__ import annotations

import copy as _copy
from types import SimpleNamespace

from .._deprecated import move as _move

__getattr__ = _move(
    __name__,
    "moduli.compat.nytorch",
    (
        "ModuleMeta",
        "ROOT_MODULE_ID",
        "ModuleID",
        "ParamID",
        "Module",
        "ParamType",
        "ModuleDict",
        "ParamDict",
        "MetaDict",
        "ConfigDict",
    ),
    since="0.3",
    until="0.4",
)


class ParamConfig(SimpleNamespace):
    """The configuration of one parameter in operations. User-written operations may add and read more attributes.

    Attributes:
        operational: Whether the parameter takes part in operations.
        clone: Whether a parameter that takes no part is cloned into the result; otherwise the result shares it.

    Example:
        >>> from moduli.particles.mtype import ParamConfig
        >>> config = ParamConfig(operational=False)
        >>> config.rate = 0.1
        >>> config.copy().rate, config.copy()
        (0.1, ParamConfig(operational=False, clone=True, rate=0.1))
    """

    def __init__(self, operational: bool = True, clone: bool = True) -> None:
        super().__init__(operational=operational, clone=clone)

    def copy(self) -> ParamConfig:
        """Return a deep copy, with every added attribute."""
        return _copy.deepcopy(self)
