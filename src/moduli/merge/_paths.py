"""Functions that merge: live models, or, given the paths of checkpoints, file by file."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn

from ._driver import run
from ._errors import MergeError
from ._recipe import ModelT, Recipe

F = TypeVar("F", bound=Callable[..., Any])


def recipe(describe: F) -> F:
    """Make of a function of models that gives a `Recipe` one that merges them: live, or, given paths and `out=`, checkpoints.

    What the function gives when it is called is what its annotation says, a model.

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

    @wraps(describe)
    def call(*args: Any, out: Any = None, **options: Any) -> Any:
        given = {**dict(zip(signature.parameters, args, strict=False)), **options}
        paths = [path for name in held for path in _paths(given.get(name))]
        if paths:
            if out is None:
                raise MergeError("a merge of checkpoints is written to a checkpoint: give its path as out=")
            rest = {name: value for name, value in given.items() if name not in held}
            from ..io import merge_files  # a room above this one: declared with the order of the rooms

            merge_files(describe.__name__, paths, out, **rest)
            return None
        if out is not None:
            raise MergeError(
                "out= is for checkpoints that are given by their paths; this is a merge of models in memory"
            )
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        models: dict[str, Any] = {}
        for name in held:
            if name == "models":
                given[name] = list_models(given[name])
                models |= {f"models[{at}]": each for at, each in enumerate(given[name])}
            else:
                models[name] = given[name]
        found = describe(*bound.args, **bound.kwargs)
        if not isinstance(found, Recipe):
            return found
        return run(found, list(models.values()), list(models), buffers=given["buffers"], integers=given["integers"])

    return cast(F, call)


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


def _paths(value: Any) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    paths = [each for each in values if isinstance(each, str | os.PathLike)]
    if paths and len(paths) < len(values):
        raise MergeError("some models are paths and some are not; give paths for all, or load them first")
    return paths
