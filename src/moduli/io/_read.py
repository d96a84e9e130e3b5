"""`SavedFile`: an open checkpoint, checked before it is used; above 400 lines because half of them are docstrings."""

import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .._texts import cut, shorten
from ..layout import public_name
from ..particles import CONFIG_KEY as CONFIG
from ..particles import POLICIES, Event
from ._basics import CheckpointError, DamagedFileError, PathLike, find_twice, has_form, name_file, parse_json
from ._checksum import checksums_of
from ._open import read_regular
from ._safetensors import CHECKSUMS, CONTENT, FORMAT, OLD_CHECKSUMS, dtype_name, parse, parse_length
from ._tree import decode, tensor_names

_HEXADECIMAL = frozenset("0123456789abcdef")
_COMPLEX_NAMES = {dtype_name(dtype): dtype for dtype in (torch.complex32, torch.complex64, torch.complex128)}

LABELS = "labels"
EXTRA = "_extra_state"
PARTS = ("optimizer", "population", "scheduler")
"""The parts of a checkpoint that are objects with a state dict, besides the module."""


def _is_time(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


_FORM: Final = {
    "module": {
        "extra_state": dict,
        "ties": {str: str},
        "history": [(int, str, [str], [str])],
        "edited": [(_is_time, [str])],
        "policies": {str: [(str, POLICIES.__contains__)]},
        "virtual": [str],
        "frozen": [str],
    },
    **{part: {"many": {str: dict}} for part in PARTS},
    "views": {str: str},
    "made": dict,
}


class TensorMapping(Mapping[str, Tensor]):
    """A mapping of tensors by name, each read when it is indexed; iteration and `in` read nothing.

    Args:
        held: The names, in order.
    """

    def __init__(self, held: Collection[str]) -> None:
        self._held = held

    def __contains__(self, name: Any) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class SavedFile(TensorMapping):
    """An open file with everything in it; as a mapping, the tensors of its module.

    The file is memory-mapped, so tensors are read from the disk when their values are used. They are views of a private
    mapping: writing into one does not change the file.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be opened.
        DamagedFileError: If it is not a valid safetensors file, or its content is inconsistent.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self.slots: dict[str, Any] = {}
        self._cache: dict[str, Tensor] = {}
        with name_file(self.path):
            content = self._open()
            self.ours, self.content = content is not None, content or {}
            self._read_module()
        super().__init__([*self.names, *self.ties])
        # Labels are in the same attribute as in a state dict.
        self._metadata = OrderedDict(self.metadata)

    def _open(self) -> dict[str, Any] | None:
        """Read the header and map the file; return its content beside tensors, None if this library did not write it."""

        def read(descriptor: int) -> dict[str, Any] | None:
            self.size = os.fstat(descriptor).st_size
            with open(descriptor, "rb", closefd=False) as file:
                head = file.read(8)
                head += file.read(parse_length(head, self.size))
            self.header = parse(head, self.size)
            self.slots = self.header.slots
            content = self._parse_content()
            self._map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_COPY)
            return content

        return read_regular(read, self.path)

    def _parse_content(self) -> dict[str, Any] | None:
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
        # Arrays and generators are copied: many of one tensor in a small file could need any amount of memory.
        twice = find_twice(tensor_names(content, ("$generator", "$array")))
        if twice is not None:
            raise DamagedFileError(f"two arrays in it are made of the tensor {shorten(twice)}")
        for key, form in _FORM.items():
            if key in content and not has_form(content[key], form):
                raise DamagedFileError(f"what it says about {key} is malformed")
        for name, kind in content.get("views", {}).items():
            dtype, slot = _COMPLEX_NAMES.get(kind), self.slots.get(name)
            if dtype is None or slot is None or slot.dtype != dtype.to_real() or slot.shape[-1:] != (2,):
                raise DamagedFileError(f"{shorten(name)} is not made of pairs that would be {cut(kind, 200)}")
            self.slots[name] = replace(slot, dtype=dtype, shape=slot.shape[:-1])
        return content

    def _read_module(self) -> None:
        self.present = not self.ours or "module" in self.content
        self.part = part = self.content.get("module", {})
        self.extra: dict[str, Any] = part.get("extra_state", {})
        others = set(tensor_names([value for key, value in self.content.items() if key != "module"]))
        # The tensors of extra state and metadata, which belong to the module but have no name in its state dict.
        self.carried = list(dict.fromkeys(tensor_names([self.extra, part.get("metadata")])))
        for name in self.carried:
            self.slot(name)
        others.update(self.carried)
        self.names = [name for name in self.slots if name not in others] if self.present else []
        self.ties: dict[str, str] = part.get("ties", {})
        own = set(self.names)
        for name, first in self.ties.items():
            if name in own or first not in own:
                raise DamagedFileError(f"{shorten(name)} is tied to {shorten(first)}, which is not so")
        self.metadata: dict[str, dict[str, Any]] = self.decode(part.get("metadata", {}))
        self.labels = self._read_labels()

    @cached_property
    def history(self) -> list[Event]:
        """The edits of the module's species."""
        entries = self.part.get("history", [])
        edited = self.part.get("edited", [(None, ())] * len(entries))
        if len(edited) != len(entries):
            raise self.damaged("it says when edits were made, but not of all")
        return [
            Event(number, sentence, frozenset(added), frozenset(removed), tuple(where), when)
            for (number, sentence, added, removed), (when, where) in zip(entries, edited, strict=True)
        ]

    def _read_labels(self) -> dict[str, list[dict[str, Any]]]:
        """Return the axes of labelled tensors by public name, after checking them.

        Raises:
            DamagedFileError: If they are malformed, or their numbers are not the sizes of axes (a range may claim any number).
        """
        if not has_form(self.metadata, {str: {LABELS: {str: [_is_axis]}, CONFIG: {str: dict}}}):
            raise DamagedFileError("its metadata, labels or configurations are malformed")
        shapes = {public_name(name): self.shape(name) for name in [*self.names, *self.ties]}
        labels: dict[str, list[dict[str, Any]]] = {}
        for path, entry in self.metadata.items():
            for name, axes in entry.get(LABELS, {}).items():
                place = f"{path}.{name}" if path else name
                counts = [_count_labels(axis) for axis in axes]
                # Tensors that are not in the file, such as non-persistent buffers, are not loaded, so any sizes are accepted.
                shape = shapes.get(place, counts)
                pairs = zip(counts, shape, strict=False)
                if len(counts) != len(shape) or any(count not in (None, size) for count, size in pairs):
                    raise DamagedFileError(
                        f"the labels of {shorten(name)} are not those of a tensor of shape {shorten(shape)}"
                    )
                labels[place] = axes
        return labels

    def damaged(self, why: str) -> DamagedFileError:
        """Return an error with the name of the file."""
        return DamagedFileError(f"{self.path!r} is not a checkpoint, or was damaged: {why}")

    def slot(self, name: str) -> Any:
        """Return the slot of a tensor.

        Raises:
            DamagedFileError: If there is none of this name.
        """
        if name not in self.slots:
            raise self.damaged(f"it refers to a tensor {shorten(name)} that is not in it")
        return self.slots[name]

    def source(self, name: str) -> str:
        """Return the name under which a tensor is stored: for a tied name that of the first one."""
        return self.ties.get(name, name)

    @property
    def every(self) -> list[str]:
        """Every name, of tensors and of extra state."""
        return [*self, *self.extra]

    def require(self, part: str) -> None:
        """Raise CheckpointError if the file lacks a part."""
        if part not in self.content:
            has = [each for each in ("module", *PARTS, "extra", "rng") if each in self.content] or ["tensors"]
            raise CheckpointError(f"{self.path!r} has no {part}; it has {', '.join(has)}")

    def objects(self, part: str) -> dict[str | None, dict[str, Any]]:
        """Return the entries of the objects of a part, by name; under None if there is one, without a name."""
        node = self.content.get(part, {})
        many: dict[str | None, dict[str, Any]] = node.get("many", {None: node} if node else {})
        return many

    def decode(self, node: Any) -> Any:
        """Return JSON of the file as the tree that it encodes."""
        return decode(node, self.copy)

    def checksums(self) -> dict[str, int] | None:
        """Return the checksums in the file, by name; None if it has none."""
        metadata = self.header.metadata
        text = metadata.get(CHECKSUMS, metadata.get(OLD_CHECKSUMS))
        if text is None or not self.ours:
            return None
        width = 24 if CHECKSUMS in metadata else 8
        if len(text) != width * len(self.slots) or not set(text) <= _HEXADECIMAL:
            raise self.damaged("it does not have one checksum for each tensor")
        return {name: int(text[width * at : width * at + width], 16) for at, name in enumerate(self.slots)}

    def compare(self, names: Iterable[str]) -> bool:
        """Compare tensors with their checksums; return whether the file has checksums.

        Raises:
            DamagedFileError: If one differs.
        """
        sums = self.checksums()
        if sums is None:
            return False
        names = list(dict.fromkeys(names))
        data, start = memoryview(self._map), self.header.start
        parts = [data[start + slot.begin : start + slot.end] for slot in map(self.slot, names)]
        new = CHECKSUMS in self.header.metadata
        new_sums = checksums_of(parts) if new else [zlib.crc32(part) for part in parts]
        for name, checksum in zip(names, new_sums, strict=True):
            if checksum != sums[name]:
                raise self.damaged(f"the bytes of {shorten(name)} do not have the checksum that was written with them")
        return True

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        kind: torch.dtype = self.slots[self.source(name)].dtype
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.slots[self.source(name)].shape)

    def __getitem__(self, name: str) -> Tensor:
        name = self.source(name)
        slot = self.slot(name)
        offset = self.header.start + slot.begin
        if slot.end == slot.begin:
            tensor = torch.empty(slot.shape, dtype=slot.dtype)
        else:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=slot.end - slot.begin, offset=offset)
            # Torch uses instructions that crash for unaligned numbers.
            aligned = offset % slot.dtype.itemsize == 0
            tensor = (raw if aligned else raw.clone()).view(slot.dtype).view(slot.shape)
        if slot.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise self.damaged(f"{shorten(name)} has truth values that are neither true nor false")
        return tensor

    def forget(self, name: str) -> None:
        """Release the memory of a tensor that was read; it is read from the file again when it is used."""
        slot, page = self.slots[self.source(name)], mmap.PAGESIZE
        start = (self.header.start + slot.begin) // page * page
        length = self.header.start + slot.end - start
        if hasattr(mmap, "MADV_DONTNEED") and length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def copy(self, name: str) -> Tensor:
        """Return a copy of a tensor in memory; the same object at every call."""
        name = self.source(name)
        if name not in self._cache:
            self._cache[name] = self[name].clone()
        return self._cache[name]


