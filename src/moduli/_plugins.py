"""Names that other packages add to moduli by entry points: links, problems and recipes.

A package declares them in its `pyproject.toml`; `examples/link_package` is one:

    [project.entry-points."moduli.links"]
    SoftSign = "softsign:SoftSign"

Listing the names imports nothing. An object is imported when its name is used.
"""

import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal

Kind = Literal["links", "problems", "recipes"]
KINDS: Final[tuple[Kind, ...]] = ("links", "problems", "recipes")


class PluginError(ImportError):
    """An entry point of another package that can't be imported; the text names the package and the reason."""


@cache
def list_plugins(kind: Kind) -> dict[str, EntryPoint]:
    """Return the entry points of one kind by name, in the order of the names of their packages.

    Where two packages declare one name, the first keeps it, and a warning names both.
    """
    points: dict[str, EntryPoint] = {}
    for point in sorted(_scan().select(group=f"moduli.{kind}"), key=lambda each: (name_package(each), each.name)):
        if point.name in points:
            first = name_package(points[point.name])
            warn_of(
                f"{name_package(point)} and {first} both add {point.name!r} to moduli.{kind}: that of {first} is used"
            )
        points.setdefault(point.name, point)
    return points


@cache
def _scan() -> Any:
    """Read the entry points of all installed packages, once: it takes a millisecond for every few packages."""
    return entry_points()


def forget_plugins() -> None:
    """Clear the stored entry points, so that the next listing reads them again: for tests that install packages."""
    _scan.cache_clear()
    list_plugins.cache_clear()


def load_plugin(point: EntryPoint) -> Any:
    """Import the object of an entry point and return it.

    Raises:
        PluginError: If the import raises any error.
    """
    try:
        return point.load()
    except Exception as error:  # the module of another package may raise anything
        fact = f"{point.name!r} of the package {name_package(point)} can't be loaded from {point.value}"
        raise PluginError(f"{fact}: {type(error).__name__}: {error}") from error


def name_package(point: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return point.module.partition(".")[0] if point.dist is None else point.dist.name


def warn_of(fact: str) -> None:
    """Warn about a declaration of another package that is not used."""
    warnings.warn(fact, RuntimeWarning, stacklevel=3)
