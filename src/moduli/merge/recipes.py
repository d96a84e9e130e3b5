"""Recipes by name, with their arguments as options: for files, recipe files, searches and the command line."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from ._breadcrumbs import breadcrumbs, crumbs
from ._dare import dare, drops
from ._della import della, make_ranked_drops
from ._errors import MergeError
from ._karcher import karcher, means
from ._linear import combination, lerp, line, linear
from ._paths import model_arguments
from ._recipe import Recipe
from ._sce import sce, selections
from ._slerp import arc, slerp
from ._soup import average, soup
from ._stock import shells, stock
from ._task import difference, sums, task_arithmetic, task_vector
from ._ties import elections, ties

__all__ = ["RECIPES", "make_recipe"]

RECIPES: Final[dict[str, tuple[Callable[..., Any], Callable[..., Recipe]]]] = {
    "linear": (linear, combination),
    "soup": (soup, average),
    "lerp": (lerp, line),
    "slerp": (slerp, arc),
    "task_vector": (task_vector, difference),
    "task_arithmetic": (task_arithmetic, sums),
    "ties": (ties, elections),
    "dare": (dare, drops),
    "stock": (stock, shells),
    "breadcrumbs": (breadcrumbs, crumbs),
    "della": (della, make_ranked_drops),
    "sce": (sce, selections),
    "karcher": (karcher, means),
}
"""The recipes that merge files, by name: the function that merges models, and the one that makes its recipe."""


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
    if name not in RECIPES:
        raise MergeError(f"{name!r} is not a recipe for files; choose from {', '.join(RECIPES)}")
    function, make = RECIPES[name]
    signature, held = inspect.signature(function), model_arguments(function)
    if "models" not in held and count != len(held):
        raise MergeError(f"this recipe merges {len(held)} files, not {count}")
    try:
        bound = signature.bind(*[None] * len(held), **options)
        bound.apply_defaults()
        given = {key: value for key, value in bound.arguments.items() if key not in (*held, "buffers", "integers")}
        if "generator" in given and given["generator"] is None:
            raise MergeError(
                f"{name} drops entries at random; give a number as generator=, so that it can be made again"
            )
        return make(count - ("models" in held and "base" in held), **given)
    except TypeError as error:
        raise MergeError(f"the options of {name!r} do not fit: {error}") from None
