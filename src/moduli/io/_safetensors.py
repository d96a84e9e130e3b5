"""Safetensors files: a header that is read strictly, and tensors that are written all or nothing.

Tensors are written one after the other in pieces, each of which is copied first: the checksum is of the bytes that are in the
file, also if another thread goes on training meanwhile. Checksums are put into the header at the end.

A file is eight bytes with the length of the header, little-endian; the header, a JSON object; and the data. The header
has for each tensor its dtype, shape and the range of its bytes in the data, and may have strings under `__metadata__`.
The ranges cover the data without gaps or overlaps. Ours has these strings:

* `format`: "pt", which other readers look for;
* `moduli`: JSON with everything that is not a tensor;
* `moduli.sums`: the checksum of each tensor's bytes (`_checksum`) as 24 hexadecimal digits, in the order of the header;
* `moduli.header`: the CRC-32 of the file from its first byte to the end of the header, taken with zeros in this place, as
  eight hexadecimal digits.

Files of version 0.1 have `moduli.crc32` in the place of `moduli.sums`: the CRC-32 of each tensor's bytes as eight digits.
"""

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from ._checksum import BLOCK, Checksum
from ._dtypes import DTYPES, view_bytes
from ._errors import CheckpointError, DamagedFileError
from ._json import has_form, parse_json
from ._replace import PathLike, replace_file

CONTENT: Final = "moduli"
CHECKSUMS: Final = "moduli.sums"
OLD_CHECKSUMS: Final = "moduli.crc32"
_SEAL: Final = "moduli.header"
_METADATA: Final = "__metadata__"
_UNSEALED: Final = "0" * 8
# Where the checksum of a header of ours is: it is the first string of all.
_PLACE: Final = len(f'12345678{{"{_METADATA}":{{"{_SEAL}":"')

FORMAT: Final = 1
"""The version of what is in `moduli`. It grows when files of a newer one cannot be read by older code."""

_MOST_DIMENSIONS: Final = 64
_LONGEST: Final = 100_000_000  # the limit of the safetensors library


