"""Recipes on paths: the same functions merge checkpoints, file by file, when they are given their names."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from ._errors import MergeError

F = TypeVar("F", bound=Callable[..., Any])


def accept_paths(function: F) -> F:
    """Let a recipe also take paths of checkpoints, and write the result to `out=`.

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
    names, held = list(inspect.signature(function).parameters), model_arguments(function)

    @wraps(function)
    def call(*args: Any, out: Any = None, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        paths = [path for name in held for path in _paths(given.get(name))]
        if not paths:
            if out is not None:
                raise MergeError(
                    "out= is for checkpoints that are given by their paths; this is a merge of models in memory"
                )
            return function(*args, **options)
        if out is None:
            raise MergeError("a merge of checkpoints is written to a checkpoint: give its path as out=")
        rest = {name: value for name, value in given.items() if name not in held}
        from ..io import merge_files  # a room above this one: declared with the order of the rooms

        merge_files(function.__name__, paths, out, **rest)
        return None

    return cast(F, call)


def model_arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments of a recipe that are models; `models` are any number of them."""
    return [name for name in inspect.signature(function).parameters if name in ("a", "b", "model", "base", "models")]


def _paths(value: Any) -> list[Any]:
    if isinstance(value, str | os.PathLike):
        return [value]
    if isinstance(value, Sequence) and not isinstance(value, Mapping) and value:
        if all(isinstance(each, str | os.PathLike) for each in value):
            return list(value)
        if any(isinstance(each, str | os.PathLike) for each in value):
            raise MergeError("some models are paths and some are not; give paths for all, or load them first")
    return []
