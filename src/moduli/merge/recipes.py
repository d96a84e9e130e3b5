"""Recipes by name, with their arguments as options: for files, recipe files, searches and the command line."""

import inspect
from collections.abc import Callable, Mapping
from operator import index
from typing import Any, Final

from torch import Tensor

from ._breadcrumbs import breadcrumbs, crumbs
from ._coefficients import Coefficients, per_model
from ._dare import dare, drops
from ._della import della, ranked_drops
from ._errors import MergeError
from ._karcher import karcher, means
from ._linear import combination, lerp, line, linear
from ._recipe import Recipe, Row
from ._sce import sce, selections
from ._slerp import arc, slerp
from ._soup import soup
from ._stock import shells, stock
from ._task import sums, task_arithmetic, task_vector
from ._ties import elections, ties

__all__ = ["RECIPES", "make_recipe"]


def make_recipe(name: str, count: int, options: Mapping[str, Any]) -> Recipe:
    """The recipe of a name.

    Args:
        name: One of `RECIPES`.
        count: How many models there are, the base included.
        options: Its arguments, as the function of this name takes them.

    Raises:
        MergeError: If there is no such recipe, or the arguments do not fit.

    Example:
        >>> from moduli import merge
        >>> merge.make_recipe("lerp", 2, {"t": 0.5}).coefficients[0]("any.weight")
        0.5
    """
    make = RECIPES.get(name)
    if make is None:
        raise MergeError(f"{name!r} is not a recipe for files; choose from {', '.join(RECIPES)}")
    try:
        return make(count, dict(options))
    except TypeError as error:
        raise MergeError(f"the options of {name!r} do not fit: {error}") from None


def _arguments(function: Callable[..., Any], models: int, options: dict[str, Any]) -> dict[str, Any]:
    """What a function of `moduli.merge` would be called with, its defaults included."""
    bound = inspect.signature(function).bind(*[None] * models, **options)
    bound.apply_defaults()
    return bound.arguments


def _exactly(count: int, wanted: int) -> None:
    if count != wanted:
        raise MergeError(f"this recipe merges {wanted} files, not {count}")


def _linear(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(linear, 1, options)
    weights = given["weights"]
    return combination(per_model([1.0] * count if weights is None else weights, count, "weights"), given["normalize"])


def _soup(count: int, options: dict[str, Any]) -> Recipe:
    _arguments(soup, 1, options)
    return combination(per_model([1.0] * count, count, "weights"), True)


def _lerp(count: int, options: dict[str, Any]) -> Recipe:
    _exactly(count, 2)
    return line(Coefficients(_arguments(lerp, 2, options)["t"], "t"))


def _slerp(count: int, options: dict[str, Any]) -> Recipe:
    _exactly(count, 2)
    given = _arguments(slerp, 2, options)
    if given["angle"] not in ("tensor", "model"):
        raise MergeError(f"angle is {given['angle']!r}; it must be 'tensor' or 'model'")
    return arc(Coefficients(given["t"], "t"), whole=given["angle"] == "model")


def _task_vector(count: int, options: dict[str, Any]) -> Recipe:
    _exactly(count, 2)
    _arguments(task_vector, 2, options)

    def difference(name: str, row: Row) -> Tensor:
        return row[0] - row[1]

    return Recipe(difference, keeps=lambda name: False, elementwise=True)


def _task_arithmetic(count: int, options: dict[str, Any]) -> Recipe:
    return sums(per_model(_arguments(task_arithmetic, 2, options)["scale"], count - 1, "scale"))


def _ties(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(ties, 2, options)
    if given["trim"] not in ("tensor", "model"):
        raise MergeError(f"trim is {given['trim']!r}; it must be 'tensor' or 'model'")
    densities, weights = _shares(given, count - 1)
    scale = Coefficients(given["scale"], "scale")
    return elections(densities, scale, weights, given["normalize"], given["elect"], whole=given["trim"] == "model")


def _dare(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(dare, 2, options)
    if given["generator"] is None:
        raise MergeError(
            "dare drops entries at random; give a number as generator=, so that the file can be made again"
        )
    densities, weights = _shares(given, count - 1)
    scale = Coefficients(given["scale"], "scale")
    seed = index(given["generator"])
    return drops(densities, seed, given["rescale"], given["then"], scale, weights, given["normalize"], given["elect"])


def _shares(given: dict[str, Any], count: int) -> tuple[tuple[Coefficients, ...], tuple[Coefficients, ...]]:
    weights = given["weights"]
    return (
        per_model(given["density"], count, "density", low=0.0, high=1.0),
        per_model([1.0] * count if weights is None else weights, count, "weights"),
    )


def _breadcrumbs(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(breadcrumbs, 2, options)
    densities, weights = _shares(given, count - 1)
    return crumbs(
        densities,
        Coefficients(given["gamma"], "gamma", low=0.0, high=1.0),
        Coefficients(given["scale"], "scale"),
        weights,
        given["then"],
    )


def _della(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(della, 2, options)
    if given["generator"] is None:
        raise MergeError(
            "della drops entries at random; give a number as generator=, so that the file can be made again"
        )
    densities, weights = _shares(given, count - 1)
    return ranked_drops(
        densities,
        given["epsilon"],
        index(given["generator"]),
        Coefficients(given["scale"], "scale"),
        weights,
        given["then"],
    )


def _sce(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(sce, 2, options)
    return selections(
        Coefficients(given["density"], "density", low=0.0, high=1.0), Coefficients(given["scale"], "scale")
    )


def _karcher(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(karcher, 1, options)
    weights = given["weights"]
    return means(
        per_model([1.0] * count if weights is None else weights, count, "weights", low=0.0),
        given["steps"],
        given["tolerance"],
    )


def _stock(count: int, options: dict[str, Any]) -> Recipe:
    _arguments(stock, 2, options)
    if count < 3:
        raise MergeError("stock needs a base and at least two models")
    return shells()


RECIPES: Final[dict[str, Callable[[int, dict[str, Any]], Recipe]]] = {
    "linear": _linear,
    "soup": _soup,
    "lerp": _lerp,
    "slerp": _slerp,
    "task_vector": _task_vector,
    "task_arithmetic": _task_arithmetic,
    "ties": _ties,
    "dare": _dare,
    "stock": _stock,
    "breadcrumbs": _breadcrumbs,
    "della": _della,
    "sce": _sce,
    "karcher": _karcher,
}
"""The recipes that merge files, by name."""
