"""Taking the place of a file in one instant: a new file is written beside the old one, synced, and renamed."""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ._basics import CheckpointError, PathLike

fcntl: Any
try:
    import fcntl
except ImportError:  # only Unix has it; elsewhere what a killed writer left behind is not swept up
    fcntl = None


_NAME: Final = re.compile(r"\.moduli-([0-9a-f]{16})-([0-9a-f]{16})\.part")


@contextmanager
def replace_file(path: PathLike, fsync: bool = True) -> Iterator[int]:
    """A new file that takes the place of another when the block ends, and leaves no trace when it fails.

    Args:
        path: The file to replace, or a new name.
        fsync: Whether to wait for the disk.

    Yields:
        The descriptor of the new file.

    Raises:
        CheckpointError: If it cannot be written, or there is something that is no regular file. The old one is unchanged.
    """
    # A link stays a link: the file it leads to is replaced.
    target = Path(os.path.realpath(path))
    name: Path | None = None
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        if target.exists() and not target.is_file():
            raise OSError(22, "it is a device, a pipe or a socket, not a regular file; give a new name")
        _sweep(target)
        name, descriptor = _create(target)
        try:
            if target.exists():
                os.chmod(name, stat.S_IMODE(target.stat().st_mode))
            yield descriptor
            if fsync:
                os.fsync(descriptor)
            os.replace(name, target)
        finally:
            os.close(descriptor)
        if fsync:
            _sync_directory(target.parent)
    except BaseException as error:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError):
            told = f"{error.strerror or error}; what was there before is unchanged"
            raise CheckpointError(f"cannot write {os.fspath(path)!r}: {told}") from error
        raise


def write_bytes(path: PathLike, data: bytes, *, fsync: bool = True) -> None:
    """Write a file, all of it or nothing.

    Args:
        path: Where to. What is there already is replaced in one instant.
        data: The whole content.
        fsync: Whether to wait for the disk.

    Raises:
        CheckpointError: If it cannot be written. The old file is unchanged.

    Example:
        >>> import pathlib, tempfile
        >>> import moduli.io as io
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
        >>> io.write_bytes(path, b"whole or not at all")
        >>> path.read_bytes()
        b'whole or not at all'
    """
    with replace_file(path, fsync) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(data)


def make_directory(path: PathLike) -> None:
    """Make a directory and those above it that are missing, and wait until the disk has all of their names."""
    new = [each for each in (Path(path), *Path(path).parents) if not each.exists()]
    Path(path).mkdir(parents=True, exist_ok=True)
    for each in reversed(new):
        _sync_directory(each.parent)


def find_unfinished(path: PathLike) -> list[Path]:
    """Files that writers have begun, to take the place of a file: those with names that `replace_file` made for it."""
    target = Path(os.path.realpath(path))
    with os.scandir(target.parent) as entries:
        found = [(entry.path, match) for entry in entries if (match := _NAME.fullmatch(entry.name))]
    return [Path(name) for name, match in found if match[2] == _mark(target, match[1])]


def _mark(target: Path, token: str) -> str:
    """Ties a temporary name to its file. It has the same length for every name, and no other program makes such names."""
    text = f"{token}/{target.name}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _create(target: Path) -> tuple[Path, int]:
    while True:
        token = secrets.token_hex(8)
        name = target.with_name(f".moduli-{token}-{_mark(target, token)}.part")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        if fcntl is None:
            return name, descriptor
        # A sweep takes files that no process has locked; it may have come between creating and locking.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink > 0:
            return name, descriptor
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove what writers that were killed have left behind."""
    if fcntl is None:
        return
    for name in find_unfinished(target):
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
