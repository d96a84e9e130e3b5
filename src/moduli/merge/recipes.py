"""Recipes by name, with their arguments as options: for files, recipe files, searches and the command line."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from ._breadcrumbs import breadcrumbs
from ._drop import dare, della
from ._errors import MergeError
from ._linear import lerp, linear, task_arithmetic, task_vector
from ._paths import model_arguments
from ._recipe import Recipe
from ._sce import sce
from ._soup import soup
from ._sphere import karcher, slerp
from ._stock import stock
from ._ties import ties

__all__ = ["RECIPES", "make_recipe"]

_MERGES = (
    linear, soup, lerp, slerp, task_vector, task_arithmetic, ties, dare, stock, breadcrumbs, della, sce, karcher,
)  # fmt: skip

RECIPES: Final[dict[str, Callable[..., Any]]] = {merge.__name__: merge for merge in _MERGES}
"""The recipes that merge files, by name: the functions that merge models."""


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
    describe: Callable[..., Recipe] = inspect.unwrap(RECIPES[name])
    held = model_arguments(describe)
    if "models" not in held and count != len(held):
        raise MergeError(f"this recipe merges {len(held)} files, not {count}")
    # What a recipe does depends on how many models there are, and not on them.
    models = {each: [None] * (count + 1 - len(held)) if each == "models" else None for each in held}
    if "generator" in inspect.signature(describe).parameters and options.get("generator") is None:
        raise MergeError(f"{name} drops entries at random; give a number as generator=, so that it can be made again")
    try:
        return describe(**inspect.signature(describe).bind(**models, **options).arguments)
    except TypeError as error:
        raise MergeError(f"the options of {name!r} do not fit: {error}") from None
