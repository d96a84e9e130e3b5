"""The private directory of compiled kernels: who may write to it, and how an entry is written and trusted."""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import tempfile
import time
from pathlib import Path

_MAGIC = b"moduli-kernel-2\n"
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
    """Make `path` if need be, and check that no other user could have written to it or replaced it."""
    try:
        # `mkdir(parents=True)` would give the directories above the mode that the umask leaves.
        for missing in reversed([above for above in (path, *path.parents) if not os.path.lexists(above)]):
            missing.mkdir(mode=0o700, exist_ok=True)
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
    # A user who can write to a directory above could put another directory in this one's place.
    for above in path.resolve().parents:
        info = os.stat(above)
        if info.st_uid not in (0, os.geteuid()):
            raise CacheError(f"{above}, which contains {path}, belongs to another user; set MODULI_KERNELS_CACHE")
        if _is_open(info):
            raise CacheError(f"{above}, which contains {path}, is writable by other users; set MODULI_KERNELS_CACHE")
    return path


def _is_open(info: os.stat_result) -> bool:
    """Whether other users may replace what is in a directory. A group that is the user's alone is no other user."""
    if info.st_mode & stat.S_ISVTX or not info.st_mode & 0o022:
        return False
    if info.st_mode & 0o002:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(info.st_gid)
    except KeyError:
        return True
    return not (group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name})


def _seal(name: str, body: bytes) -> bytes:
    """The end of an entry: its checksum together with its name, so that entries can't stand for each other."""
    return _MAGIC + hashlib.sha256(name.encode() + b"\0" + body).digest()


def is_whole(path: Path) -> bool:
    """Whether the entry is there, is the user's own, and is what was written under this name."""
    try:
        # Not blocking: opening a FIFO would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
            return False
        with os.fdopen(os.dup(handle), "rb") as file:
            data = file.read()
    finally:
        os.close(handle)
    return len(data) > _TRAILER and data[-_TRAILER:] == _seal(path.name, data[:-_TRAILER])


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
                file.write(_seal(name, data))
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
