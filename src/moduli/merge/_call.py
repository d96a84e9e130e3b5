"""Functions that merge: live models, or, given the paths of checkpoints, file by file; by name for files, searches and commands."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Final, TypeVar, cast

from torch import nn

from .._plugins import list_plugins, load_plugin
from .._texts import shorten
from ..axes import ModelAxes
from ._align import align as align_model
from ._align import find_axes
from ._driver import ModelT, Recipe, run
from ._models import MergeError

F = TypeVar("F", bound=Callable[..., Any])

_PATHS = (str, os.PathLike)
RECIPES: Final[dict[str, Callable[..., Any]]] = {}
"""The recipes that merge files, by name: the functions that merge models."""


def recipe(describe: F) -> F:
    """Make of a function of models that gives a `Recipe` one that merges them: live, or, given paths and `out=`, checkpoints.

    The function takes models as `models`, `model`, `base`, `a` or `b`, and has `buffers` and `integers` beside its own options.
    It is listed by its name, for files and commands; a package that declares an entry point `moduli.recipes` of the same name is
    imported when the recipe is used.

    What the function gives when it is called is what its annotation says, a model. With `align=True` and `example=`, the argument
    of a forward (or `align=` the axes of the models), the units of the other models are first put into the order of the first's.

    Example:
        >>> import pathlib, tempfile, torch
        >>> import moduli as mo
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name, value in (("a", 0.0), ("b", 4.0)):
        ...     mo.save(folder / name, {"w": torch.full((2,), value)})
        >>> mo.merge.lerp(folder / "a", folder / "b", 0.25, out=folder / "c")
        >>> mo.io.read(folder / "c").module["w"]
        tensor([1., 1.])
    """
    signature, held = inspect.signature(describe), model_arguments(describe)
    fields = signature.parameters.values()
    names = [each.name for each in fields if each.kind is each.POSITIONAL_OR_KEYWORD]
    defaults = {each.name: each.default for each in fields if each.default is not each.empty}

    @wraps(describe)
    def call(*args: Any, out: Any = None, align: Any = False, example: Any = None, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        listed = [each for name in held for each in _list_values(given.get(name))]
        paths = [each for each in listed if isinstance(each, _PATHS)]
        if bool(paths) != (out is not None) or (paths and len(paths) < len(listed)):
            raise MergeError(
                "checkpoints are merged into a checkpoint: give the paths of all models, and of the result as out=, or load them"
            )
        if paths and align is not False:
            if not isinstance(align, ModelAxes):
                raise MergeError(
                    "a checkpoint does not say what its axes are: give align=moduli.axes.trace(module, example)"
                )
            options["align"] = given["align"] = align
        if paths:
            from ..io import merge_files  # a room above this one: declared with the order of the rooms

            merge_files(describe.__name__, paths, out, **{name: given[name] for name in given if name not in held})
            return None
        count, given = len(given), {**defaults, **given}
        if len(args) + len(options) != count or given.keys() != signature.parameters.keys():
            signature.bind(*args, **options)  # says what does not fit
        if align is not False:
            given |= align_arguments({name: given[name] for name in held}, align, example)
        models: dict[str, Any] = {name: given[name] for name in held if name != "models"}
        if "models" in held:
            given["models"] = list_models(given["models"])
            models |= {f"models[{at}]": each for at, each in enumerate(given["models"])}
        found = describe(**given)
        if not isinstance(found, Recipe):
            return found
        return run(found, list(models.values()), list(models), buffers=given["buffers"], integers=given["integers"])

    taken = RECIPES.get(describe.__name__)
    if taken is not None and taken.__module__ != describe.__module__:
        raise MergeError(f"{describe.__module__} can't add the recipe {describe.__name__!r}: {taken.__module__} has it")
    RECIPES[describe.__name__] = call
    return cast(F, call)


def align_arguments(given: dict[str, Any], align: Any, example: Any) -> dict[str, Any]:
    """Return the models of a call with their units in the order of the first's.

    Args:
        given: The models by the names of arguments; `models` is a list of them.
        align: True, or the axes of the models.
        example: The argument of a forward, with which to find the axes.
    """
    first: Any = None
    found = align if isinstance(align, ModelAxes) else find_axes(next(_each_model(given)), None, example)
    aligned: dict[str, Any] = {}
    for name, value in given.items():
        several = list_models(value) if name == "models" else [value]
        first = several[0] if first is None else first
        units = [each if each is first else align_model(each, first, found, example) for each in several]
        aligned[name] = units if name == "models" else units[0]
    return aligned


def _each_model(given: Mapping[str, Any]) -> Iterator[Any]:
    for name, value in given.items():
        yield from list_models(value) if name == "models" else [value]


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
    describe: Callable[..., Recipe] = inspect.unwrap(find_recipe(name))
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
        raise MergeError(f"the options of {shorten(name)} do not fit: {error}") from None


def list_recipes() -> list[str]:
    """Return the names of all recipes that merge files, those of other packages (entry points `moduli.recipes`) last.

    Example:
        >>> from moduli import merge
        >>> "linear" in merge.list_recipes()
        True
    """
    return list(dict.fromkeys([*RECIPES, *list_plugins("recipes")]))


def find_recipe(name: str) -> Callable[..., Any]:
    """Return the function that merges models by the recipe of a name; that of another package is imported.

    Args:
        name: One of `list_recipes()`.

    Raises:
        MergeError: If there is no such recipe.
        ImportError: If it is of another package, and can't be imported.

    Example:
        >>> from moduli import merge
        >>> merge.find_recipe("lerp") is merge.lerp
        True
    """
    if name not in RECIPES and name in (plugins := list_plugins("recipes")):
        call = load_plugin(plugins[name])
        if call not in RECIPES.values():
            raise MergeError(
                f"the recipe {name} ({plugins[name].value}) is no function decorated with moduli.merge.recipe"
            )
        RECIPES[name] = call
    if name not in RECIPES:
        raise MergeError(f"{shorten(name)} is not a recipe for files; choose from {', '.join(list_recipes())}")
    return RECIPES[name]


def model_arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments of a recipe that are models; `models` are any number of them."""
    return [name for name in inspect.signature(function).parameters if name in ("a", "b", "model", "base", "models")]


def list_models(models: Sequence[ModelT]) -> list[ModelT]:
    """The models as a list.

    Raises:
        TypeError: If a single model was given.
        MergeError: If there is none.
    """
    if isinstance(models, nn.Module | Mapping):
        raise TypeError("models is one model; give a list of models, such as [models]")
    models = list(models)
    if not models:
        raise MergeError("models holds 0 of the 1 models that this needs")
    return models


def _list_values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
