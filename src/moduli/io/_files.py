"""`TensorFiles`: one file, a directory or an index of several as a mapping of tensors; and writing directories of shards."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from torch import Tensor

from .._texts import cut, shorten
from ._basics import CheckpointError, DamagedFileError, PathLike, find_twice, has_form, parse_json
from ._open import copy_file, read_bytes
from ._read import TensorFile, TensorMapping
from ._replace import replace_directory, write_bytes
from ._safetensors import Announced, count_bytes, write_tensors

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_WEIGHTS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json", ".part",
)  # fmt: skip
_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class TensorFiles(TensorMapping):
    """The tensors of a checkpoint in one or several safetensors files, each read when it is indexed.

    Args:
        path: A safetensors file; an index file (`model.safetensors.index.json`); or a directory with either.

    Raises:
        OSError: If it cannot be opened.
        CheckpointError: If a file is damaged, or the index does not fit the files.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> import moduli.io as io
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> io.save(folder / "a.safetensors", {"w": torch.ones(2)})
        >>> io.save(folder / "b.safetensors", {"v": torch.zeros(3)})
        >>> index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
        >>> _ = (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        >>> files = io.TensorFiles(folder)
        >>> list(files), files["w"]
        (['w', 'v'], tensor([1., 1.]))
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        paths, weight_map = find_files(self.path)
        self.directory = self.path if self.path.is_dir() else self.path.parent
        self.files = [TensorFile(each) for each in paths]
        files = dict(zip((each.name for each in paths), self.files, strict=True))
        listed = [(name, file) for file, each in files.items() for name in each]
        self._owners = {name: files[file] for name, file in listed}
        if len(self._owners) != len(listed):
            raise DamagedFileError(
                f"{str(self.path)!r} has {shorten(find_twice(name for name, _ in listed))} in two files"
            )
        if weight_map is not None:
            odd = next((pair for pair in set(listed) ^ set(weight_map.items())), None)
            if odd is not None:
                difference = f"its index and its files differ about {shorten(odd[0])} in {cut(odd[1], 300)}"
                raise DamagedFileError(f"{str(self.path)!r}: {difference}")
            # The order of the index is that of the model's names.
            self._owners = {name: files[file] for name, file in weight_map.items()}
        super().__init__(self._owners)

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of a name, without reading it."""
        return self._owners[name].meta(name)

    def verify(self) -> bool:
        """Compare all tensors with their checksums; return whether all files have checksums."""
        return min([file.verify() for file in self.files])  # a list, so that every file is verified

    def __getitem__(self, name: str) -> Tensor:
        return self._owners[name][name]

    def __repr__(self) -> str:
        return f"<{len(self)} tensors in {len(self.files)} files of {str(self.path)!r}>"


def find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the safetensors files of a checkpoint, and the file of each tensor if there is an index.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If a directory has none, or the index is malformed.
    """
    if path.is_dir():
        path = _find_in_directory(path)
    if path.suffix != ".json":
        return [path], None
    weight_map = parse_json(read_bytes(path), f"the index {str(path)!r}").get("weight_map")
    if not has_form(weight_map, {str: str}) or not weight_map:
        raise DamagedFileError(f"{str(path)!r} is no index of a checkpoint: it has no weight_map from names to files")
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DamagedFileError(f"{str(path)!r} names {shorten(name)}, which is no safetensors file beside it")
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{str(path)!r} names {shorten(name)}, which is not there; is the download complete?")
    return [path.parent / name for name in names], weight_map


def _find_in_directory(directory: Path) -> Path:
    """Return the index of a directory, or its only safetensors file."""
    for name in (INDEX, SINGLE):
        if (directory / name).is_file():
            return directory / name
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return indices[0]
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    others = [each.name for each in sorted(directory.iterdir()) if each.suffix in (".bin", ".pt", ".pth")]
    hint = f"; it has {others[0]}, which holds pickles: convert it to safetensors first" if others else ""
    many = f"{len(files)} safetensors files and no {INDEX}" if files else "no safetensors file"
    raise CheckpointError(f"{str(directory)!r} has {many}{hint}")


def side_files(directory: Path) -> list[Path]:
    """Return the other files of a model in the directory of its weights, such as its configuration and tokenizer.

    Raises:
        CheckpointError: If one is a symbolic link to a file outside of the directory, whose content would be copied. Links
            into the `blobs` of Hugging Face's cache, which has the files of a model, are followed.
    """
    files = sorted(each for each in directory.iterdir() if each.is_file())
    chosen = [each for each in files if not each.name.startswith(".") and not each.name.endswith(_WEIGHTS)]
    home = Path(os.path.realpath(directory))
    for each in chosen:
        real = Path(os.path.realpath(each))
        if not real.is_relative_to(home) and not (
            home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
        ):
            reason = f"is a symbolic link to {str(real)!r}, outside of the directory of the model"
            raise CheckpointError(f"{str(each)!r} {reason}; put the file itself in its place, or remove it")
    return chosen


def parse_size(text: str) -> int:
    """Return a number of bytes, written as "5GB" or "500MiB".

    Raises:
        ValueError: If the text has another form.

    Example:
        >>> from moduli.io import parse_size
        >>> parse_size("5GB"), parse_size("1.5 MiB")
        (5000000000, 1572864)
    """
    digits = text.strip().rstrip("KMGiIbBkmg").strip()
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"{shorten(text)} is no size of a file; write it as 5GB or 500MiB")
    return size


def write_directory(
    out: Path,
    tensors: Iterator[tuple[str, Tensor]],
    like: Announced,
    copied: Sequence[Path],
    *,
    shard_size: int | None,
    fsync: bool,
    texts: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint as a directory, all of it or nothing: shards, their index, and side files.

    Args:
        out: The directory, which must not exist or be empty.
        tensors: Every name with its tensor, in the order of `like`.
        like: Every name with the code and shape under which its tensor is stored.
        copied: Files to copy.
        shard_size: The largest number of bytes of tensors in a file, unless one tensor has more; None for one file.
        fsync: Whether to wait for the disk.
        texts: Files to write, by name, also instead of some that would be copied.

    Raises:
        CheckpointError: If it cannot be written, or is not empty.
    """
    shards = _divide(like, shard_size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{str(out)!r} exists and is not an empty directory; remove it, or give another name")

    def fill(folder: Path) -> None:
        weight_map: dict[str, str] = {}
        for at, part in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{at:05d}-of-{len(shards):05d}.safetensors"
            values = islice(tensors, len(part))
            write_tensors(folder / name, values, part, {"format": "pt"}, checksums=False, fsync=fsync)
            weight_map |= dict.fromkeys((each for each, _, _ in part), name)
        if len(shards) > 1:
            total = sum(count_bytes(code, shape) for _, code, shape in like)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            write_bytes(folder / INDEX, text.encode() + b"\n", fsync=fsync)
        for each in copied:
            if each.name not in (texts or {}):
                copy_file(each, folder / each.name)
        for file, content in (texts or {}).items():
            write_bytes(folder / file, content, fsync=fsync)

    replace_directory(out, fill, fsync)


def _divide(like: Announced, most: int | None) -> list[Announced]:
    shards: list[Announced] = [[]]
    filled = 0
    for entry in like:
        size = count_bytes(entry[1], entry[2])
        if most is not None and shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards
