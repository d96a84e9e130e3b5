"""The `recipe` decorator, whose functions merge live models or checkpoints, and recipes by name for files and searches."""

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
"""The functions decorated with `recipe`, by name."""


def recipe(describe: F) -> F:
    """Turn a function from models to a `Recipe` into one that merges them: live models, or checkpoints for paths and `out=`.

    The function takes models as `models`, `model`, `base`, `a` or `b`, and has `buffers` and `integers` beside its own options.
    It is registered by its name, for files and commands; a package that declares an entry point `moduli.recipes` of the same name
    is imported when the recipe is used.

    The decorated function returns a model. With `align=True` and `example=`, the argument
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
    form = _Form(describe)

    @wraps(describe)
    def call(*args: Any, out: Any = None, align: Any = False, example: Any = None, **options: Any) -> Any:
        paths = form.list_paths(form.name(args) | options, out is not None)
        if paths:
            return form.merge_checkpoints(paths, out, align, form.name(args) | options)
        return form.merge_models(args, options, align, example)

    taken = RECIPES.get(describe.__name__)
    if taken is not None and taken.__module__ != describe.__module__:
        raise MergeError(f"{describe.__module__} can't add the recipe {describe.__name__!r}: {taken.__module__} has it")
    RECIPES[describe.__name__] = call
    return cast(F, call)


class _Form:
    """The arguments of a recipe function, and the two ways to call it: with models, and with paths of checkpoints."""

    def __init__(self, describe: Callable[..., Any]) -> None:
        self.describe, self.signature = describe, inspect.signature(describe)
        self.models = model_arguments(describe)
        fields = self.signature.parameters.values()
        self.positional = [each.name for each in fields if each.kind is each.POSITIONAL_OR_KEYWORD]
        self.defaults = {each.name: each.default for each in fields if each.default is not each.empty}

    def name(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return positional arguments by name."""
        return dict(zip(self.positional, args, strict=False))

    def list_paths(self, arguments: Mapping[str, Any], has_out: bool) -> list[Any]:
        """Return the paths among the models; raise unless all models are paths exactly if there is an `out=`."""
        models = [each for name in self.models for each in _list_values(arguments.get(name))]
        paths = [each for each in models if isinstance(each, _PATHS)]
        if bool(paths) != has_out or (paths and len(paths) < len(models)):
            raise MergeError(
                "checkpoints are merged into a checkpoint: give the paths of all models, and of the result as out=, or load them"
            )
        return paths

    def merge_checkpoints(self, paths: list[Any], out: Any, align: Any, arguments: Mapping[str, Any]) -> None:
        """Merge checkpoints into another one.

        Args:
            paths: The checkpoints.
            out: The path of the result.
            align: The axes of their models; False to leave units in their order.
            arguments: All arguments of the call by name.
        """
        options = {name: value for name, value in arguments.items() if name not in self.models}
        if align is not False:
            if not isinstance(align, ModelAxes):
                raise MergeError(
                    "a checkpoint does not say what its axes are: give align=moduli.axes.trace(module, example)"
                )
            options["align"] = align
        from ..io import merge_files  # a room above this one: declared with the order of the rooms

        merge_files(self.describe.__name__, paths, out, **options)

    def merge_models(self, args: Sequence[Any], options: dict[str, Any], align: Any, example: Any) -> Any:
        """Merge live models, after aligning their units if required.

        Args:
            args: The positional arguments of the call.
            options: The others.
            align: The axes of the models, True to trace them, or False to leave units in their order.
            example: The argument of a forward, for tracing the axes.
        """
        passed = self.name(args) | options
        arguments = self.defaults | passed
        if len(args) + len(options) != len(passed) or arguments.keys() != self.signature.parameters.keys():
            self.signature.bind(*args, **options)  # raises for missing, unknown and repeated arguments
        if align is not False:
            arguments |= align_arguments({name: arguments[name] for name in self.models}, align, example)
        models: dict[str, Any] = {name: arguments[name] for name in self.models if name != "models"}
        if "models" in self.models:
            arguments["models"] = list_models(arguments["models"])
            models |= {f"models[{at}]": each for at, each in enumerate(arguments["models"])}
        result = self.describe(**arguments)
        if not isinstance(result, Recipe):
            return result
        policies = {name: arguments[name] for name in ("buffers", "integers")}
        return run(result, list(models.values()), list(models), **policies)


def align_arguments(arguments: dict[str, Any], align: Any, example: Any) -> dict[str, Any]:
    """Return the models of a call with their units in the order of the first's.

    Args:
        arguments: The models by the names of arguments; `models` is a list of them.
        align: True, or the axes of the models.
        example: The argument of a forward, for tracing the axes.
    """
    first: Any = None
    traced = align if isinstance(align, ModelAxes) else find_axes(next(_each_model(arguments)), None, example)
    aligned: dict[str, Any] = {}
    for name, value in arguments.items():
        several = list_models(value) if name == "models" else [value]
        first = several[0] if first is None else first
        units = [each if each is first else align_model(each, first, traced, example) for each in several]
        aligned[name] = units if name == "models" else units[0]
    return aligned


def _each_model(arguments: Mapping[str, Any]) -> Iterator[Any]:
    for name, value in arguments.items():
        yield from list_models(value) if name == "models" else [value]


def make_recipe(name: str, count: int, options: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a name.

    Args:
        name: One of `RECIPES`.
        count: The number of models, the base included.
        options: The arguments of the function of this name, without the models.

    Raises:
        MergeError: If there is no such recipe, or the arguments do not fit.

    Example:
        >>> from moduli import merge
        >>> merge.make_recipe("lerp", 2, {"t": 0.5}).coefficients[0]("any.weight")
        0.5
    """
    describe: Callable[..., Recipe] = inspect.unwrap(find_recipe(name))
    names = model_arguments(describe)
    if "models" not in names and count != len(names):
        raise MergeError(f"this recipe merges {len(names)} files, not {count}")
    # A recipe depends on the number of models, not on the models.
    models = {each: [None] * (count + 1 - len(names)) if each == "models" else None for each in names}
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
    """Return the recipe function of a name; that of another package is imported.

    Args:
        name: One of `list_recipes()`.

    Raises:
        MergeError: If there is no such recipe.
        ImportError: If it belongs to another package, and can't be imported.

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
    """Return the names of a recipe's arguments that are models; `models` is a list of any number."""
    return [name for name in inspect.signature(function).parameters if name in ("a", "b", "model", "base", "models")]


def list_models(models: Sequence[ModelT]) -> list[ModelT]:
    """Return models as a list.

    Raises:
        TypeError: If a single model was passed.
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
