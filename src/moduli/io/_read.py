"""Reading a file: everything is checked before anything is believed, and no code in it is run."""

import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..particles import CONFIG_KEY as CONFIG
from ..particles import POLICIES, Event
from ._checksum import checksums_of
from ._dtypes import DTYPES, dtype_name
from ._errors import CheckpointError, DamagedFileError, name_file
from ._json import has_form, parse_json
from ._match import public_name
from ._replace import PathLike
from ._safetensors import CHECKSUMS, CONTENT, FORMAT, OLD_CHECKSUMS, parse
from ._tree import check_owners, decode, tensor_names

_HEXADECIMAL = frozenset("0123456789abcdef")
_COMPLEX_NAMES = {dtype_name(dtype): dtype for dtype in (torch.complex32, torch.complex64, torch.complex128)}

LABELS = "labels"
EXTRA = "_extra_state"
PARTS = ("optimizer", "population", "scheduler")
"""The parts of a checkpoint that are objects with a state dict, besides the module."""

_FORM: Final = {
    "module": {
        "extra_state": dict,
        "ties": {str: str},
        "history": [(int, str, [str], [str])],
        "policies": {str: [(str, POLICIES.__contains__)]},
        "virtual": [str],
        "frozen": [str],
    },
    **{part: {"many": {str: dict}} for part in PARTS},
}


