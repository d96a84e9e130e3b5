"""Safetensors files: strict reading of headers, and atomic writing of tensors.

Tensors are written one after the other in chunks, each of which is copied first: the checksum is that of the bytes in the
file, even if another thread trains at the same time. Checksums are written into the header at the end.

A file is eight bytes with the length of the header, little-endian; the header, a JSON object; and the data. The header
has for each tensor its dtype, shape and the range of its bytes in the data, and may have strings under `__metadata__`.
The ranges cover the data without gaps or overlaps. Files of this library have these strings:

* `format`: "pt", which other readers look for;
* `moduli`: JSON with everything that is not a tensor;
* `moduli.sums`: the checksum of each tensor's bytes (`_checksum`) as 24 hexadecimal digits, in the order of the header;
* `moduli.header`: the CRC-32 of the file from its first byte to the end of the header, with zeros instead of this string, as
  eight hexadecimal digits.

Files of version 0.1 have `moduli.crc32` instead of `moduli.sums`: the CRC-32 of each tensor's bytes as eight digits.
"""

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._texts import shorten
from ._basics import CheckpointError, DamagedFileError, PathLike, has_form, parse_json
from ._checksum import BLOCK, Checksum
from ._replace import replace_file

_KINDS: Final = {"U": "uint", "I": "int", "F": "float"}
DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    **{f"{code}{bits}": getattr(torch, f"{kind}{bits}") for code, kind in _KINDS.items() for bits in (16, 32, 64)},
    "U8": torch.uint8,
    "I8": torch.int8,
}
"""Dtypes by their codes in a file."""
# C64 is read but not written: pairs can be read by every version of the safetensors library.
CODES: Final[dict[torch.dtype, str]] = {dtype: code for code, dtype in DTYPES.items() if not dtype.is_complex}

CONTENT: Final = "moduli"
CHECKSUMS: Final = "moduli.sums"
OLD_CHECKSUMS: Final = "moduli.crc32"
_SEAL: Final = "moduli.header"
_METADATA: Final = "__metadata__"
_UNSEALED: Final = "0" * 8
# The position of the checksum of the header, which is the first string.
_PLACE: Final = len(f'12345678{{"{_METADATA}":{{"{_SEAL}":"')

FORMAT: Final = 1
"""The version of the format of `moduli`, which increases if older code cannot read newer files."""

Announced: TypeAlias = list[tuple[str, str, list[int]]]
"""Names of tensors with the codes and shapes under which they are stored, in the order of the header."""

_MOST_DIMENSIONS: Final = 64
_LONGEST: Final = 100_000_000  # the limit of the safetensors library


