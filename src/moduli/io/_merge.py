"""Merging files into a file, name by name."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, Final

from torch import Tensor

from moduli import merge
from moduli.merge import (
    Coefficients,
    MergeError,
    Recipe,
    Row,
    arc,
    combination,
    drops,
    elections,
    line,
    per_model,
    shells,
    stream,
    sums,
)

from ._replace import PathLike
from ._save import made, strings
from ._tensor_file import TensorFile
from ._write import write_tensors

__all__ = ["RECIPES", "merge_files"]


def merge_files(
    recipe: str,
    paths: Sequence[PathLike],
    out: PathLike,
    *,
    buffers: merge.Buffers = "first",
    integers: merge.Integers = "equal",
    checksums: bool = True,
    fsync: bool = True,
    **options: Any,
) -> None:
    """Merge the modules in safetensors files into one, without ever holding a whole model in memory.

    Args:
        recipe: The name of a recipe of `moduli.merge`: one of `RECIPES`.
        paths: The files. The first decides names, dtypes and labels; for recipes with a base it is the base.
        out: The file to write. It may be one of those that are read.
        buffers: What to do with floating buffers, as in every recipe.
        integers: What to do with integers, as in every recipe.
        checksums: Whether to compare inputs with their checksums, and to write some.
        fsync: Whether to wait for the disk.
        **options: The other arguments of the recipe, such as `t=0.3` or `weights=[2, 1]`.

    Raises:
        MergeError: If the files or the options do not fit. Nothing is written then.
        CheckpointError: If a file is damaged, or the result cannot be written.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> a, b, c = (os.path.join(tempfile.mkdtemp(), "net.safetensors") for _ in range(3))
        >>> io.save(a, {"w": torch.tensor([0.0, 4.0])})
        >>> io.save(b, {"w": torch.tensor([4.0, 0.0])})
        >>> io.merge_files("lerp", [a, b], c, t=0.25)
        >>> io.read(c).module["w"]
        tensor([1., 3.])
    """
    make = RECIPES.get(recipe)
    if make is None:
        raise MergeError(f"{recipe!r} is not a recipe for files; choose from {', '.join(RECIPES)}")
    if isinstance(paths, str) or len(paths) < 2:
        raise MergeError("give at least two files to merge")
    try:
        made_recipe = make(len(paths), options)
    except TypeError as error:
        raise MergeError(f"the options of {recipe!r} do not fit: {error}") from None
    files = [TensorFile(path, checksums=checksums) for path in paths]
    shared = all(file.ties == files[0].ties for file in files)
    models = [_Once(file) for file in files] if shared else files
    values = stream(made_recipe, models, [repr(str(path)) for path in paths], buffers=buffers, integers=integers)
    # What can be found out without reading values is found out before a file is begun.
    first = next(values, None)
    _write(out, files[0], models[0], first, values, shared, checksums, fsync)


def _write(
    out: PathLike, first: TensorFile, model: Mapping[str, Tensor], item: Any, rest: Any, shared: bool,
    checksums: bool, fsync: bool,
) -> None:  # fmt: skip
    reader, saved = first._reader, first._saved
    carried: list[str] = []
    if reader.content is None:
        metadata = dict(reader.header.metadata)
    else:
        part = {key: value for key, value in reader.content["module"].items() if shared or key != "ties"}
        carried = saved.carried
        views = reader.content.get("views", {})
        names = {*model, *carried}
        kept = {name: views[saved.source(name)] for name in names if saved.source(name) in views}
        content = {"format": 1, "made": made(), "module": part} | ({"views": kept} if kept else {})
        metadata = strings(content)
    like = []
    for name in [*model, *carried]:
        slot = reader.slots[saved.source(name)]
        # C64 in files of others stays what it is; in ours complex tensors are pairs in either file.
        like.append((name, slot.code, list(slot.shape)))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for names, value in [] if item is None else [item]:
            yield from ((name, value) for name in names)
        for names, value in rest:
            yield from ((name, value) for name in names)
        for name in carried:
            yield name, reader.tensor(name)

    write_tensors(out, tensors(), like, metadata, checksums=checksums and reader.content is not None, fsync=fsync)


class _Once(Mapping[str, Tensor]):
    """A file without the names that stand for the tensor of another name."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._names = dict.fromkeys(name for name in file if name not in file.ties)
        if hasattr(file, "_metadata"):
            self._metadata = file._metadata
        self.meta = file.meta

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name]

    def __contains__(self, name: Any) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# -- recipes -----------------------------------------------------------------------------------------------------------


def _arguments(function: Callable[..., Any], models: int, options: dict[str, Any]) -> dict[str, Any]:
    """What a function of `moduli.merge` would be called with, its defaults included."""
    bound = inspect.signature(function).bind(*[None] * models, **options)
    bound.apply_defaults()
    return bound.arguments


def _exactly(count: int, wanted: int) -> None:
    if count != wanted:
        raise MergeError(f"this recipe merges {wanted} files, not {count}")


def _linear(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(merge.linear, 1, options)
    weights = given["weights"]
    return combination(per_model([1.0] * count if weights is None else weights, count, "weights"), given["normalize"])


def _soup(count: int, options: dict[str, Any]) -> Recipe:
    _arguments(merge.soup, 1, options)
    return combination(per_model([1.0] * count, count, "weights"), True)


def _lerp(count: int, options: dict[str, Any]) -> Recipe:
    _exactly(count, 2)
    return line(Coefficients(_arguments(merge.lerp, 2, options)["t"], "t"))


def _slerp(count: int, options: dict[str, Any]) -> Recipe:
    _exactly(count, 2)
    given = _arguments(merge.slerp, 2, options)
    if given["angle"] not in ("tensor", "model"):
        raise MergeError(f"angle is {given['angle']!r}; it must be 'tensor' or 'model'")
    return arc(Coefficients(given["t"], "t"), whole=given["angle"] == "model")


def _task_vector(count: int, options: dict[str, Any]) -> Recipe:
    _exactly(count, 2)
    _arguments(merge.task_vector, 2, options)

    def difference(name: str, row: Row) -> Tensor:
        return row[0] - row[1]

    return Recipe(difference, keeps=lambda name: False)


def _task_arithmetic(count: int, options: dict[str, Any]) -> Recipe:
    return sums(per_model(_arguments(merge.task_arithmetic, 2, options)["scale"], count - 1, "scale"))


def _ties(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(merge.ties, 2, options)
    if given["trim"] not in ("tensor", "model"):
        raise MergeError(f"trim is {given['trim']!r}; it must be 'tensor' or 'model'")
    densities, weights = _shares(given, count - 1)
    scale = Coefficients(given["scale"], "scale")
    return elections(densities, scale, weights, given["normalize"], given["elect"], whole=given["trim"] == "model")


def _dare(count: int, options: dict[str, Any]) -> Recipe:
    given = _arguments(merge.dare, 2, options)
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


def _stock(count: int, options: dict[str, Any]) -> Recipe:
    _arguments(merge.stock, 2, options)
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
}
"""The recipes that merge files, by name."""
