"""Writing a file all or nothing: beside the old one, synced, renamed.

Tensors are written straight from their memory, one after the other; one that is on another device or not contiguous is
copied by itself. The checksums are taken of the same bytes on their way, and put into the header at the end.
"""

import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from ._dtypes import Scratch, array
from ._errors import CheckpointError
from ._header import Slot, arrange, compose, seal

fcntl: Any
try:
    import fcntl
except ImportError:  # only Unix has it; elsewhere what a killed writer left behind is not swept up
    fcntl = None

__all__ = ["PathLike", "beside", "write_tensors"]

PathLike = str | os.PathLike[str]

_SUFFIX: Final = ".part"
_CHUNK: Final = 1 << 20
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
    with _replacing(path, fsync) as descriptor:
        sums = _Data(descriptor, slots, len(head)).write(tensors, checksums)
        seal(head, place, [sums[name] for name in order] if checksums else None)
        _write_all(descriptor, [memoryview(head)], 0)


class _Data:
    """The part of a file that holds tensors."""

    def __init__(self, descriptor: int, slots: list[Slot], start: int) -> None:
        self._descriptor = descriptor
        self._slots = {slot.name: slot for slot in slots}
        self._start = start
        # Small tensors that follow each other are written together.
        self._waiting: list[Any] = []
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
            # Small ones wait to be written together, so they cannot share memory.
            values: Any = array(tensor, scratch if tensor.nbytes >= _CHUNK else None)
            if values.nbytes != slot.end - slot.begin:
                raise CheckpointError(f"{name!r} has {values.nbytes} bytes where {slot.end - slot.begin} are expected")
            if values.nbytes >= _CHUNK:
                self._flush()
                sums[name] = self._large(values, self._start + slot.begin, checksums)
            elif values.nbytes:
                if checksums:
                    sums[name] = zlib.crc32(values)
                self._small(values, self._start + slot.begin)
        self._flush()
        if left:
            raise CheckpointError(f"{sorted(left)[0]!r} is missing")
        return sums

    def _large(self, values: Any, offset: int, checksums: bool) -> int:
        view = memoryview(values.reshape(-1)).cast("B")
        if not checksums:
            _write_all(self._descriptor, [view], offset)
            return 0
        found = 0
        for begin in range(0, len(view), _CHUNK):
            chunk = view[begin : begin + _CHUNK]
            found = zlib.crc32(chunk, found)
            _write_all(self._descriptor, [chunk], offset + begin)
        return found

    def _small(self, values: Any, offset: int) -> None:
        if offset != self._to or len(self._waiting) >= _MOST_AT_ONCE or self._to - self._from >= _CHUNK:
            self._flush()
            self._from = offset
        self._waiting.append(values)
        self._to = offset + values.nbytes

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            _write_all(self._descriptor, waiting, self._from)


def _write_all(descriptor: int, parts: list[Any], offset: int) -> None:
    """Write buffers one after the other; the system may take fewer bytes at a time than it is offered."""
    total = sum(part.nbytes for part in parts)
    written = _some(descriptor, parts, offset)
    if written == total:
        return
    view = memoryview(b"".join(parts)) if len(parts) > 1 else memoryview(parts[0]).cast("B")
    while written < total:
        done = _some(descriptor, [view[written:]], offset + written)
        if done == 0:
            raise OSError("the file system takes no more bytes")
        written += done


def _some(descriptor: int, parts: list[Any], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, parts, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, b"".join(parts) if len(parts) > 1 else parts[0])


# -- all or nothing ----------------------------------------------------------------------------------------------------


@contextmanager
def _replacing(path: PathLike, fsync: bool) -> Iterator[int]:
    """A new file that takes the place of another when the block ends, and leaves no trace when it fails."""
    # A link stays a link: the file it leads to is replaced.
    target = Path(os.path.realpath(path))
    try:
        _sweep(target)
        name, descriptor = _create(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {os.fspath(path)!r}: {_reason(error)}") from error
    try:
        try:
            yield descriptor
            if fsync:
                os.fsync(descriptor)
            os.replace(name, target)
        finally:
            os.close(descriptor)
        if fsync:
            _sync_directory(target.parent)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write {os.fspath(path)!r}: {_reason(error)}; what was there before is unchanged"
            ) from error
        raise


def beside(target: Path) -> Iterator[Path]:
    """Unfinished files that are to take the place of a file."""
    start = f".{target.name}."
    with os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(start) and entry.name.endswith(_SUFFIX):
                yield Path(entry.path)


def _create(target: Path) -> tuple[Path, int]:
    if target.is_dir():
        raise IsADirectoryError(21, "it is a directory")
    while True:
        name = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_SUFFIX}")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if fcntl is not None:
                # Whoever sweeps up looks for files that nobody holds; it may have come between creating and locking.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink == 0:
                    os.close(descriptor)
                    continue
            if target.exists():
                os.chmod(name, stat.S_IMODE(target.stat().st_mode))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            os.close(descriptor)
            raise
        return name, descriptor


def _sweep(target: Path) -> None:
    """Remove what writers that were killed have left behind."""
    if fcntl is None:
        return
    for name in beside(target):
        with suppress(OSError):
            descriptor = os.open(name, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
            finally:
                os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # not a system on which directories are files
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
