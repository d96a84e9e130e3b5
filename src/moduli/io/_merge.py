"""Merging checkpoints into a checkpoint, name by name: files, sharded directories, and adapters."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from .. import merge
from ..merge import RECIPES as _RECIPES
from ..merge import MergeError, make_recipe
from ._dtypes import CODES, describe_stored
from ._model_views import Adapted, align, is_adapter, read_vocabulary
from ._replace import PathLike
from ._save import describe_writer, strings
from ._shards import TensorFiles, side_files, write_directory
from ._tensor_file import TensorMapping
from ._write import write_tensors

RECIPES: Final = tuple(_RECIPES)
"""The recipes that merge files, by name."""

Merged: TypeAlias = Iterator[tuple[tuple[str, ...], Tensor]]


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
    labels = [repr(str(path)) for path in paths]
    values = merge.stream(made_recipe, sources.models, labels, buffers=buffers, integers=integers)
    # What can be found out without reading values is found out before a file is begun.
    first = next(values, None)
    merged = _convert(chain([] if first is None else [first], values), dtype)
    named = os.fspath(out).endswith(os.sep) or Path(out).is_dir()
    if named or shard_size or (sources.first.path.is_dir() and Path(out).suffix != ".safetensors"):
        like = [_describe_stored(name, sources.models[0].meta(name), dtype) for name in sources.models[0]]
        plain = ((name, value) for names, value in merged for name in names)
        copied = side_files(sources.first.directory) if sources.first.path.is_dir() or shard_size else []
        write_directory(Path(out), plain, like, copied, shard_size=shard_size, fsync=fsync)
    else:
        _write_file(out, sources, merged, dtype, checksums, fsync)


def _convert(values: Iterable[tuple[tuple[str, ...], Tensor]], dtype: torch.dtype | None) -> Merged:
    for names, value in values:
        yield names, value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _describe_stored(name: str, meta: Tensor, dtype: torch.dtype | None) -> tuple[str, str, list[int]]:
    wanted = meta.dtype if dtype is None or not meta.is_floating_point() else dtype
    code, shape = describe_stored(torch.empty((), dtype=wanted), name)
    return name, code, [*meta.shape, *shape]


class _Sources:
    """The checkpoints of a merge: those that are files, and what is made of them."""

    def __init__(self, paths: list[Path], base: Path | None, checksums: bool) -> None:
        root = paths[0] if base is None else base
        if is_adapter(root):
            raise MergeError(f"{str(root)!r} is an adapter; give the model that it was trained on first, or as base")
        opened: dict[Path, Any] = {}
        for path in (root, *(path for path in paths if not is_adapter(path))):
            opened.setdefault(path, TensorFiles(path))
        files = [opened[root if is_adapter(path) else path] for path in paths]
        self.first: TensorFiles = files[0]
        self.ties = files[0].files[0].ties if len(files[0].files) == 1 else {}
        self.shared = all(len(f.files) == 1 and f.files[0].ties == self.ties for f in files) and bool(self.ties)
        streamed = {path: _Streamed(each, checksums, self.shared) for path, each in opened.items()}
        models: list[Any] = []
        for path in paths:
            models.append(Adapted(streamed[root], path) if is_adapter(path) else streamed[path])
        vocabularies = [read_vocabulary(each.directory) if each.path.is_dir() else None for each in files]
        names = [str(path) for path in paths]
        self.models = [
            model if at == 0 else align(models[0], model, (names[0], names[at]), (vocabularies[0], vocabularies[at]))
            for at, model in enumerate(models)
        ]


class _Streamed(TensorMapping):
    """A checkpoint read from its beginning to its end, tensor by tensor.

    Each is compared with its checksum when it is first read, and its memory is given back when the next one is.
    """

    def __init__(self, files: TensorFiles, checksums: bool, once: bool) -> None:
        self.files = files
        self._checksums = checksums
        self._verified: set[str] = set()
        self._last: Callable[[], None] = lambda: None
        self._last_name = ""
        # Where all models tie the same names, a tied name is not read twice.
        tied = files.files[0].ties if once else {}
        super().__init__(dict.fromkeys(name for name in files if name not in tied))
        if len(files.files) == 1 and hasattr(files.files[0], "_metadata"):
            self._metadata = files.files[0]._metadata

    def meta(self, name: str) -> Tensor:
        return self.files.meta(name)

    def __getitem__(self, name: str) -> Tensor:
        file = self.files.owner(name)
        reader, source = file._reader, file._sources[name]
        if name != self._last_name:
            self._last()
            self._last_name, self._last = name, lambda: reader.forget(source)
            reader.expect(source)
        if self._checksums and source not in self._verified:
            reader.verify([source])
            self._verified.add(source)
        return file[name]


def _write_file(
    out: PathLike, sources: _Sources, values: Merged, dtype: torch.dtype | None, checksums: bool, fsync: bool
) -> None:
    """Write one file; what a checkpoint of ours says beside its tensors is carried over from the first."""
    model = sources.models[0]
    carried: list[str] = []
    like = [_describe_stored(name, model.meta(name), dtype) for name in model]
    file, single = sources.first.files[0], len(sources.first.files) == 1
    reader, saved = file._reader, file._saved
    ours = single and reader.content is not None
    if not ours:
        metadata = dict(reader.header.metadata) if single else {"format": "pt"}
    else:
        content = reader.content or {}
        keep = sources.shared or not saved.ties
        part = {key: value for key, value in content["module"].items() if keep or key != "ties"}
        carried = saved.carried
        if checksums:
            reader.verify(carried)
        views = content.get("views", {})
        kept = {name: views[saved.source(name)] for name in [*model, *carried] if saved.source(name) in views}
        metadata = strings({"format": 1, "made": describe_writer(), "module": part} | ({"views": kept} if kept else {}))
    # C64 in files of others stays what it is; in ours complex tensors are pairs in either file.
    codes = {name: reader.slots[saved.source(name)] for name in model} if single else {}
    like = [
        (n, codes[n].code, list(codes[n].shape)) if n in codes and codes[n].code == "C64" else (n, c, s)
        for n, c, s in like
    ]
    like += [(name, reader.slots[name].code, list(reader.slots[name].shape)) for name in carried]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for names, value in values:
            yield from ((name, value) for name in names)
        for name in carried:
            yield name, reader.tensor(name)

    write_tensors(out, tensors(), like, metadata, checksums=checksums and ours, fsync=fsync)
