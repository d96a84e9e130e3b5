"""The private directory of compiled kernels: who may write to it, and how an entry is written and trusted."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

__all__ = ["CacheError", "directory", "load_bytes", "private", "publish", "remove_leftovers"]

_MAGIC = b"moduli-kernel-1\n"
_TRAILER = len(_MAGIC) + 32
_LEFTOVER = ".tmp-"


class CacheError(Exception):
    """The cache can't be used; the message says why and what to do."""


def directory() -> Path:
    """Where compiled kernels live: `MODULI_KERNELS_CACHE`, or `moduli/kernels` in the user's cache directory."""
    chosen = os.environ.get("MODULI_KERNELS_CACHE")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    if not root.is_absolute():
        raise CacheError("there is no home directory; set MODULI_KERNELS_CACHE to a directory of your own")
    return root / "moduli" / "kernels"


def private(path: Path) -> Path:
    """Make `path` if need be, and check that nobody else could have written to it or replaced it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheError(f"{path} can't be made ({reason}); set MODULI_KERNELS_CACHE to another directory") from error
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(f"{path} is a link or not a directory; remove it or set MODULI_KERNELS_CACHE")
    if found.st_uid != os.geteuid():
        raise CacheError(f"{path} belongs to another user; set MODULI_KERNELS_CACHE to a directory of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise CacheError(f"{path} is open to other users (mode {mode:o}); run: chmod 700 {path}")
    # Whoever can write to a directory above could put another directory in this one's place.
    for above in path.resolve().parents:
        info = os.stat(above)
        if info.st_uid not in (0, os.geteuid()):
            raise CacheError(f"{above}, which contains {path}, belongs to another user; set MODULI_KERNELS_CACHE")
        if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
            raise CacheError(f"{above}, which contains {path}, is writable by other users; set MODULI_KERNELS_CACHE")
    return path


def load_bytes(path: Path) -> bool:
    """Whether the entry is there, is ours, and is whole."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
            return False
        data = file.read()
    if len(data) <= _TRAILER:
        return False
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    return trailer == _MAGIC + hashlib.sha256(body).digest()


def publish(where: Path, name: str, data: bytes, *, sealed: bool) -> Path:
    """Write an entry under a temporary name and rename it, so that readers see all of it or none.

    A sealed entry carries its checksum at the end, where the loader of shared libraries does not look.
    """
    target = where / name
    try:
        handle, temporary = tempfile.mkstemp(prefix=_LEFTOVER, dir=where)
    except OSError as error:
        raise CacheError(f"{where} can't be written ({error.strerror}); set MODULI_KERNELS_CACHE") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sealed:
                file.write(_MAGIC + hashlib.sha256(data).digest())
        os.chmod(temporary, 0o700 if sealed else 0o600)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise CacheError(f"{target} can't be written ({error.strerror}); set MODULI_KERNELS_CACHE") from error
    return target


def remove_leftovers(where: Path, older_than: float = 3600.0) -> None:
    """Drop temporary files of builds that were killed."""
    limit = time.time() - older_than
    for path in where.glob(_LEFTOVER + "*"):
        try:
            if path.lstat().st_mtime < limit:
                path.unlink()
        except OSError:
            continue  # another process was faster