class Reader:
    """An open safetensors file.

    The file is mapped, so tensors are read from the disk when their values are looked at. They are views of a private
    mapping: writing into one does not change the file.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be opened.
        DamagedFileError: If it is not a safetensors file from its first byte to its last.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        with open(path, "rb") as file, name_file(self.path):
            self.size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            self.header = parse(head + file.read(min(int.from_bytes(head, "little"), self.size)), self.size)
            self.slots: Mapping[str, Any] = self.header.slots
            self.content = self._content()
            self._views = self._check_views()
            try:
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {self.path!r}: {error}") from error
        self._cache: dict[str, Tensor] = {}

    def damaged(self, why: str) -> DamagedFileError:
        """The error to raise, with the name of the file."""
        return DamagedFileError(f"{self.path!r} is not a checkpoint, or was damaged: {why}")

    def slot(self, name: str) -> Any:
        """Where a tensor is.

        Raises:
            DamagedFileError: If there is none of this name.
        """
        if name not in self.slots:
            raise self.damaged(f"it refers to a tensor {name!r} that is not in it")
        return self.slots[name]

    def _content(self) -> dict[str, Any] | None:
        text = self.header.metadata.get(CONTENT)
        if text is None:
            return None
        if not self.header.sealed:
            raise DamagedFileError("its header has lost its checksum")
        content = parse_json(text.encode("utf-8", "surrogatepass"), "what it says about its tensors")
        version = content.get("format")
        if type(version) is not int or version < 1:
            raise DamagedFileError("it does not say which format it has")
        if version > FORMAT:
            raise CheckpointError(
                f"{self.path!r} has format {version}, and this version of moduli reads formats up to {FORMAT}; upgrade it"
            )
        check_owners(content)
        return content

    def _check_views(self) -> dict[str, torch.dtype]:
        views = (self.content or {}).get("views", {})
        if not has_form(views, {str: str}):
            raise DamagedFileError("what it says about complex tensors is not a mapping")
        found = {}
        for name, kind in views.items():
            dtype = _COMPLEX_NAMES.get(kind)
            slot = self.slots.get(name)
            if dtype is None or slot is None or DTYPES[slot.code] != dtype.to_real() or slot.shape[-1:] != (2,):
                raise DamagedFileError(f"{name!r} is not made of pairs that would be {kind}")
            found[name] = dtype
        return found

    def checksums(self) -> dict[str, int] | None:
        """The checksums that the file holds, by name; None if it holds none."""
        metadata = self.header.metadata
        text = metadata.get(CHECKSUMS, metadata.get(OLD_CHECKSUMS))
        if text is None or self.content is None:
            return None
        width = 24 if CHECKSUMS in metadata else 8
        if len(text) != width * len(self.slots) or not set(text) <= _HEXADECIMAL:
            raise self.damaged("it does not have one checksum for each tensor")
        return {name: int(text[width * at : width * at + width], 16) for at, name in enumerate(self.slots)}

    def verify(self, names: Iterable[str]) -> bool:
        """Compare tensors with their checksums; returns whether there are any.

        Raises:
            DamagedFileError: If one differs.
        """
        sums = self.checksums()
        if sums is None:
            return False
        names = list(dict.fromkeys(names))
        with memoryview(self._map) as data:
            start, slots = self.header.start, [self.slot(name) for name in names]
            parts = [data[start + slot.begin : start + slot.end] for slot in slots]
            new = CHECKSUMS in self.header.metadata
            found = checksums_of(parts) if new else [zlib.crc32(part) for part in parts]
            for part in parts:
                part.release()
        for name, checksum in zip(names, found, strict=True):
            if checksum != sums[name]:
                raise self.damaged(f"the bytes of {name!r} do not have the checksum that was written with them")
        return True

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._views.get(name, DTYPES[self.slots[name].code])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        shape: tuple[int, ...] = self.slots[name].shape
        return shape[:-1] if name in self._views else shape

    def tensor(self, name: str) -> Tensor:
        """A tensor, read when its values are looked at.

        Raises:
            DamagedFileError: If its bytes are not values of its dtype.
        """
        slot = self.slot(name)
        dtype, offset = DTYPES[slot.code], self.header.start + slot.begin
        if slot.end == slot.begin:
            found = torch.empty(slot.shape, dtype=dtype)
        else:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=slot.end - slot.begin, offset=offset)
            # Torch reads numbers by instructions that need them aligned, and crashes if they are not.
            aligned = offset % self.dtype(name).itemsize == 0
            found = (raw if aligned else raw.clone()).view(dtype).view(slot.shape)
        if dtype is torch.bool and found.numel() and int(found.view(torch.uint8).max()) > 1:
            raise self.damaged(f"{name!r} has truth values that are neither true nor false")
        return torch.view_as_complex(found) if name in self._views else found

    def forget(self, name: str) -> None:
        """Let the system take back the memory of a tensor that was read; it is read again where it is looked at again."""
        slot, page = self.slots[name], mmap.PAGESIZE
        start = (self.header.start + slot.begin) // page * page
        length = self.header.start + slot.end - start
        if hasattr(mmap, "MADV_DONTNEED") and length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def copy(self, name: str) -> Tensor:
        """A tensor in memory of its own; the same one each time."""
        found = self._cache.get(name)
        if found is None:
            found = self._cache[name] = self.tensor(name).clone()
        return found


class Saved:
    """The module part of a file.

    Raises:
        DamagedFileError: If what the file says about it makes no sense.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.content: dict[str, Any] = reader.content or {}
        for key, form in _FORM.items():
            if key in self.content and not has_form(self.content[key], form):
                raise DamagedFileError(f"what it says about {key} is malformed")
        self.present = reader.content is None or "module" in self.content
        part = self.content.get("module", {})
        self.extra: dict[str, Any] = part.get("extra_state", {})
        others = set(tensor_names([value for key, value in self.content.items() if key != "module"]))
        # The tensors of extra state and metadata, which belong to the module and have no name in its state dict.
        self.carried = list(dict.fromkeys(tensor_names([self.extra, part.get("metadata")])))
        for name in self.carried:
            reader.slot(name)
        others.update(self.carried)
        self.names = [name for name in reader.slots if name not in others] if self.present else []
        self.ties: dict[str, str] = part.get("ties", {})
        own = set(self.names)
        for name, first in self.ties.items():
            if name in own or first not in own:
                raise DamagedFileError(f"{name!r} is tied to {first!r}, which is not so")
        self.metadata: dict[str, dict[str, Any]] = self.decode(part.get("metadata", {}))
        self.labels = self._read_labels()
        self.history = [Event(n, told, frozenset(a), frozenset(r)) for n, told, a, r in part.get("history", [])]
        self.policies: dict[str, list[list[str]]] = part.get("policies", {})
        self.virtual: list[str] = part.get("virtual", [])
        self.frozen: list[str] = part.get("frozen", [])
        self.kind = str(part.get("class", ""))

    def require(self, part: str) -> None:
        """Refuse to load a part that is not in the file."""
        if part not in self.content:
            has = [each for each in ("module", *PARTS, "extra", "rng") if each in self.content] or ["tensors"]
            raise CheckpointError(f"{self.reader.path!r} has no {part}; it has {', '.join(has)}")

    def objects(self, part: str) -> dict[str | None, dict[str, Any]]:
        """What the file says of the objects of a part, by name; under None if there is one, without a name."""
        found = self.content.get(part, {})
        many: dict[str | None, dict[str, Any]] = found.get("many", {None: found} if found else {})
        return many

    def decode(self, node: Any) -> Any:
        """The tree that JSON of the file stands for."""
        return decode(node, self.reader.copy)

    @property
    def every(self) -> list[str]:
        """Every name, of tensors and of extra state."""
        return [*self.names, *self.ties, *self.extra]

    def source(self, name: str) -> str:
        """The name under which the tensor of a name is in the file."""
        return self.ties.get(name, name)

    def _read_labels(self) -> dict[str, list[dict[str, Any]]]:
        """The axes of labelled tensors by public name, checked.

        Raises:
            DamagedFileError: If they are malformed, or not as many as their axes are long: a range may claim any number
                without writing it.
        """
        if not has_form(self.metadata, {str: {LABELS: {str: [_is_axis]}, CONFIG: {str: dict}}}):
            raise DamagedFileError("its metadata, labels or configurations are malformed")
        shapes = {public_name(name): self.reader.shape(self.source(name)) for name in [*self.names, *self.ties]}
        found: dict[str, list[dict[str, Any]]] = {}
        for path, entry in self.metadata.items():
            for name, axes in entry.get(LABELS, {}).items():
                place = f"{path}.{name}" if path else name
                counts = [_length(axis) for axis in axes]
                # What is not in the file, as buffers that are not persistent, is not loaded either.
                shape = shapes.get(place, counts)
                if len(counts) != len(shape) or any(
                    c not in (None, size) for c, size in zip(counts, shape, strict=True)
                ):
                    raise DamagedFileError(f"the labels of {name!r} are not those of a tensor of shape {shape}")
                found[place] = axes
        return found


def _length(axis: dict[str, Any]) -> int | None:
    """How many labels an axis has; None if it has none."""
    if "range" in axis:
        start, stop, step = map(int, axis["range"])
        return max(0, (stop - start + step - (1 if step > 0 else -1)) // step)
    return len(axis["labels"]) if "labels" in axis else None


def _is_axis(axis: Any) -> bool:
    """Whether it is an axis: with a name, or None for it, and perhaps labels or a range."""
    if not has_form(axis, {"labels": [_is_label], "range": (_is_small, _is_small, _is_small)}):
        return False
    return isinstance(axis.get("name", 0), str | None) and axis.get("range", [1])[-1] != 0


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_label(label: Any) -> bool:
    """Whether a value can be a label: one that can be hashed, compared and printed."""
    if isinstance(label, list | tuple | frozenset):
        return all(map(_is_label, label))
    return label is None or isinstance(label, str | bytes | int | float | complex | np.generic)
