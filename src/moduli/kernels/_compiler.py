"""The system's C compiler, and the private directory of compiled libraries.

Choosing a compiler, loading a library built from source, checking who may write to the directory, and writing and verifying
entries.
"""

from __future__ import annotations

import ctypes
import grp
import hashlib
import os
import platform
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .._cache import find_cache

# -ffp-contract=off and no -ffast-math: each operation rounds as torch's does, NaN and infinities mean what they say.
_BASE = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-w", "-fno-math-errno", "-fno-trapping-math")
_EXACT = ("-ffp-contract=off", "-fno-strict-aliasing")
_VECTOR = ("-DMODULI_VECTOR_MATH", "-Wl,-z,defs")
#: Tried in this order; the first that compiles and loads is used from then on.
LEVELS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("-march=native", "-fopenmp", *_VECTOR), ("-lmvec", "-lm")),
    (("-march=native", "-fopenmp"), ("-lm",)),
    (("-march=native", "-fopenmp-simd"), ("-lm",)),
    ((), ("-lm",)),
)
_SECONDS = 120.0
_MAGIC = b"moduli-kernel-2\n"
_TRAILER = len(_MAGIC) + 32
_REMEDY = "repair the compiler, or set MODULI_KERNELS=foreach"


class Unavailable(Exception):
    """No kernel can be compiled here, or this one can't; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded kernel library and where it came from."""

    handle: ctypes.CDLL
    path: Path
    source: Path
    flags: tuple[str, ...]

    @property
    def threaded(self) -> bool:
        """Whether it was built with OpenMP."""
        return "-fopenmp" in self.flags


_level: int | None = None


def reset() -> None:
    """Clear the detected level of the compiler, for tests and after installing one."""
    global _level
    _level = None
    _cpu.cache_clear()


def compiler() -> tuple[str, ...]:
    """Return the command that `CC` names, or else cc, gcc or clang on the path."""
    if os.name != "posix":
        raise Unavailable("kernels are compiled on POSIX systems only; set MODULI_KERNELS=foreach")
    named = os.environ.get("CC")
    for candidate in [named] if named else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise Unavailable(f"CC={candidate} can't be read ({error}); set MODULI_KERNELS=foreach") from error
        path = shutil.which(words[0]) if words else None
        if path is not None:
            return path, *words[1:]
    what = f"CC={named} was not found" if named else "no C compiler (cc, gcc, clang) was found"
    raise Unavailable(f"{what}; install one, or set MODULI_KERNELS=foreach")


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Return a description of the CPU that determines the meaning of -march=native."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = platform.processor()
    facts = re.findall(r"^(?:vendor_id|cpu family|model|stepping|flags|Features)\s*:.*", text, re.MULTILINE)
    return "\n".join([platform.machine(), platform.system(), *(sorted({*facts}) or [text])])


class _FailedError(Exception):
    """The compiler fails with these flags."""


def build(source: str, functions: Sequence[str]) -> Library:
    """Return the library of this source, with these functions: from the cache, or compiled into it.

    Raises `Unavailable` when there is no compiler, it fails, or the cache is not private.
    """
    global _level
    command, where = compiler(), private(directory())
    problem = ""
    for level in range(_level or 0, len(LEVELS)):
        flags, libraries = LEVELS[level]
        try:
            library = _get(source, functions, command, where, (*_BASE, *_EXACT, *flags), libraries)
        except _FailedError as failure:
            problem = problem or str(failure)
            continue
        # The first library determines the level of the compiler; later ones that need less do not lower it.
        _level = level if _level is None else _level
        return library
    raise Unavailable(f"{problem}; {_REMEDY}")


def _get(
    source: str,
    functions: Sequence[str],
    command: tuple[str, ...],
    where: Path,
    flags: tuple[str, ...],
    libraries: tuple[str, ...],
) -> Library:
    tool = os.stat(command[0])
    key = (source, *command, str(tool.st_size), str(tool.st_mtime_ns), *flags, *libraries, _cpu())
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:40]
    path, text = where / f"{name}.so", where / f"{name}.c"
    handle = _open(path, functions)
    if handle is None:
        body = _compile(source, command, flags, libraries)
        publish(text, source.encode())
        publish(path, body + _seal(path.name, body))
        handle = _open(path, functions)
    if handle is None:
        path.unlink(missing_ok=True)
        wanted = ", ".join(functions)
        raise _FailedError(f"the compiler {command[0]} made a library that can't be loaded or has no {wanted}")
    return Library(handle, path, text, flags)