class TensorFile(SavedFile):
    """The tensors of the module in a safetensors file, each read when it is indexed.

    It can be used like a state dict, also by the recipes of `moduli.merge`, without having all of it in memory. A tensor
    is a view of the file at the time it was opened; writing into one does not change the file.

    Args:
        path: A checkpoint, or any safetensors file.
        checksums: Whether to compare all tensors with their checksums first, which reads the whole file once.

    Attributes:
        path: The file.
        ties: For each tied name, the name under which its tensor is stored.

    Raises:
        OSError: If the file cannot be opened.
        CheckpointError: If it is damaged.

    Example:
        >>> import os, tempfile, torch
        >>> import moduli.io as io
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> io.save(path, torch.nn.Linear(3, 2))
        >>> file = io.TensorFile(path)
        >>> list(file), file.meta("weight").shape, file["bias"].shape
        (['weight', 'bias'], torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(self, path: PathLike, *, checksums: bool = False) -> None:
        super().__init__(path)
        if not self.present:
            raise self.damaged("it has no module")
        if checksums:
            self.verify()

    def __getitem__(self, name: str) -> Tensor:
        if self.source(name) not in self.slots:
            raise KeyError(f"{self.path!r} has no tensor {shorten(name)}")
        return super().__getitem__(name)

    def verify(self) -> bool:
        """Compare all tensors with their checksums; return whether the file has checksums.

        Raises:
            DamagedFileError: If one differs.

        Example:
            >>> import os, tempfile, torch
            >>> import moduli.io as io
            >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
            >>> io.save(path, torch.nn.Linear(3, 2))
            >>> io.TensorFile(path).verify()
            True
        """
        return self.compare([*self.names, *self.carried])

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of a name, without reading it.

        Example:
            >>> import os, tempfile, torch
            >>> import moduli.io as io
            >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
            >>> io.save(path, torch.nn.Linear(3, 2))
            >>> io.TensorFile(path).meta("bias").is_meta
            True
        """
        return torch.empty(self.shape(name), dtype=self.dtype(name), device="meta")

    def __repr__(self) -> str:
        return f"<{len(self)} tensors in {self.path!r}>"


def is_label_table(labels: Any) -> bool:
    """Whether a value has the form of labels in a file: axes by public name, by the path of the module."""
    return has_form(labels, {str: {str: [_is_axis]}})


def _count_labels(axis: dict[str, Any]) -> int | None:
    labels = range(*axis["range"]) if "range" in axis else axis.get("labels")
    return None if labels is None else len(labels)


def _is_axis(axis: Any) -> bool:
    """Whether a value has the form of an axis: a name or None, and optionally labels or a range."""
    if not has_form(axis, {"labels": [_is_label], "range": (_is_small, _is_small, _is_small)}):
        return False
    return isinstance(axis.get("name", 0), str | None) and axis.get("range", [1])[-1] != 0


def _is_small(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62  # so that a range of them has a length


def _is_label(label: Any) -> bool:
    """Whether a value can be a label: plain, so that it can be hashed, compared and printed."""
    if isinstance(label, list | tuple | frozenset):
        return all(map(_is_label, label))
    return label is None or isinstance(label, str | bytes | int | float | complex | np.generic)
