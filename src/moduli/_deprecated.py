"""Names of the release before: each still gives what it gave, and a warning with the name it has now."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection
from typing import Any


def move(module: str, to: str, names: Collection[str], *, since: str, until: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds names where they are now.

    Args:
        module: `__name__` of the module.
        to: The name of the module that has them.
        names: The names.
        since: The release that moved them.
        until: The release in which the old place goes.

    Example:
        >>> import warnings
        >>> from moduli.particles import kernel
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     print(kernel.VersionKernel.__name__)
        VersionKernel
        >>> print(caught[0].message)
        moduli.particles.kernel.VersionKernel is moduli.compat.nytorch.VersionKernel since 0.3 and goes in 0.4
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        told = f"{module}.{name} is {to}.{name} since {since} and goes in {until}"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(to), name)

    return __getattr__
