"""Merging checkpoints into a checkpoint, name by name: files, sharded directories, and adapters."""

import os
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .. import merge
from ..merge import RECIPES as _RECIPES
from ..merge import MergeError, make_recipe
from ._dtypes import CODES, describe_stored
from ._files import TensorFiles, side_files, write_directory
from ._model_views import Adapted, align, is_adapter, read_vocabulary
from ._replace import PathLike
from ._safetensors import FORMAT, write_tensors
from ._save import describe_writer, strings

RECIPES: Final = tuple(_RECIPES)
"""The recipes that merge files, by name."""


def merge_files(
    recipe: str,
    paths: Sequence[PathLike],
    out: PathLike,
    *,
    base: PathLike | None = None,
    shard_size: int | None = None,
    dtype: torch.dtype | None = None,
    buffers: merge.Buffers = "first",
    integers: merge.Integers = "equal",
    checksums: bool = True,
    fsync: bool = True,
    **options: Any,
) -> None:
    """Merge the models in checkpoints into one, without ever holding a whole model in memory.

    A checkpoint is a safetensors file; a directory with `model.safetensors.index.json` or one safetensors file; or a directory
    with a LoRA adapter (PEFT's layout), which stands for the base with the adapter applied. Embeddings of different
    vocabularies are aligned by token if both directories have a `tokenizer.json`.

    Args:
        recipe: The name of a recipe of `moduli.merge`: one of `RECIPES`.
        paths: The checkpoints. The first decides names, dtypes and labels; for recipes with a base it is the base.
        out: What to write. A directory, with the side files of the first checkpoint (its configuration, its tokenizer), if
            `shard_size` is given, or the first is a directory and this is no name of a safetensors file. A file may be one
            of those that are read; a directory must be new or empty.
        base: What adapters are applied to; without it, the first checkpoint.
        shard_size: How many bytes of tensors a file of the directory has at most.
        dtype: The floating dtype of the result; without it, that of the first checkpoint, tensor by tensor.
        buffers: What to do with floating buffers, as in every recipe.
        integers: What to do with integers, as in every recipe.
        checksums: Whether to compare inputs with their checksums, and to write some where the first checkpoint has them.
        fsync: Whether to wait for the disk.
        **options: The other arguments of the recipe, such as `t=0.3` or `weights=[2, 1]`.

    Raises:
        MergeError: If the checkpoints or the options do not fit. Nothing is written then.
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
    if isinstance(paths, str | os.PathLike) or len(paths) < 2:
        raise MergeError("give at least two checkpoints to merge")
    made_recipe = make_recipe(recipe, len(paths), options)
    if dtype is not None and (not dtype.is_floating_point or dtype not in CODES):
        raise MergeError(f"dtype is {dtype}; it must be a floating dtype that safetensors files have")
    if shard_size is not None and shard_size < 1:
        raise MergeError(f"shard_size is {shard_size}; it must be at least one byte")
    sources = _Sources([Path(path) for path in paths], None if base is None else Path(base), checksums)
    first, model = sources.first, sources.models[0]
    labels = [repr(str(path)) for path in paths]
    # What can be found out without reading values is found out before a file is begun.
    values = merge.stream(made_recipe, sources.models, labels, buffers=buffers, integers=integers)
    merged = ((name, _convert(value, dtype)) for names, value in values for name in names)
    named = os.fspath(out).endswith(os.sep) or Path(out).is_dir()
    whole = not named and not shard_size and (not first.path.is_dir() or Path(out).suffix == ".safetensors")
    ours = whole and len(first.files) == 1 and first.files[0]._reader.content is not None
    like = [_describe_stored(name, model.meta(name), dtype, pairs=ours) for name in model]
    if not whole:
        copied = side_files(first.directory) if first.path.is_dir() or shard_size else []
        write_directory(Path(out), merged, like, copied, shard_size=shard_size, fsync=fsync)
    elif ours:
        _write_ours(out, sources, merged, like, checksums, fsync)
    else:
        metadata = first.files[0]._reader.header.metadata if len(first.files) == 1 else {"format": "pt"}
        write_tensors(out, merged, like, metadata, checksums=False, fsync=fsync)


def _convert(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _describe_stored(name: str, meta: Tensor, dtype: torch.dtype | None, pairs: bool) -> tuple[str, str, list[int]]:
    wanted = meta.dtype if dtype is None or not meta.is_floating_point() else dtype
    if wanted is torch.complex64 and not pairs:
        return name, "C64", list(meta.shape)  # in files that do not say what is a pair
    code, shape = describe_stored(torch.empty((), dtype=wanted), name)
    return name, code, [*meta.shape, *shape]


class _Sources:
    """The checkpoints of a merge: those that are files, and what is made of them."""

    def __init__(self, paths: list[Path], base: Path | None, checksums: bool) -> None:
        root = paths[0] if base is None else base
        if is_adapter(root):
            raise MergeError(f"{str(root)!r} is an adapter; give the model that it was trained on first, or as base")
        opened = {path: _Streamed(path, checksums) for path in dict.fromkeys((root, *paths)) if not is_adapter(path)}
        files = [opened[root if is_adapter(path) else path] for path in paths]
        self.first = files[0]
        ties = files[0].files[0].ties if len(files[0].files) == 1 else {}
        self.shared = all(len(f.files) == 1 and f.files[0].ties == ties for f in files) and bool(ties)
        if self.shared:  # by all models: a tied name is not read twice
            for each in opened.values():
                each.leave_out(ties)
        models: list[Any] = [Adapted(opened[root], p) if is_adapter(p) else opened[p] for p in paths]
        vocabularies = [read_vocabulary(each.directory) if each.path.is_dir() else None for each in files]
        self.models = [
            model
            if at == 0
            else align(models[0], model, (str(paths[0]), str(paths[at])), (vocabularies[0], vocabularies[at]))
            for at, model in enumerate(models)
        ]


class _Streamed(TensorFiles):
    """A checkpoint read from its beginning to its end, tensor by tensor.

    Each is compared with its checksum when it is first read, and its memory is given back when the next one is.
    """

    def __init__(self, path: Path, checksums: bool) -> None:
        super().__init__(path)
        self._checksums = checksums
        self._verified: set[str] = set()
        self._last: tuple[Any, str] | None = None
        if len(self.files) == 1 and hasattr(self.files[0], "_metadata"):
            self._metadata = self.files[0]._metadata

    def leave_out(self, names: Collection[str]) -> None:
        """Do as if there were none of these names."""
        self._held = self._owners = {name: file for name, file in self._owners.items() if name not in names}

    def __getitem__(self, name: str) -> Tensor:
        file = self._owners[name]
        reader, source = file._reader, file._sources[name]
        if self._last is not None and self._last != (reader, source):
            self._last[0].forget(self._last[1])
        self._last = reader, source
        if self._checksums and source not in self._verified:
            reader.verify([source])
            self._verified.add(source)
        return file[name]


def _write_ours(
    out: PathLike,
    sources: _Sources,
    merged: Iterable[tuple[str, Tensor]],
    like: list[tuple[str, str, list[int]]],
    checksums: bool,
    fsync: bool,
) -> None:
    """Write a file that says beside its tensors what the first checkpoint does."""
    reader, saved = sources.first.files[0]._reader, sources.first.files[0]._saved
    content = reader.content or {}
    part = {key: value for key, value in content["module"].items() if sources.shared or key != "ties"}
    if checksums:
        reader.verify(saved.carried)
    views = content.get("views", {})
    kept = {
        name: views[saved.source(name)] for name in [*sources.models[0], *saved.carried] if saved.source(name) in views
    }
    metadata = strings({"format": FORMAT, "made": describe_writer(), "module": part, "views": kept})
    like += [(name, reader.slots[name].code, list(reader.slots[name].shape)) for name in saved.carried]
    carried = ((name, reader.tensor(name)) for name in saved.carried)
    write_tensors(out, chain(merged, carried), like, metadata, checksums=checksums, fsync=fsync)