# In pieces as large as this, the system keeps files in large pages, which are mapped several times faster.
_CHUNK: Final = 4 * BLOCK
# Tensors smaller than this wait for each other.
_WAITING: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor in a file: its name, code, shape, and its bytes in the data."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was read.

    Attributes:
        slots: The tensors by name, in the order of the header.
        metadata: The strings beside them.
        start: Where the data begins in the file.
        sealed: Whether the header had a checksum. If it had, it was right.
    """

    slots: dict[str, TensorSlot]
    metadata: dict[str, str]
    start: int
    sealed: bool


def write_tensors(
    path: PathLike,
    tensors: Iterable[tuple[str, Tensor]],
    like: list[tuple[str, str, list[int]]],
    metadata: dict[str, str],
    *,
    checksums: bool = True,
    fsync: bool = True,
) -> None:
    """Write a safetensors file, all of it or nothing.

    Args:
        path: Where to. What is there already is replaced at the end, in one instant.
        tensors: Every name with its tensor, in any order. They are taken one at a time and not kept.
        like: Every name with the code and shape under which its tensor is stored, in the order of the header.
        metadata: Strings for the header.
        checksums: Whether each tensor gets a checksum.
        fsync: Whether to wait until the disk has everything before the old file is replaced.

    Raises:
        CheckpointError: If it cannot be written, or the tensors are not those that were announced. The old file is still
            there then.
    """
    slots = arrange(like)
    order = [name for name, _, _ in like]
    head, place = compose(slots, order, metadata, checksums)
    left = {slot.name: slot for slot in slots}
    sums = dict.fromkeys(left, 0)
    most = max((slot.end - slot.begin for slot in slots), default=0)
    copied = memoryview(bytearray(min(_CHUNK, most)))
    with replace_file(path, fsync) as descriptor, open(descriptor, "wb", _WAITING, closefd=False) as file:
        file.write(head)
        at = 0
        for name, tensor in tensors:
            slot = left.pop(name, None)
            if slot is None:
                raise CheckpointError(f"{name!r} was not announced, or comes twice; this is not a complete model")
            raw = view_bytes(tensor)
            if len(raw) != slot.end - slot.begin:
                raise CheckpointError(f"{name!r} has {len(raw)} bytes where {slot.end - slot.begin} are expected")
            if slot.begin != at:  # to seek is to write what is waiting
                file.seek(len(head) + slot.begin)
            at = slot.end
            checksum = Checksum(len(raw))
            for begin in range(0, len(raw), _CHUNK):
                piece = raw[begin : begin + _CHUNK]
                if checksums:
                    copied[: len(piece)] = piece
                    piece = copied[: len(piece)]
                    checksum.update(piece)
                file.write(piece)
            sums[name] = checksum.value
        if left:
            raise CheckpointError(f"{sorted(left)[0]!r} is missing")
        if checksums:
            text = "".join(f"{sums[name]:024x}" for name in order).encode()
            head[place : place + len(text)] = text
        head[_PLACE : _PLACE + 8] = f"{zlib.crc32(head):08x}".encode()
        file.seek(0)
        file.write(head)


def arrange(tensors: list[tuple[str, str, list[int]]]) -> list[TensorSlot]:
    """Give tensors, as names with codes and shapes, their places: the widest numbers first, so that all are aligned."""
    slots: list[TensorSlot] = []
    begin = 0
    for name, code, shape in sorted(tensors, key=lambda each: -DTYPES[each[1]].itemsize):
        end = begin + count_bytes(code, shape)
        slots.append(TensorSlot(name, code, tuple(shape), begin, end))
        begin = end
    return slots


def count_bytes(code: str, shape: Sequence[int]) -> int:
    """How many bytes a tensor has in a file."""
    return DTYPES[code].itemsize * math.prod(shape)


def compose(
    slots: list[TensorSlot], order: list[str], metadata: dict[str, str], checksums: bool
) -> tuple[bytearray, int]:
    """The beginning of a file, up to its data.

    Args:
        slots: The tensors in the order of the data.
        order: Their names in the order in which the header is to list them.
        metadata: Strings beside the tensors.
        checksums: Whether to leave a place for checksums.

    Returns:
        The bytes, and where the place for checksums is.
    """
    strings = {_SEAL: _UNSEALED}
    if checksums:
        strings[CHECKSUMS] = "0" * (24 * len(slots))
    strings |= metadata
    found = {slot.name: slot for slot in slots}
    entries: dict[str, Any] = {_METADATA: strings}
    for name in order:
        slot = found[name]
        entries[name] = {"dtype": slot.code, "shape": slot.shape, "data_offsets": (slot.begin, slot.end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    return head, head.index(b":", _PLACE + 8) + 2


def parse(head: bytes, size: int) -> Header:
    """Read the beginning of a file.

    Args:
        head: At least the first eight bytes and the header of the file.
        size: The size of the file.

    Raises:
        DamagedFileError: If anything in it is not as it must be. Nothing is allocated that is not as large as what was
            read.
    """
    if size < 8:
        raise DamagedFileError(f"it has {size} bytes, which is not even the length of a header")
    length = int.from_bytes(head[:8], "little")
    if length > size - 8 or length > _LONGEST:
        raise DamagedFileError(f"its header would be {length} bytes long, and the file has {size - 8} more")
    start = 8 + length
    entries = parse_json(bytes(head[8:start]), "its header")
    metadata = entries.pop(_METADATA, {})
    if not has_form(metadata, {str: str}):
        raise DamagedFileError("the metadata in its header is not a mapping from strings to strings")
    sealed = _SEAL in metadata
    if sealed:
        whole = bytearray(head[:start])
        whole[_PLACE : _PLACE + 8] = _UNSEALED.encode()
        crc = f"{zlib.crc32(whole):08x}"
        if head[_PLACE : _PLACE + 8] != crc.encode() or metadata[_SEAL] != crc:
            raise DamagedFileError("its header does not have the checksum that is written in it")
    slots = {name: _slot(name, entry) for name, entry in entries.items()}
    _check_cover(slots, size - start)
    return Header(slots, metadata, start, sealed)


def _slot(name: str, entry: Any) -> TensorSlot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedFileError(f"the entry of {name!r} does not have a dtype, a shape and offsets, and nothing else")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise DamagedFileError(f"{name!r} has the dtype {code!r}, which is unknown")
    if not has_form([shape, offsets], ([_is_natural], (_is_natural, _is_natural))) or len(shape) > _MOST_DIMENSIONS:
        raise DamagedFileError(
            f"the shape of {name!r} is not a list of at most {_MOST_DIMENSIONS} natural numbers, or its offsets are not two"
        )
    if math.prod(max(length, 1) for length in shape) >= 2**63:
        raise DamagedFileError(f"the shape of {name!r} is larger than any memory")
    size, (begin, end) = count_bytes(code, shape), offsets
    if end - begin != size:
        raise DamagedFileError(f"{name!r} needs {size} bytes, and its offsets are from {begin} to {end}")
    return TensorSlot(name, code, tuple(shape), begin, end)


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_cover(slots: dict[str, TensorSlot], size: int) -> None:
    """Refuse gaps and overlaps: every byte of the data belongs to one tensor."""
    end = 0
    for slot in sorted(slots.values(), key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != end:
            what = "overlap" if slot.begin < end else "leave a gap"
            raise DamagedFileError(f"the offsets of {slot.name!r} {what}: they begin at {slot.begin}, not at {end}")
        end = slot.end
    if end != size:
        raise DamagedFileError(f"its tensors have {end} bytes, and the file has {size} for them")
