"""Merging checkpoints into a checkpoint, name by name: files, sharded directories, and adapters."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from .. import merge
from .._texts import shorten
from ..axes import ModelAxes
from ..merge import RECIPES as _RECIPES
from ..merge import MergeError, make_recipe
from ._basics import CheckpointError, PathLike, parse_json
from ._files import TensorFiles, side_files, write_directory
from ._open import read_bytes
from ._read import TensorFile, TensorMapping
from ._safetensors import CODES, describe_stored, write_tensors
from ._save import describe_content

RECIPES: Final = tuple(_RECIPES)
"""The recipes that merge files, by name."""

# So many entries are merged at once: fewer than torch divides among its threads. One thread merges while another writes, and
# threads of torch that wait for a busy core made merging ten times slower.
PIECE: Final = (1 << 15) - 64
_CONFIG: Final = "adapter_config.json"
_PAIRS: Final = (["lora_A", "lora_B"], ["lora_embedding_A", "lora_embedding_B"])
_UNKNOWN: Final = ("use_dora", "use_qalora", "alpha_pattern")
_TOKENIZER: Final = "tokenizer.json"
# Names of tensors with one row for each token, in the checkpoints that there are.
_MODULES: Final = "embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed_out|lm_head|shared"
_ROWS: Final = re.compile(rf"(^|\.)({_MODULES})\.(weight|bias)$")


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
        align: The axes of the models, to put the units of the others into the order of the first's before they are merged
            (`merge.align`). To find it, two models at a time are in memory in double precision.
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
    first, models, ties = open_models([Path(path) for path in paths], None if base is None else Path(base), checksums)
    if align is not None:
        models[1:] = [_Permuted(each, align, merge.match_units(each, models[0], align)) for each in models[1:]]
    labels = [repr(str(path)) for path in paths]
    # What can be found out without reading values is found out before a file is begun.
    values = merge.stream(made_recipe, models, labels, buffers=buffers, integers=integers, piece=PIECE)
    merged: Iterator[tuple[str, Tensor]] = ((name, convert(value, dtype)) for names, value in values for name in names)
    named = os.fspath(out).endswith(os.sep) or Path(out).is_dir()
    whole = not named and not shard_size and (not first.path.is_dir() or Path(out).suffix == ".safetensors")
    saved, single = first.files[0], len(first.files) == 1
    ours = whole and single and saved.ours
    like = [announce(name, models[0].meta(name), dtype, pairs=ours) for name in models[0]]
    if not whole:
        copied = side_files(first.directory) if first.path.is_dir() or shard_size else []
        write_directory(Path(out), merged, like, copied, shard_size=shard_size, fsync=fsync)
        return
    metadata = saved.header.metadata if single else {"format": "pt"}
    if ours:  # what it says beside its tensors, and the tensors of that
        if checksums:
            saved.compare(saved.carried)
        views, names = saved.content.get("views", {}), [*models[0], *saved.carried]
        kept = {name: views[saved.source(name)] for name in names if saved.source(name) in views}
        metadata = describe_content({"module": {**saved.part, "ties": ties}, "views": kept})
        like += [(name, *describe_stored(saved[name], name)) for name in saved.carried]
        merged = chain(merged, ((name, saved[name]) for name in saved.carried))
    write_tensors(out, merged, like, metadata, checksums=checksums and ours, fsync=fsync)


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
        return name, "C64", list(meta.shape)  # in files that do not say what is a pair
    code, shape = describe_stored(torch.empty((), dtype=wanted), name)
    return name, code, [*meta.shape, *shape]


def open_models(paths: list[Path], base: Path | None, checksums: bool) -> tuple[TensorFiles, list[Any], dict[str, str]]:
    """The files of the first checkpoint, the models that all are or are made into, and the ties that all of them have."""
    root = paths[0] if base is None else base
    if _is_adapter(root):
        raise MergeError(f"{str(root)!r} is an adapter; give the model that it was trained on first, or as base")
    opened = {path: _Streamed(path, checksums) for path in dict.fromkeys((root, *paths)) if not _is_adapter(path)}
    files = [opened[root if _is_adapter(path) else path] for path in paths]
    ties = files[0].files[0].ties
    if any(len(each.files) > 1 or each.files[0].ties != ties for each in files):
        ties = {}
    for each in opened.values():
        each.leave_out(ties)  # a tied name is not read twice
    models: list[Any] = [_Adapted(opened[root], p) if _is_adapter(p) else opened[p] for p in paths]
    ours, *others = (read_vocabulary(each.directory) if each.path.is_dir() else None for each in files)
    for at, theirs in enumerate(others, 1):
        models[at] = _align(models[0], models[at], (str(paths[0]), str(paths[at])), ours, theirs)
    return files[0], models, ties


class _Streamed(TensorFiles):
    """A checkpoint read from its beginning to its end, tensor by tensor.

    Each is compared with its checksum when it is first read, and its memory is given back when the next one is.
    """

    def __init__(self, path: Path, checksums: bool) -> None:
        super().__init__(path)
        self._checksums = checksums
        self._verified: set[str] = set()
        self._last = ""
        if len(self.files) == 1:
            self._metadata = self.files[0]._metadata

    def leave_out(self, names: Collection[str]) -> None:
        """Do as if there were none of these names."""
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


# -- models seen otherwise ---------------------------------------------------------------------------------------------


def _is_adapter(path: Path) -> bool:
    return (path / _CONFIG).is_file()


class _Adapted(TensorMapping):
    """A base with a LoRA adapter in PEFT's layout applied, each tensor computed when it is asked for.

    The weight of an adapted layer is W + s B A with s = alpha / r, or alpha / √r for `use_rslora`; embeddings have W + s (B A)ᵀ.
    Modules that were trained as a whole (`modules_to_save`) take the place of the base's.

    Args:
        base: The model that the adapter was trained on.
        path: The directory of the adapter.

    Raises:
        CheckpointError: If the adapter is damaged.
        MergeError: If it does not fit the base, or is of a kind that is not LoRA.
    """

    def __init__(self, base: Any, path: Path) -> None:
        super().__init__(base)
        self._base, self.path = base, path
        self._config = parse_json(read_bytes(path / _CONFIG), f"{str(path / _CONFIG)!r}")
        kind, more = self._config.get("peft_type"), [key for key in _UNKNOWN if self._config.get(key)]
        if kind != "LORA" or more:
            told = f"an adapter of type {shorten(kind)}{''.join(f' with {key}' for key in more)}"
            raise MergeError(f"{str(path)!r} is {told}; only plain LORA adapters are merged")
        self._alpha = self._config.get("lora_alpha")
        if not isinstance(self._alpha, int | float | None):
            raise CheckpointError(f"{str(path / _CONFIG)!r} has lora_alpha {shorten(self._alpha)}, which is no number")
        self._file = TensorFile(path / "adapter_model.safetensors")
        self._deltas: dict[str, dict[str, str]] = {}
        self._whole: dict[str, str] = {}
        for key in self._file:
            name = key.removeprefix("base_model.model.")
            match = re.fullmatch(rf"(.+)\.({'|'.join(chain(*_PAIRS))})(?:\.default)?(?:\.weight)?", name)
            if match is not None:
                self._deltas.setdefault(f"{match[1]}.weight", {})[match[2]] = key
            else:
                name = re.sub(r"\.modules_to_save(\.default)?|\.base_layer", "", name)
                self._whole[name] = key
                self._check(name, tuple(self._file.meta(key).shape))
        for name, parts in self._deltas.items():
            if sorted(parts) not in _PAIRS:
                raise CheckpointError(f"the adapter {str(path)!r} has only {', '.join(parts)} of {shorten(name)}")
            a, b = (tuple(self._file.meta(part).shape) for _, part in sorted(parts.items()))
            fits = len(a) == len(b) == 2 and a[0] == b[1] > 0
            turned = (a[1], b[0]) if self._is_turned(name) else (b[0], a[1])
            self._check(name, turned if fits else f"A {a} and B {b}")

    def _check(self, name: str, shape: object) -> None:
        here = tuple(self._base.meta(name).shape) if name in self._base else "not there"
        if shape != here:
            raise MergeError(f"{shorten(name)} is {shape} in the adapter {str(self.path)!r}, and {here} in the base")

    def meta(self, name: str) -> Tensor:
        """As the base has it."""
        return cast(Tensor, self._base.meta(name))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._whole:
            return self._file[self._whole[name]]
        value: Tensor = self._base[name]
        if name not in self._deltas:
            return value
        a, b = (self._file[part].float() for _, part in sorted(self._deltas[name].items()))
        delta = (b @ a).T if self._is_turned(name) else b @ a
        alpha = len(a) if self._alpha is None else self._alpha
        # In the precision of the accumulation: rounding to the base's dtype would lose what an adapter learnt.
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return torch.add(wide, delta, alpha=alpha / (len(a) ** 0.5 if self._config.get("use_rslora") else len(a)))

    def _is_turned(self, name: str) -> bool:
        return "lora_embedding_A" in self._deltas[name] or bool(self._config.get("fan_in_fan_out"))


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """The tokens of a `tokenizer.json` with their numbers, those that were added included; None if there is no such file.

    Raises:
        CheckpointError: If it is malformed.
    """
    path = directory / _TOKENIZER
    if not path.is_file():
        return None
    found = parse_json(read_bytes(path), f"{str(path)!r}")
    try:
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # of pieces with scores, in order
            vocabulary = {each[0]: at for at, each in enumerate(vocabulary)}
        tokens = {str(token): int(number) for token, number in vocabulary.items()}
        tokens |= {str(each["content"]): int(each["id"]) for each in found.get("added_tokens") or []}
    except (AttributeError, TypeError, KeyError, ValueError, IndexError):
        tokens = {"": -1}
    if min(tokens.values(), default=0) < 0:
        raise CheckpointError(f"{str(path)!r} has no vocabulary from tokens to numbers")
    return tokens


class _Aligned(TensorMapping):
    """A model with the rows of its embeddings in the order of another's vocabulary.

    A token that only the other has gets the other's row, so that a merge leaves it as it is there.
    """

    def __init__(self, model: Any, first: Any, sources: Tensor, names: Collection[str]) -> None:
        super().__init__(model)
        self._model, self._first, self._sources, self._names = model, first, sources, names

    def meta(self, name: str) -> Tensor:
        """The shape is that of the other model."""
        return cast(Tensor, (self._first if name in self._names else self._model).meta(name))

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._model[name]
        if name not in self._names:
            return value
        result: Tensor = self._first[name].to(value.dtype).clone()
        sources = self._sources[: len(result)]
        here = torch.nonzero((sources >= 0) & (sources < len(value))).flatten()
        result[here] = value[sources[here]]
        return result


class _Permuted(TensorMapping):
    """A model with its units in another order.

    Args:
        model: The model.
        axes: Its axes.
        units: For axes by name, the units in their new order.
    """

    def __init__(self, model: Any, axes: ModelAxes, units: Mapping[str, Tensor]) -> None:
        super().__init__(model)
        self._model, self._axes, self._units = model, axes, units

    def meta(self, name: str) -> Tensor:
        """Shapes are the model's."""
        return cast(Tensor, self._model.meta(name))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._axes.parameters and name not in self._axes.ties:
            return cast(Tensor, self._model[name])
        return self._axes.take({name: self._model[name]}, self._units)[name]


