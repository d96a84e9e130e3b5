"""The system's C compiler, and the private directory of what it made.

Which compiler there is, how source becomes a loaded library, who may write to the directory, and how an entry is written and
trusted.
"""

from __future__ import annotations

import ctypes
import grp
import hashlib
import os
import platform
import pwd
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# -ffp-contract=off and no -ffast-math: each operation rounds as torch's does, NaN and infinities mean what they say.
_BASE = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-w", "-fno-math-errno", "-fno-trapping-math")
_EXACT = ("-ffp-contract=off", "-fno-strict-aliasing")
_VECTOR = ("-DMODULI_VECTOR_MATH", "-Wl,-z,defs")
#: Tried in this order; the first that compiles and loads is used from then on.
LEVELS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("-march=native", "-fopenmp", *_VECTOR), ("-lmvec", "-lm")),
    (("-march=native", "-fopenmp"), ("-lm",)),
    (("-march=native", "-fopenmp-simd"), ("-lm",)),
    (("-fopenmp-simd",), ("-lm",)),
    ((), ("-lm",)),
)
_SECONDS = 120.0
_MAGIC = b"moduli-kernel-2\n"
_TRAILER = len(_MAGIC) + 32
_LEFTOVER = ".tmp-"


class Unavailable(Exception):
    """No kernel can be compiled here, or this one can't; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler: how it is called, and what identifies it."""

    command: tuple[str, ...]
    identity: str


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
    """Forget what was learned about the compiler, for tests and after installing one."""
    global _level
    _level = None
    _cpu.cache_clear()


def compiler() -> Compiler:
    """The compiler named by `CC`, or else cc, gcc or clang on the path."""
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
            info = os.stat(path)
            return Compiler((path, *words[1:]), _version((path, *words[1:]), info.st_size, info.st_mtime_ns))
    what = f"CC={named} was not found" if named else "no C compiler (cc, gcc, clang) was found"
    raise Unavailable(f"{what}; install one, or set MODULI_KERNELS=foreach")


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...], size: int, modified: int) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiler {command[0]} can't be run ({error}); set MODULI_KERNELS=foreach") from error
    text = hashlib.sha256(done.stdout + done.stderr).hexdigest()
    return f"{' '.join(command)} {size} {modified} {done.returncode} {text}"


