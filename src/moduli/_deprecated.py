"""Names of the release before: each still gives what it gave, and a warning with the name it has now."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any


def rename(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that knows its old names.

    Args:
        module: `__name__` of the module.
        names: From each old name to the one it has now, both in the same module.

    Example:
        >>> import warnings
        >>> from moduli import linalg
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     linalg.Sum is linalg.OperatorSum
        True
        >>> print(caught[0].message)
        moduli.linalg.Sum is called moduli.linalg.OperatorSum since 0.2 and goes in 0.3
    """

    def __getattr__(name: str) -> Any:
        now = names.get(name)
        if now is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} is called {module}.{now} since 0.2 and goes in 0.3", DeprecationWarning, stacklevel=2
        )
        return getattr(sys.modules[module], now)

    return __getattr__


def move(module: str, to: str, names: Collection[str], since: str = "0.2", until: str = "0.3") -> Callable[[str], Any]:
    """A module's `__getattr__` that finds names where they are now.

    Args:
        module: `__name__` of the module.
        to: The name of the module that has them.
        names: The names.
        since: The release that moved them.
        until: The release in which the old place goes.

    Example:
        >>> import warnings
        >>> from moduli import particles
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     print(particles.ParticleModule.__name__)
        ParticleModule
        >>> print(caught[0].message)
        moduli.particles.ParticleModule is moduli.compat.nytorch.ParticleModule since 0.2 and goes in 0.3
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        told = f"{module}.{name} is {to}.{name} since {since} and goes in {until}"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(to), name)

    return __getattr__
