"""The links of a package, and the default `Case` of a link."""

import importlib
import inspect
import pkgutil
from types import ModuleType

from .. import m
from ..optim import Module
from ._problems import Case


def find_links(package: str) -> list[type[Module]]:
    """Return the public links that a package defines, in the order of its modules.

    Args:
        package: The name of a package or module, which is imported with all submodules.

    Raises:
        ImportError: The package, or a module inside it, can't be imported.
        ValueError: It defines no link.

    Example:
        >>> from moduli.testing import find_links
        >>> [link.__name__ for link in find_links("moduli.m.clipping")][:2]
        ['ClipNorm', 'Normalize']
    """
    scopes = [vars(module) for module in _import_all(importlib.import_module(package))]
    links = {
        value: None
        for scope in scopes
        for name, value in scope.items()
        if inspect.isclass(value) and issubclass(value, Module) and not name.startswith("_")
        if value.__module__ == scope["__name__"] and not inspect.isabstract(value)
    }
    if not links:
        raise ValueError(f"{package} defines no links: public classes of moduli.optim.Module")
    return list(links)


def _import_all(module: ModuleType) -> list[ModuleType]:
    inside = pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}.", onerror=_raise)
    return [module, *(importlib.import_module(each.name) for each in inside if not each.name.endswith("__main__"))]


def _raise(name: str) -> None:
    raise ImportError(f"{name} can't be imported", name=name)


def make_case(link: type[Module]) -> Case:
    """Return the case of a link that is made without arguments, followed by `LR(0.01)`.

    Args:
        link: The class. One that needs arguments breaks every law, with a message that says how to give them.

    Example:
        >>> from moduli import m
        >>> from moduli.testing import make_case
        >>> [type(each).__name__ for each in make_case(m.Sign).links()]
        ['Sign', 'LR']
    """

    def make() -> list[Module]:
        try:
            return [link(), m.LR(0.01)]
        except TypeError as error:
            remedy = "return a Case for it from pytest_moduli_case in conftest.py"
            raise TypeError(f"{link.__name__} can't be made without arguments ({error}); {remedy}") from error

    return Case(link.__name__, make, steps=2000, tolerance=1e-2)
