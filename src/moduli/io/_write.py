"""Writing tensors to a file, all or nothing.

They are written one after the other in pieces, each of which is copied first: the checksum is of the bytes that are in the
file, also if another thread goes on training meanwhile. Checksums are put into the header at the end.
"""

import os
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from torch import Tensor

from ._checksum import BLOCK, Checksum
from ._dtypes import Scratch, array
from ._errors import CheckpointError
from ._header import TensorSlot, arrange, compose, seal
from ._replace import PathLike, replace_file

# In pieces as large as this, the system keeps files in large pages, which are mapped several times faster.
_CHUNK: Final = 4 * BLOCK
_MOST_AT_ONCE: Final = min(getattr(os, "IOV_MAX", 1024), 1024)


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
    with replace_file(path, fsync) as descriptor:
        sums = _Data(descriptor, slots, len(head)).write(tensors, checksums)
        seal(head, place, [sums[name] for name in order] if checksums else None)
        _write_all(descriptor, [memoryview(head)], 0)


class _Data:
    """The part of a file that holds tensors."""

    def __init__(self, descriptor: int, slots: list[TensorSlot], start: int) -> None:
        self._descriptor = descriptor
        self._slots = {slot.name: slot for slot in slots}
        self._start = start
        # Small tensors that follow each other are written together.
        self._waiting: list[bytes] = []
        self._piece: np.ndarray[Any, Any] | None = None
        self._from = self._to = 0

    def write(self, tensors: Iterable[tuple[str, Tensor]], checksums: bool) -> dict[str, int]:
        sums = dict.fromkeys(self._slots, 0)
        left = set(self._slots)
        scratch = Scratch()
        for name, tensor in tensors:
            if name not in left:
                raise CheckpointError(f"{name!r} was not announced, or comes twice; this is not a complete model")
            left.remove(name)
            slot = self._slots[name]
            values: Any = array(tensor, scratch)
            if values.nbytes != slot.end - slot.begin:
                raise CheckpointError(f"{name!r} has {values.nbytes} bytes where {slot.end - slot.begin} are expected")
            checksum = Checksum(values.nbytes) if checksums else None
            if values.nbytes >= BLOCK:
                self._flush()
                self._write_large(values, self._start + slot.begin, checksum)
            elif values.nbytes:
                copied = values.tobytes()
                if checksum is not None:
                    checksum.update(copied)
                self._write_small(copied, self._start + slot.begin)
            if checksum is not None:
                sums[name] = checksum.value
        self._flush()
        if left:
            raise CheckpointError(f"{sorted(left)[0]!r} is missing")
        return sums

    def _write_large(self, values: Any, offset: int, checksum: Checksum | None) -> None:
        raw = values.reshape(-1).view(np.uint8)
        if checksum is None:
            _write_all(self._descriptor, [memoryview(raw)], offset)
            return
        if self._piece is None or len(self._piece) < min(_CHUNK, len(raw)):
            self._piece = np.empty(min(_CHUNK, len(raw)), np.uint8)
        for begin in range(0, len(raw), _CHUNK):
            piece = self._piece[: min(_CHUNK, len(raw) - begin)]
            piece[:] = raw[begin : begin + _CHUNK]
            checksum.update(piece)
            _write_all(self._descriptor, [piece.data], offset + begin)

    def _write_small(self, values: bytes, offset: int) -> None:
        if offset != self._to or len(self._waiting) >= _MOST_AT_ONCE or self._to - self._from >= BLOCK:
            self._flush()
            self._from = offset
        self._waiting.append(values)
        self._to = offset + len(values)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            _write_all(self._descriptor, waiting, self._from)


def _write_all(descriptor: int, parts: list[Any], offset: int) -> None:
    """Write buffers one after the other; the system may take fewer bytes at a time than it is offered."""
    total = sum(map(len, parts))
    written = _write_some(descriptor, parts, offset)
    if written == total:
        return
    view = memoryview(b"".join(parts)) if len(parts) > 1 else memoryview(parts[0])
    while written < total:
        done = _write_some(descriptor, [view[written:]], offset + written)
        if done == 0:
            raise OSError("the file system takes no more bytes")
        written += done


def _write_some(descriptor: int, parts: list[Any], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, parts, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, b"".join(parts) if len(parts) > 1 else parts[0])
