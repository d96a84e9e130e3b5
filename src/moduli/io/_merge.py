"""Merging checkpoints into a checkpoint, name by name: files, sharded directories, and adapters."""

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .. import merge
from ..axes import ModelAxes
from ..merge import RECIPES as _RECIPES
from ..merge import MergeError, make_recipe
from ._basics import PathLike
from ._files import TensorFiles, side_files, write_directory
from ._merge_models import AdaptedTensors, PermutedTensors, align_embeddings, is_adapter, read_vocabulary
from ._read import SavedFile
from ._safetensors import CODES, Announced, describe_stored, write_tensors
from ._save import describe_content

RECIPES: Final = tuple(_RECIPES)
"""The recipes that merge files, by name."""

# The number of entries that are merged at once: fewer than torch divides among its threads. One thread merges while another
# writes, and torch's threads waiting for a busy core made merging ten times slower.
PIECE: Final = (1 << 15) - 64


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
    align: ModelAxes | None = None,
    **options: Any,
) -> None:
    """Merge the models in checkpoints into one, without ever having a whole model in memory.

    A checkpoint is a safetensors file; a directory with `model.safetensors.index.json` or one safetensors file; or a directory
    with a LoRA adapter (PEFT's layout), which means the base with the adapter applied. Embeddings of different
    vocabularies are aligned by token if both directories have a `tokenizer.json`.

    Args:
        recipe: The name of a recipe of `moduli.merge`: one of `RECIPES`.
        paths: The checkpoints. The first decides names, dtypes and labels; for recipes with a base it is the base.
        out: The result. It is a directory, with the side files of the first checkpoint (its configuration, its tokenizer), if
            `shard_size` is given, or the first checkpoint is a directory and this is no name of a safetensors file. A file may
            be one of the inputs; a directory must be new or empty.
        base: The model that adapters are applied to; without it, the first checkpoint.
        shard_size: The largest number of bytes of tensors in a file of the directory.
        dtype: The floating dtype of the result; without it, that of the first checkpoint, tensor by tensor.
        buffers: The treatment of floating buffers, as in every recipe.
        integers: The treatment of integers, as in every recipe.
        checksums: Whether to compare inputs with their checksums, and to write checksums if the first checkpoint has them.
        fsync: Whether to wait for the disk.
        align: The axes of the models, to put the units of the others into the order of the first's before they are merged
            (`merge.align`). For this, two models at a time are in memory in double precision.
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
    method = make_recipe(recipe, len(paths), options)
    _check_dtype(dtype)
    first, models, ties = open_models(list(map(Path, paths)), None if base is None else Path(base), checksums)
    if align is not None:
        models[1:] = [PermutedTensors(each, align, merge.match_units(each, models[0], align)) for each in models[1:]]
    labels = [repr(str(path)) for path in paths]
    # Structures are compared here, before a file is written.
    values = merge.stream(method, models, labels, buffers=buffers, integers=integers, piece=PIECE)
    merged: Iterator[tuple[str, Tensor]] = ((name, convert(value, dtype)) for names, value in values for name in names)
    if _is_directory(out, first, shard_size):
        copied = side_files(first.directory) if first.path.is_dir() or shard_size else []
        like = _announce_all(models[0], dtype)
        write_directory(Path(out), merged, like, copied, shard_size=shard_size, fsync=fsync)
    elif len(first.files) == 1 and first.files[0].ours:
        _write_checkpoint(out, merged, models[0], first.files[0], ties, dtype, checksums, fsync)
    else:
        metadata = first.files[0].header.metadata if len(first.files) == 1 else {"format": "pt"}
        write_tensors(out, merged, _announce_all(models[0], dtype), metadata, checksums=False, fsync=fsync)


def _announce_all(model: Any, dtype: torch.dtype | None) -> Announced:
    """Return the names, codes and shapes of all merged tensors, in files without a record of pairs."""
    return [announce(name, model.meta(name), dtype, pairs=False) for name in model]


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and (not dtype.is_floating_point or dtype not in CODES):
        raise MergeError(f"dtype is {dtype}; it must be a floating dtype that safetensors files have")


def _write_checkpoint(
    out: PathLike,
    merged: Iterator[tuple[str, Tensor]],
    model: Any,
    saved: SavedFile,
    ties: dict[str, str],
    dtype: torch.dtype | None,
    checksums: bool,
    fsync: bool,
) -> None:
    """Write merged tensors as a checkpoint, with the metadata and extra state of the first one.

    Args:
        out: The file.
        merged: The merged tensors.
        model: The first model.
        saved: Its file.
        ties: The ties that all models have.
        dtype: The floating dtype of the result, or None.
        checksums: Whether to compare the extra state with its checksums, and to write checksums.
        fsync: Whether to wait for the disk.
    """
    if checksums:
        saved.compare(saved.carried)
    like = [announce(name, model.meta(name), dtype, pairs=True) for name in model]
    like += [(name, *describe_stored(saved[name], name)) for name in saved.carried]
    tensors = chain(merged, ((name, saved[name]) for name in saved.carried))
    metadata = _describe_merged(saved, [*model, *saved.carried], ties)
    write_tensors(out, tensors, like, metadata, checksums=checksums, fsync=fsync)


def _is_directory(out: PathLike, first: TensorFiles, shard_size: int | None) -> bool:
    """Whether the result is a directory of shards, rather than one file."""
    if os.fspath(out).endswith(os.sep) or Path(out).is_dir() or shard_size:
        return True
    return first.path.is_dir() and Path(out).suffix != ".safetensors"


def _describe_merged(saved: SavedFile, names: Sequence[str], ties: dict[str, str]) -> dict[str, str]:
    """Return the metadata of a merged checkpoint: the module's part of the first one, with the common ties."""
    views = saved.content.get("views", {})
    own = {name: views[saved.source(name)] for name in names if saved.source(name) in views}
    return describe_content({"module": {**saved.part, "ties": ties}, "views": own})


