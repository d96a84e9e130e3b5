"""Replacing a file atomically: a new file is written beside the old one, synced, and renamed.

An interrupt at any instant leaves neither a descriptor nor a temporary file. Temporary files of killed writers are
removed by the next writer in that directory: they have names that no other program makes, and are locked as long as
their writers live.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ._basics import CheckpointError, PathLike
from ._open import exhaust, use_descriptor

fcntl: Any
try:
    import fcntl
except ImportError:  # only Unix has it; elsewhere temporary files of killed writers are not removed
    fcntl = None


_NAME: Final = re.compile(r"\.moduli-([0-9a-f]{16})-([0-9a-f]{16})\.part")
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_FOLDER: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FOUND: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def replace_file(path: PathLike, write: Callable[[int], None], fsync: bool = True) -> None:
    """Write a new file that replaces another at the end, and is removed if writing fails.

    Args:
        path: The file to replace, or a new name.
        write: Called with a descriptor, writes the content to it.
        fsync: Whether to wait for the disk.

    Raises:
        CheckpointError: If it cannot be written, or the path is no regular file. The old one is unchanged,
            unless the error says that it was replaced: the failure came after the renaming then.
    """
    replaced = False
    try:
        target, mode = _find_target(path)
        _sweep(target.parent)
        name = Path()

        def fill(descriptor: int) -> bool:
            """Write and rename the file; return False if another writer removed it between creating and locking."""
            nonlocal replaced
            if not _lock(descriptor):
                return False
            if mode is not None:  # at creation, the umask removed permissions
                os.chmod(name, mode)
            write(descriptor)
            if fsync:
                os.fsync(descriptor)
            try:
                os.replace(name, target)
            except OSError:
                # A network file system may have renamed the file although its reply was lost.
                replaced = _is_at(target, descriptor)
                raise
            replaced = True
            return True

        while not replaced:
            name = _make_name(target)
            removing = map(os.unlink, (name,))
            try:
                use_descriptor(fill, name, _NEW, 0o666 if mode is None else mode & 0o777)
            finally:
                try:  # noqa: SIM105 - an interrupt could come between entering a block of Python and the call
                    exhaust(removing)
                except OSError:
                    pass  # it was renamed, or never created
        if fsync:
            sync_directory(target.parent)
    except OSError as error:
        raise _explain(path, error, replaced) from error


def replace_directory(path: PathLike, fill: Callable[[Path], None], fsync: bool = True) -> None:
    """Write a new directory that gets its name at the end, and is removed if writing fails.

    Args:
        path: A new name, or that of an empty directory.
        fill: Called with a directory, writes files into it.
        fsync: Whether to wait for the disk.

    Raises:
        CheckpointError: If it cannot be written.
    """
    replaced = False
    try:
        target = Path(os.path.abspath(path))
        make_directory(target.parent)
        _sweep(target.parent)
        folder = Path()

        def build(descriptor: int) -> None:
            nonlocal replaced
            try:
                if not _lock(descriptor):
                    return
            except OSError:
                pass  # the file system does not lock directories; they are not removed after a killed writer there
            fill(folder)
            if fsync:
                os.fsync(descriptor)
            os.replace(folder, target)
            replaced = True

        while not replaced:
            folder = _make_name(target)
            try:
                os.mkdir(folder)
                use_descriptor(build, folder, _FOLDER)
            finally:
                _remove_folder(folder)
        if fsync:
            sync_directory(target.parent)
    except OSError as error:
        raise _explain(path, error, replaced) from error


def write_bytes(path: PathLike, data: bytes, *, fsync: bool = True) -> None:
    """Write a file, all of it or nothing.

    Args:
        path: The file, which is replaced atomically if it exists.
        data: The whole content.
        fsync: Whether to wait for the disk.

    Raises:
        CheckpointError: If it cannot be written. The old file is unchanged, unless the error says that it was replaced.

    Example:
        >>> import pathlib, tempfile
        >>> import moduli.io as io
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
        >>> io.write_bytes(path, b"whole or not at all")
        >>> path.read_bytes()
        b'whole or not at all'
    """

    def write(descriptor: int) -> None:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)

    replace_file(path, write, fsync)


def make_directory(path: PathLike) -> None:
    """Make a directory and its missing parents, and wait until the disk has all of their names."""
    new = [each for each in (Path(path), *Path(path).parents) if not each.exists()]
    Path(path).mkdir(parents=True, exist_ok=True)
    for each in reversed(new):
        sync_directory(each.parent)


def find_unfinished(directory: PathLike) -> list[Path]:
    """Return the temporary files and directories of writers in a directory."""
    matches = [match for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    return [Path(directory, match[0]) for match in matches if match[2] == _mark(match[1])]


def sync_directory(directory: Path) -> None:
    """Wait until the disk has the names in a directory."""
    if hasattr(os, "O_DIRECTORY"):  # a system on which directories are files
        use_descriptor(os.fsync, directory, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


def _find_target(path: PathLike) -> tuple[Path, int | None]:
    """Return the file to replace and its permissions, None if there is none.

    Raises:
        OSError: If it is no regular file.
    """
    # A link stays a link: its target is replaced.
    target = Path(os.path.realpath(path))
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISLNK(mode):  # `realpath` could not resolve it
        raise OSError(errno.ELOOP, "it is a symbolic link that leads back to itself; remove it, or give another name")
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a regular file; give a new name")
    return target, stat.S_IMODE(mode)


def _explain(path: PathLike, error: OSError, replaced: bool) -> CheckpointError:
    """Return the CheckpointError for an OSError, which says whether the old file is still there."""
    why = error.strerror or error
    if replaced:
        event = f"was replaced by the new one, and then came an error: {why}; it may not survive a loss of power: save again"
        return CheckpointError(f"{os.fspath(path)!r} {event}")
    return CheckpointError(f"cannot write {os.fspath(path)!r}: {why}; what was there before is unchanged")


def _is_at(target: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(target), os.fstat(descriptor))
    except OSError:
        return False


def _make_name(target: Path) -> Path:
    token = secrets.token_hex(8)
    return target.with_name(f".moduli-{token}-{_mark(token)}.part")


def _mark(token: str) -> str:
    """Return the second half of a temporary name, which no other program makes."""
    return hashlib.blake2b(f"moduli/{token}".encode(), digest_size=8).hexdigest()


def _lock(descriptor: int) -> bool:
    """Lock a new file for as long as its writer lives; return whether it still has a name."""
    if fcntl is None:
        return True
    # A sweep removes unlocked files, possibly between creating and locking.
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def _sweep(directory: Path) -> None:
    """Remove the temporary files and directories of killed writers."""
    if fcntl is None:
        return
    for name in find_unfinished(directory):
        is_folder = name.is_dir()

        def remove(descriptor: int, name: Path = name, is_folder: bool = is_folder) -> None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_folder:
                _remove_folder(name)
            else:
                os.unlink(name)

        with suppress(OSError):
            use_descriptor(remove, name, _FOUND | (_FOLDER if is_folder else os.O_RDWR))


def _remove_folder(folder: Path) -> None:
    """Remove a temporary directory, which has no directories in it."""
    try:
        _try_to_remove(folder)
    except BaseException:  # an interrupt; nothing else is raised
        _try_to_remove(folder)
        raise


def _try_to_remove(folder: Path) -> None:
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                os.unlink(folder / name)
        os.rmdir(folder)