# With writes of this size the system stores files in large pages, which are mapped several times faster.
_CHUNK: Final = 4 * BLOCK
# Tensors smaller than this are buffered and written together.
_WAITING: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor in a file: its name, dtype, shape, and its bytes in the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was read.

    Attributes:
        slots: The tensors by name, in the order of the header.
        metadata: The strings beside them.
        start: The offset of the data in the file.
        sealed: Whether the header has a checksum, which was verified.
    """

    slots: dict[str, TensorSlot]
    metadata: dict[str, str]
    start: int
    sealed: bool


def write_tensors(
    path: PathLike,
    tensors: Iterable[tuple[str, Tensor]],
    like: Announced,
    metadata: dict[str, str],
    *,
    checksums: bool = True,
    fsync: bool = True,
) -> None:
    """Write a safetensors file, all of it or nothing.

    Args:
        path: The file, which is replaced atomically at the end if it exists.
        tensors: Every name with its tensor, in any order. They are read one at a time and not stored.
        like: Every name with the code and shape under which its tensor is stored, in the order of the header.
        metadata: Strings for the header.
        checksums: Whether each tensor gets a checksum.
        fsync: Whether to wait until the disk has everything before the old file is replaced.

    Raises:
        CheckpointError: If it cannot be written, or the tensors are not those that were announced. The old file is still
            there then, unless the error says that it was replaced.
        ValueError: If a name cannot be written as UTF-8.
    """
    head, place, left = compose(like, metadata, checksums)
    sums = {name: 0 for name, _, _ in like}
    most = max((slot.end - slot.begin for slot in left.values()), default=0)
    copied = memoryview(bytearray(min(_CHUNK, most)))

    def write(descriptor: int) -> None:
        with open(descriptor, "wb", _WAITING, closefd=False) as file:
            file.write(head)
            at = 0
            for name, tensor in tensors:
                slot, raw = left.pop(name), view_bytes(tensor)
                if len(raw) != slot.end - slot.begin:
                    sizes = f"has {len(raw)} bytes where {slot.end - slot.begin} are expected"
                    raise CheckpointError(f"{shorten(name)} {sizes}")
                if slot.begin != at:  # only then, since seeking writes the buffer
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
                raise CheckpointError(f"{shorten(sorted(left)[0])} is missing")
            if checksums:
                text = "".join(f"{checksum:024x}" for checksum in sums.values()).encode()
                head[place : place + len(text)] = text
            head[_PLACE : _PLACE + 8] = f"{zlib.crc32(head):08x}".encode()
            file.seek(0)
            file.write(head)

    replace_file(path, write, fsync)


def compose(like: Announced, metadata: dict[str, str], checksums: bool) -> tuple[bytearray, int, dict[str, TensorSlot]]:
    """Return the beginning of a file, up to its data.

    Args:
        like: The names with codes and shapes, in the order of the header.
        metadata: Strings beside the tensors.
        checksums: Whether to reserve space for checksums.

    Returns:
        The bytes, the offset of the checksums in them, and the slots of the tensors: the widest numbers first, so that all are
        aligned.
    """
    slots: dict[str, TensorSlot] = {}
    begin = 0
    for name, code, shape in sorted(like, key=lambda each: -DTYPES[each[1]].itemsize):
        slots[name] = TensorSlot(name, DTYPES[code], tuple(shape), begin, begin + count_bytes(code, shape))
        begin = slots[name].end
    sums = {CHECKSUMS: "0" * (24 * len(slots))} if checksums else {}
    entries: dict[str, Any] = {_METADATA: {_SEAL: _UNSEALED, **sums, **metadata}}
    for name, code, shape in like:
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": (slots[name].begin, slots[name].end)}
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(_explain_surrogate(slots)) from None
    text += b" " * (-len(text) % 8)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    return head, head.index(b":", _PLACE + 8) + 2, slots


def _explain_surrogate(names: Iterable[str]) -> str:
    """Return the error text for a name with half of a surrogate pair, which UTF-8 cannot encode."""
    odd = next((name for name in names if any("\ud800" <= letter <= "\udfff" for letter in name)), None)
    what = "the metadata" if odd is None else f"the name {shorten(odd)}"
    return f"{what} has a lone surrogate in it, which no file can hold as UTF-8; rename it. Nothing was written"


def count_bytes(code: str, shape: Sequence[int]) -> int:
    """Return the number of bytes of a tensor in a file."""
    return DTYPES[code].itemsize * math.prod(shape)


def parse(head: bytes, size: int) -> Header:
    """Read the beginning of a file.

    Args:
        head: At least the first eight bytes and the header of the file.
        size: The size of the file.

    Raises:
        DamagedFileError: If anything in it is invalid. No more memory is allocated than was read.
    """
    start = 8 + parse_length(head[:8], size)
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


def parse_length(head: bytes, size: int) -> int:
    """Return the length of the header of a file, before any of it is read.

    Args:
        head: The first eight bytes of the file.
        size: The size of the file.

    Raises:
        DamagedFileError: If the file is shorter, or the length is above the limit.
    """
    if size < 8 or len(head) < 8:
        raise DamagedFileError(f"it has {size} bytes, which is not even the length of a header")
    length = int.from_bytes(head, "little")
    if length > size - 8:
        raise DamagedFileError(f"its header would be {length} bytes long, and the file has {size - 8} more")
    if length > _LONGEST:
        raise DamagedFileError(f"its header would be {length} bytes long, and a header has {_LONGEST} at most")
    return length


def _slot(name: str, entry: Any) -> TensorSlot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedFileError(
            f"the entry of {shorten(name)} does not have a dtype, a shape and offsets, and nothing else"
        )
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise DamagedFileError(f"{shorten(name)} has the dtype {shorten(code)}, which is unknown")
    if not has_form([shape, offsets], ([_is_natural], (_is_natural, _is_natural))) or len(shape) > _MOST_DIMENSIONS:
        problem = f"is not a list of at most {_MOST_DIMENSIONS} natural numbers, or its offsets are not two"
        raise DamagedFileError(f"the shape of {shorten(name)} {problem}")
    if math.prod(max(length, 1) for length in shape) >= 2**63:
        raise DamagedFileError(f"the shape of {shorten(name)} is larger than any memory")
    size, (begin, end) = count_bytes(code, shape), offsets
    if end - begin != size:
        raise DamagedFileError(f"{shorten(name)} needs {size} bytes, and its offsets are from {begin} to {end}")
    return TensorSlot(name, DTYPES[code], tuple(shape), begin, end)


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_cover(slots: dict[str, TensorSlot], size: int) -> None:
    """Raise DamagedFileError unless every byte of the data belongs to one tensor."""
    end = 0
    for slot in sorted(slots.values(), key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != end:
            what = "overlap" if slot.begin < end else "leave a gap"
            raise DamagedFileError(
                f"the offsets of {shorten(slot.name)} {what}: they begin at {slot.begin}, not at {end}"
            )
        end = slot.end
    if end != size:
        raise DamagedFileError(f"its tensors have {end} bytes, and the file has {size} for them")


# -- dtypes and bytes --------------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def describe_stored(tensor: Tensor, name: str) -> tuple[str, list[int]]:
    """Return the code and the shape under which a tensor is written.

    Raises:
        CheckpointError: If it is not a dense tensor with data, or of a dtype that a file cannot hold.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        what = f"device {str(tensor.device)!r}, layout {tensor.layout}, {tensor.dtype}" + ", nested" * tensor.is_nested
        raise CheckpointError(f"{shorten(name)} ({what}) cannot be saved: only dense tensors with data can; convert it")
    dtype, shape = tensor.dtype, list(tensor.shape)
    if dtype.is_complex:  # as pairs
        dtype, shape = dtype.to_real(), [*shape, 2]
    code = CODES.get(dtype)
    if code is None:
        raise CheckpointError(
            f"{shorten(name)} has dtype {tensor.dtype}, which safetensors files do not have; convert it"
        )
    return code, shape


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as they are written: its own memory if contiguous on the CPU, otherwise a copy."""
    value = tensor.detach()
    if value.is_complex():
        # Lazy conjugation is resolved by a copy, which is contiguous.
        value = torch.view_as_real(value.resolve_conj())
    value = value.resolve_neg().cpu().contiguous()
    raw: np.ndarray[Any, Any] = value.reshape(-1).view(torch.uint8).numpy()
    return raw.data
