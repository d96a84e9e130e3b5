"""Opening regular files, without leaking a descriptor if an interrupt arrives at any instant.

Python may raise `KeyboardInterrupt` between any two instructions: between `os.open` and the assignment of its result, or between
`finally` and a Python function called in it. Here a descriptor is opened into a list, and closed from it,
by one call each that runs no Python code.
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from ._basics import CheckpointError, PathLike

T = TypeVar("T")

_KINDS: Final = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
}  # fmt: skip
_READ: Final = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))

exhaust: Final = deque[object](maxlen=0).extend
"""Run an iterator to its end. For a `map` of a C function, no interrupt can arrive in between."""


def use_descriptor(work: Callable[[int], T], path: PathLike, flags: int, mode: int = 0o666) -> T:
    """Open a file, call a function with its descriptor, and close it, also if an interrupt comes at any instant.

    Args:
        work: The function; what it returns is returned.
        path: The file.
        flags: As for `os.open`.
        mode: As for `os.open`.
    """
    descriptors: list[int] = []
    opening, closing = map(os.open, (path,), (flags,), (mode,)), map(os.close, descriptors)
    try:
        descriptors.extend(opening)
        return work(descriptors[0])
    finally:
        exhaust(closing)


def read_regular(work: Callable[[int], T], path: PathLike) -> T:
    """Call a function with the descriptor of a regular file that is open for reading.

    Args:
        work: The function; what it returns is returned.
        path: The file.

    Raises:
        OSError: If it cannot be opened, or is a directory.
        CheckpointError: If it is a pipe, a device or a socket; nothing waits for their data.
    """

    def check(descriptor: int) -> T:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if kind != stat.S_IFREG:
            kind_text = f"is {_KINDS.get(kind, 'something else')}, not a regular file"
            raise CheckpointError(f"{os.fspath(path)!r} {kind_text}; copy what comes out of it into a file first")
        return work(descriptor)

    return use_descriptor(check, path, _READ)


def read_bytes(path: PathLike) -> bytes:
    """Read a regular file whole.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be read.
        CheckpointError: If it is a pipe, a device or a socket.

    Example:
        >>> import pathlib, tempfile
        >>> import moduli.io as io
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
        >>> io.write_bytes(path, b"whole")
        >>> io.read_bytes(path)
        b'whole'
    """
    return read_regular(_read_all, path)


def _read_all(descriptor: int) -> bytes:
    # `use_descriptor` closes the descriptor, so the file object must not.
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a regular file to a new file, block by block.

    Args:
        source: The file.
        target: The new file.
    """
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

    def copy_from(reading: int) -> None:
        def copy_to(writing: int) -> None:
            with open(writing, "wb", buffering=0, closefd=False) as file:
                while block := os.read(reading, 1 << 20):
                    left = memoryview(block)
                    while left:
                        left = left[file.write(left) :]

        use_descriptor(copy_to, target, new)

    read_regular(copy_from, source)
