"""Checkpoints put together of slices of layers, each taken from one checkpoint or merged of several ("frankenmerges")."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from .. import merge
from .._texts import shorten
from ..merge import MergeError, make_recipe
from ._basics import PathLike, parse_json
from ._files import side_files, write_directory
from ._merge import PIECE, announce, convert, open_models
from ._open import read_bytes
from ._read import TensorMapping
from ._safetensors import Announced

_LAYER: Final = re.compile(r"(^|\.)(layers|h|blocks|layer)\.([0-9]+)\.")
# What comes before the layers; everything else that is in no layer comes after them.
_BEFORE: Final = re.compile(r"embed|wte|wpe")
_AFTER: Final = re.compile(r"embed_out")
_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_CONFIG: Final = "config.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"


@dataclass(frozen=True)
class MergeSlice:
    """A slice of the layers of a result, and the checkpoints from which it is merged.

    Attributes:
        paths: The checkpoints; for recipes with a base, the base first.
        ranges: The first layer and the one after the last of each checkpoint; None for all layers.
        options: The arguments of the recipe.

    Example:
        >>> from pathlib import Path
        >>> from moduli.io import MergeSlice
        >>> MergeSlice([Path("a"), Path("b")], [(0, 8), (8, 16)], {"weights": [2, 1]}).ranges
        [(0, 8), (8, 16)]
    """

    paths: list[Path]
    ranges: list[tuple[int, int]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def merge_slices(
    recipe: str,
    slices: Sequence[MergeSlice],
    out: PathLike,
    *,
    shard_size: int | None = None,
    dtype: torch.dtype | None = None,
    template: str | None = None,
    buffers: merge.Buffers = "first",
    integers: merge.Integers = "equal",
    fsync: bool = True,
    **options: Any,
) -> None:
    """Write a checkpoint that is composed of slices of layers, which are numbered in their order.

    Tensors outside of layers are merged with the first slice if they come before the layers (embeddings), else with the last.

    Args:
        recipe: The name of a recipe of `moduli.merge`, for all slices.
        slices: The slices in order.
        out: The directory to write. It has the side files of the first checkpoint, with the number of layers in `config.json`.
        shard_size: The largest number of bytes of tensors in a file.
        dtype: The floating dtype of the result; without it, that of the first checkpoint, tensor by tensor.
        template: The chat template of the result, or None for that of the first checkpoint.
        buffers: The treatment of floating buffers, as in every recipe.
        integers: The treatment of integers, as in every recipe.
        fsync: Whether to wait for the disk.
        **options: Arguments of the recipe; they override those of slices.

    Raises:
        MergeError: If checkpoints, layers or options do not fit. Nothing is written then.
        CheckpointError: If a file is damaged, or the result cannot be written.

    Example:
        >>> import pathlib, tempfile, torch
        >>> import moduli.io as io
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> a, b = folder / "a.safetensors", folder / "b.safetensors"
        >>> for path, value in ((a, 1.0), (b, 2.0)):
        ...     io.save(path, {"h.0.w": torch.full((1,), value), "h.1.w": torch.full((1,), 10 * value)})
        >>> io.merge_slices("linear", [io.MergeSlice([a], [(0, 2)]), io.MergeSlice([b], [(1, 2)])], folder / "out")
        >>> {name: value.item() for name, value in io.TensorFiles(folder / "out").items()}
        {'h.0.w': 1.0, 'h.1.w': 10.0, 'h.2.w': 20.0}
    """
    if Path(out).suffix == ".safetensors":
        raise MergeError(f"{str(out)!r} is the name of a file; what is put together of slices is a directory")
    values: list[Iterator[tuple[tuple[str, ...], Tensor]]] = []
    like: Announced = []
    start = 0
    for at, part in enumerate(slices):
        _, models, _ = open_models(part.paths, None, True)
        if part.ranges is not None:
            ends = (at == 0, at == len(slices) - 1)
            models = [
                RenamedTensors(model, rename_layers(model, layers, start, ends, str(path)))
                for model, layers, path in zip(models, part.ranges, part.paths, strict=True)
            ]
            start += part.ranges[0][1] - part.ranges[0][0]
        method = make_recipe(recipe, len(models), {**part.options, **options})
        labels = [repr(str(path)) for path in part.paths]
        values.append(merge.stream(method, models, labels, buffers=buffers, integers=integers, piece=PIECE))
        like += [announce(name, models[0].meta(name), dtype, pairs=False) for name in models[0]]
    merged = ((name, convert(value, dtype)) for names, value in chain(*values) for name in names)
    home = slices[0].paths[0]
    copied, texts = (side_files(home), _edit_texts(home, slices, template)) if home.is_dir() else ([], {})
    write_directory(Path(out), merged, like, copied, shard_size=shard_size, fsync=fsync, texts=texts)


class RenamedTensors(TensorMapping):
    """Some tensors of a checkpoint under other names.

    Args:
        model: The checkpoint.
        names: The name in the checkpoint for each new name, in order.
    """

    def __init__(self, model: Any, names: Mapping[str, str]) -> None:
        super().__init__(names)
        self._model, self._names = model, names

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of a name."""
        return cast(Tensor, self._model.meta(self._names[name]))

    def __getitem__(self, name: str) -> Tensor:
        return cast(Tensor, self._model[self._names[name]])