def convert(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in a dtype, if there is one and it has a floating dtype."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def announce(name: str, meta: Tensor, dtype: torch.dtype | None, pairs: bool) -> tuple[str, str, list[int]]:
    """Return a name with the code and the shape under which its merged tensor is stored.

    Args:
        name: The name.
        meta: A tensor of the shape and dtype of the first model's.
        dtype: The floating dtype of the result, or None for that of the first model.
        pairs: Whether complex numbers are written as pairs, which the file says.
    """
    wanted = meta.dtype if dtype is None or not meta.is_floating_point() else dtype
    if wanted is torch.complex64 and not pairs:
        return name, "C64", list(meta.shape)  # in files without a record of pairs
    code, shape = describe_stored(torch.empty((), dtype=wanted), name)
    return name, code, [*meta.shape, *shape]


def open_models(paths: list[Path], base: Path | None, checksums: bool) -> tuple[TensorFiles, list[Any], dict[str, str]]:
    """Return the files of the first checkpoint, all models (with adapters applied), and the ties that all of them have.

    Args:
        paths: The checkpoints.
        base: The model that adapters are applied to; None for the first checkpoint.
        checksums: Whether to compare tensors with their checksums.
    """
    root = paths[0] if base is None else base
    if is_adapter(root):
        raise MergeError(f"{str(root)!r} is an adapter; give the model that it was trained on first, or as base")
    opened = {path: _Streamed(path, checksums) for path in dict.fromkeys((root, *paths)) if not is_adapter(path)}
    files = [opened[root if is_adapter(path) else path] for path in paths]
    ties = files[0].files[0].ties
    if any(len(each.files) > 1 or each.files[0].ties != ties for each in files):
        ties = {}
    for each in opened.values():
        each.leave_out(ties)  # a tied name is not read twice
    models: list[Any] = [AdaptedTensors(opened[root], p) if is_adapter(p) else opened[p] for p in paths]
    ours, *others = (read_vocabulary(each.directory) if each.path.is_dir() else None for each in files)
    for at, theirs in enumerate(others, 1):
        models[at] = align_embeddings(models[0], models[at], (str(paths[0]), str(paths[at])), ours, theirs)
    return files[0], models, ties


class _Streamed(TensorFiles):
    """A checkpoint that is read in order, tensor by tensor.

    Each tensor is compared with its checksum when it is first read, and its memory is released when the next one is read.
    """

    def __init__(self, path: Path, checksums: bool) -> None:
        super().__init__(path)
        self._checksums = checksums
        self._verified: set[str] = set()
        self._last = ""
        if len(self.files) == 1:
            self._metadata = self.files[0]._metadata

    def leave_out(self, names: Collection[str]) -> None:
        """Remove names from the mapping."""
        self._held = self._owners = {name: file for name, file in self._owners.items() if name not in names}

    def __getitem__(self, name: str) -> Tensor:
        if self._last not in ("", name):
            self._owners[self._last].forget(self._last)
        self._last = name
        file = self._owners[name]
        if self._checksums and name not in self._verified:
            file.compare([file.source(name)])
            self._verified.add(name)
        return file[name]