def _align(first: Any, model: Any, labels: tuple[str, str], ours: Any, theirs: Any) -> Any:
    """A model whose embeddings have the rows of the first's, token by token.

    Args:
        first: The model that decides.
        model: Another one.
        labels: What errors call them.
        ours: The vocabulary of the first; None if it has none.
        theirs: That of the other.

    Raises:
        MergeError: If embeddings have different sizes, and a vocabulary is missing.
    """
    named = [name for name in first if _ROWS.search(name) and name in model]
    shapes = {name: (first.meta(name).shape, model.meta(name).shape) for name in named}
    rows = {name: (a[0], b[0]) for name, (a, b) in shapes.items() if a and b and a[1:] == b[1:]}
    differ = [name for name, (here, there) in rows.items() if here != there]
    if differ and (ours is None or theirs is None):
        here, there = rows[differ[0]]
        raise MergeError(
            f"{shorten(differ[0])} has {here} rows in {labels[0]} and {there} in {labels[1]}: their vocabularies differ. Rows are "
            f"aligned by token if both directories have a {_TOKENIZER}; {labels[ours is not None]} has none"
        )
    if ours is None or theirs is None or (not differ and ours == theirs):
        return model
    length = max((here for here, _ in rows.values()), default=0)
    sources = torch.full((length,), -1, dtype=torch.long)
    for token, number in ours.items():
        if number < length:
            sources[number] = theirs.get(token, -1)
    # Rows that no token has are padding: one is as good as another of its place.
    for number in set(range(length)) - set(ours.values()) - set(theirs.values()):
        sources[number] = number
    return _Aligned(model, first, sources, rows)