def _open(path: Path, functions: Sequence[str]) -> ctypes.CDLL | None:
    """Return the library of an entry; None if there is none, it was damaged, or it lacks a function."""
    try:
        handle = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL) if is_whole(path) else None
    except OSError:
        return None
    return handle if all(hasattr(handle, function) for function in functions) else None


def _compile(source: str, command: tuple[str, ...], flags: tuple[str, ...], libraries: tuple[str, ...]) -> bytes:
    """Return a compiled library, built in a temporary directory of this call."""
    try:
        with tempfile.TemporaryDirectory(prefix="moduli-") as scratch:
            text, result = Path(scratch, "kernel.c"), Path(scratch, "kernel.so")
            text.write_text(source, encoding="utf-8")
            done = subprocess.run(
                [*command, *flags, str(text), "-o", str(result), *libraries],
                capture_output=True,
                timeout=_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                cwd=scratch,
            )
            if done.returncode != 0:
                detail = done.stderr.decode(errors="replace").strip().partition("\n")[0]
                raise _FailedError(f"the compiler {command[0]} failed with code {done.returncode}: {detail}")
            return result.read_bytes()
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiler {command[0]} made no library ({error}); {_REMEDY}") from error


# -- the directory ---------------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Return the directory of compiled kernels: `MODULI_KERNELS_CACHE`, or `moduli/kernels` in the user's cache directory."""
    chosen = os.environ.get("MODULI_KERNELS_CACHE")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    folder = find_cache() / "kernels"
    if not folder.is_absolute():
        raise Unavailable("there is no home directory; set MODULI_KERNELS_CACHE to a directory of your own")
    return folder


def private(path: Path) -> Path:
    """Create `path` if need be and return it; raise if another user could have written to it or replaced it."""
    try:
        # `mkdir(parents=True)` would give the directories above the mode that the umask leaves.
        for missing in reversed([above for above in (path, *path.parents) if not os.path.lexists(above)]):
            missing.mkdir(mode=0o700, exist_ok=True)
        info = os.lstat(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"{path} can't be made ({reason}); set MODULI_KERNELS_CACHE to another directory") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise Unavailable(
            f"{path} is no directory, belongs to another user or is open to others ({stat.filemode(info.st_mode)}); "
            f"run: chmod 700 {path}, or set MODULI_KERNELS_CACHE to a directory of your own"
        )
    # A user who can write to a directory above could put another directory in this one's place.
    for above in path.resolve().parents:
        owner = os.stat(above)
        if owner.st_uid not in (0, os.geteuid()) or _is_open(owner):
            raise Unavailable(f"{above}, which contains {path}, is writable by other users; set MODULI_KERNELS_CACHE")
    return path


def _is_open(info: os.stat_result) -> bool:
    """Return whether other users may replace files in a directory; a group with this user alone does not count."""
    if info.st_mode & stat.S_ISVTX or not info.st_mode & 0o022:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(info.st_gid)
    except KeyError:
        return True
    alone = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return bool(info.st_mode & 0o002) or not alone


def _seal(name: str, body: bytes) -> bytes:
    """Return the end of an entry: its checksum together with its name, so that entries can't be exchanged.

    The loader of shared libraries ignores it.
    """
    return _MAGIC + hashlib.sha256(name.encode() + b"\0" + body).digest()


def is_whole(path: Path) -> bool:
    """Return whether an entry exists, belongs to the user, and has the content that was written under this name."""
    try:
        # Not blocking: opening a FIFO would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
                return False
            data = file.read()
    except OSError:
        return False
    return len(data) > _TRAILER and data[-_TRAILER:] == _seal(path.name, data[:-_TRAILER])


def publish(target: Path, data: bytes) -> None:
    """Write an entry under a temporary name and rename it, so that readers see all of it or none."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise Unavailable(f"{target} can't be written ({error.strerror}); set MODULI_KERNELS_CACHE") from error
