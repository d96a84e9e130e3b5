"""Deprecated names: each returns the object that it returned before, and warns with its current name."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection
from typing import Any


def move(module: str, to: str, names: Collection[str], *, since: str, until: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose names have moved to another one; it warns with the current name.

    Args:
        module: `__name__` of the module.
        to: `__name__` of the module that has the names now.
        names: The names that have moved.
        since: The release that moved them.
        until: The release that removes the old names.

    Returns:
        A function from a name to the object; it raises AttributeError for other names.

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
        message = f"{module}.{name} is {to}.{name} since {since} and goes in {until}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(to), name)

    return __getattr__