def rename_layers(
    names: Collection[str], layers: tuple[int, int], start: int, ends: tuple[bool, bool], path: str
) -> dict[str, str]:
    """Return the names of a slice in the result, with those in the checkpoint.

    Args:
        names: The names in the checkpoint.
        layers: The first layer and the one after the last.
        start: The number of the first layer in the result.
        ends: Whether the slice is the first, which includes tensors before the layers, and the last, which includes those after.
        path: The name of the checkpoint in errors.

    Raises:
        MergeError: If the checkpoint lacks a layer.

    Example:
        >>> from moduli.io._slices import rename_layers
        >>> rename_layers(["wte.weight", "h.0.w", "h.1.w", "ln_f.weight"], (1, 2), 5, (False, True), "model")
        {'h.5.w': 'h.1.w', 'ln_f.weight': 'ln_f.weight'}
    """
    missing = sorted(set(range(*layers)) - {layer_of(name) for name in names})
    if missing:
        last = max(map(layer_of, names), default=-1)
        there = f"it has layers 0 to {last}" if last >= 0 else "it has no numbered layers"
        raise MergeError(f"layer_range {list(layers)} of {path!r} has layer {missing[0]}, and {there}")
    table: dict[str, str] = {}
    for name in names:
        layer = layer_of(name)
        before = _BEFORE.search(name) is not None and _AFTER.search(name) is None
        if layers[0] <= layer < layers[1]:
            number = layer - layers[0] + start
            table[_LAYER.sub(lambda match, number=number: f"{match[1]}{match[2]}.{number}.", name, count=1)] = name  # type: ignore[misc]
        elif layer < 0 and ends[0 if before else 1]:
            table[name] = name
    return table


def layer_of(name: str) -> int:
    """Return the number of the layer that a name is in; -1 if it is in none."""
    match = _LAYER.search(name)
    return int(match[3]) if match is not None else -1


def _edit_texts(home: Path, slices: Sequence[MergeSlice], template: str | None) -> dict[str, bytes]:
    """Return the side files that differ from those of the first checkpoint: in the number of layers, and the chat template."""
    texts: dict[str, bytes] = {}
    if (home / _CONFIG).is_file() and slices[0].ranges is not None:
        config = parse_json(read_bytes(home / _CONFIG), f"{str(home / _CONFIG)!r}")
        layers = [layer for part in slices for layer in range(*(part.ranges or [(0, 0)])[0])]
        kinds = config.get("layer_types")
        if isinstance(kinds, list):
            config["layer_types"] = [kinds[layer] for layer in layers if layer < len(kinds)]
        config |= {key: len(layers) for key in _COUNTS if key in config}
        texts[_CONFIG] = json.dumps(config, indent=2).encode() + b"\n"
    if template is not None:
        file = home / _TOKENIZER_CONFIG
        settings = parse_json(read_bytes(file), f"{str(file)!r}") if file.is_file() else {}
        settings["chat_template"] = template
        texts[_TOKENIZER_CONFIG] = json.dumps(settings, indent=2, ensure_ascii=False).encode() + b"\n"
        if (home / _TEMPLATE).is_file():  # it takes precedence over the configuration
            texts[_TEMPLATE] = template.encode()
    return texts


def read_template(folder: Path) -> str | None:
    """Return the chat template of a checkpoint, or None if it has none.

    Raises:
        MergeError: If it has several named ones.
    """
    if (folder / _TEMPLATE).is_file():
        return read_bytes(folder / _TEMPLATE).decode("utf-8", "replace")
    file = folder / _TOKENIZER_CONFIG
    template = parse_json(read_bytes(file), f"{str(file)!r}").get("chat_template") if file.is_file() else None
    if not isinstance(template, str | None):
        raise MergeError(f"{str(file)!r} has the chat template {shorten(template)}, which is not one text")
    return template
