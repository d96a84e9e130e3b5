"""Problems by name."""

import difflib
import re

from ..._plugins import list_plugins, load_plugin
from ._base import Problem
from ._data import DigitsLogistic, DigitsMLP, IllLogistic, LeastSquares, Spirals, TextTransformer
from ._functions import PLANE, SCALABLE
from ._mnist1d import Mnist1D, Mnist1DAutoencoder, Mnist1DConv
from ._nist import MODELS, NistFit
from ._physics import Bands, GroundState

LARGEST = 100_000


class UnknownProblemError(LookupError):
    """There is no problem of this name; the message suggests the nearest.

    >>> print(UnknownProblemError("no problem is called 'x'"))
    no problem is called 'x'
    """


# fmt: off
CLASSES: dict[str, type[Problem]] = {
    kind.name: kind
    for kind in (
        LeastSquares, IllLogistic, DigitsLogistic, DigitsMLP, Mnist1D, Mnist1DConv, Mnist1DAutoencoder, Spirals, Bands,
        GroundState, TextTransformer,
    )
}
# fmt: on

NIST = {f"nist-{key.lower()}": key for key in MODELS}


def names() -> list[str]:
    """Return the names of all problems, those of other packages (entry points `moduli.problems`) last.

    Names that end in a number also exist in other sizes.

    >>> "rosenbrock" in names(), "rosenbrock-20" in names()
    (True, True)
    """
    own = [*PLANE, *CLASSES, *NIST, *(f"{name}-{size}" for name, (size, _) in SCALABLE.items())]
    return own + [name for name in list_plugins("problems") if name not in own]


def get(name: str) -> Problem:
    """Return the problem of a name.

    Args:
        name: One of `names()`, or such a name with another number at its end.

    Raises:
        UnknownProblemError: When there is none.
        ImportError: When it is of another package, and can't be imported.

    >>> get("rosenbrock-3").dimension
    3
    >>> get("rosenbrok")
    Traceback (most recent call last):
    ...
    moduli.lab.problems._registry.UnknownProblemError: no problem is called 'rosenbrok'; did you mean 'rosenbrock'?
    """
    if name in PLANE:
        return PLANE[name](name)
    if name in CLASSES:
        return CLASSES[name]()
    if name in NIST:
        return NistFit(NIST[name])
    match = re.fullmatch(r"(.+?)-([0-9]{1,6})", name)
    if match and match[1] in SCALABLE:
        size = int(match[2])
        if not 2 <= size <= LARGEST:
            raise UnknownProblemError(f"{name}: the number of numbers is from 2 to {LARGEST}")
        return SCALABLE[match[1]][1](match[1], size)
    if name in (plugins := list_plugins("problems")):
        from .._reference import as_problem  # imported here, because it imports this package

        return as_problem(load_plugin(plugins[name]), name)
    near = difflib.get_close_matches(name, [*names(), *SCALABLE], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names())}"
    raise UnknownProblemError(f"no problem is called {name!r}{hint}")