@lru_cache(maxsize=1)
def _cpu() -> str:
    """What -march=native means here."""
    parts = [platform.machine(), platform.system()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    break  # one processor tells all
                if line.split(":")[0].strip() in ("vendor_id", "cpu family", "model", "stepping", "flags", "Features"):
                    parts.append(line.strip())
    except OSError:
        parts.append(platform.processor())
    return "\n".join(parts)


def build(source: str, functions: Sequence[str]) -> Library:
    """The library of this source, with these functions: from the cache, or compiled into it.

    Raises `Unavailable` when there is no compiler, it fails, or the cache is not private.
    """
    global _level
    tool, where = compiler(), private(directory())
    problem = ""
    for level in range(_level or 0, len(LEVELS)):
        flags, libraries = LEVELS[level]
        try:
            library = _get(source, functions, tool, where, (*_BASE, *_EXACT, *flags), libraries)
        except _Failed as failure:
            problem = problem or str(failure)
            if failure.final:
                break
            continue
        # The first library tells what the compiler can do; a later one that needs less must not hold back others.
        _level = level if _level is None else _level
        return library
    raise Unavailable(f"{problem}; repair the compiler, or set MODULI_KERNELS=foreach")


class _Failed(Exception):
    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def _get(
    source: str,
    functions: Sequence[str],
    tool: Compiler,
    where: Path,
    flags: tuple[str, ...],
    libraries: tuple[str, ...],
) -> Library:
    key = "\0".join((source, tool.identity, *flags, *libraries, _cpu()))
    name = hashlib.sha256(key.encode()).hexdigest()[:40]
    path, text = where / f"{name}.so", where / f"{name}.c"
    if is_whole(path):
        handle = _open(path, functions)
        if handle is not None:
            return Library(handle, path, text, flags)
    remove_leftovers(where)
    publish(where, text.name, source.encode(), sealed=False)
    publish(where, path.name, _compile(source, tool, flags, libraries), sealed=True)
    handle = _open(path, functions)
    if handle is None:
        path.unlink(missing_ok=True)
        wanted = ", ".join(functions)
        raise _Failed(f"the compiler {tool.command[0]} made a library that can't be loaded or has no {wanted}")
    return Library(handle, path, text, flags)


def _open(path: Path, functions: Sequence[str]) -> ctypes.CDLL | None:
    try:
        handle = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError:
        return None
    return handle if all(hasattr(handle, function) for function in functions) else None


def _compile(source: str, tool: Compiler, flags: tuple[str, ...], libraries: tuple[str, ...]) -> bytes:
    """Compile in a directory that only this call knows."""
    try:
        with tempfile.TemporaryDirectory(prefix="moduli-") as scratch:
            text, result = os.path.join(scratch, "kernel.c"), os.path.join(scratch, "kernel.so")
            with open(text, "w", encoding="utf-8") as file:
                file.write(source)
            done = subprocess.run(
                [*tool.command, *flags, text, "-o", result, *libraries],
                capture_output=True,
                timeout=_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                cwd=scratch,
            )
            if done.returncode != 0:
                lines = done.stderr.decode(errors="replace").strip().splitlines()
                detail = f": {lines[0]}" if lines else ""
                killed = done.returncode < 0
                how = f"was killed by signal {-done.returncode}" if killed else f"failed with code {done.returncode}"
                raise _Failed(f"the compiler {tool.command[0]} {how}{detail}", final=killed)
            with open(result, "rb") as file:
                data = file.read()
    except subprocess.TimeoutExpired as error:
        raise _Failed(f"the compiler {tool.command[0]} did not finish in {_SECONDS:.0f} s", final=True) from error
    except OSError as error:
        raise _Failed(f"the compiler {tool.command[0]} could not be run ({error})", final=True) from error
    if not data.startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")):
        raise _Failed(f"the compiler {tool.command[0]} reported success but made no library", final=True)
    return data


# -- the directory ---------------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Where compiled kernels live: `MODULI_KERNELS_CACHE`, or `moduli/kernels` in the user's cache directory."""
    chosen = os.environ.get("MODULI_KERNELS_CACHE")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    if not root.is_absolute():
        raise Unavailable("there is no home directory; set MODULI_KERNELS_CACHE to a directory of your own")
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
        raise Unavailable(f"{path} can't be made ({reason}); set MODULI_KERNELS_CACHE to another directory") from error
    if not stat.S_ISDIR(found.st_mode):
        raise Unavailable(f"{path} is a link or not a directory; remove it or set MODULI_KERNELS_CACHE")
    if found.st_uid != os.geteuid():
        raise Unavailable(f"{path} belongs to another user; set MODULI_KERNELS_CACHE to a directory of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise Unavailable(f"{path} is open to other users (mode {mode:o}); run: chmod 700 {path}")
    # A user who can write to a directory above could put another directory in this one's place.
    for above in path.resolve().parents:
        info = os.stat(above)
        if info.st_uid not in (0, os.geteuid()):
            raise Unavailable(f"{above}, which contains {path}, belongs to another user; set MODULI_KERNELS_CACHE")
        if _is_open(info):
            raise Unavailable(f"{above}, which contains {path}, is writable by other users; set MODULI_KERNELS_CACHE")
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
        raise Unavailable(f"{where} can't be written ({error.strerror}); set MODULI_KERNELS_CACHE") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sealed:
                file.write(_seal(name, data))
        os.chmod(temporary, 0o700 if sealed else 0o600)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise Unavailable(f"{target} can't be written ({error.strerror}); set MODULI_KERNELS_CACHE") from error
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
