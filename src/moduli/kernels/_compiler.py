"""The system's C compiler: finding it, knowing which one it is, and turning source into a loaded library."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import _cache

# -ffp-contract=off and no -ffast-math: each operation rounds as torch's does, NaN and infinities mean what they say.
_BASE = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_ALIASING = ("-fno-strict-aliasing",)
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
    tool = compiler()
    try:
        where = _cache.private(_cache.directory())
        problem = ""
        for level in range(_level or 0, len(LEVELS)):
            flags, libraries = LEVELS[level]
            try:
                library = _get(source, functions, tool, where, (*_BASE, *_ALIASING, *flags), libraries)
            except _Failed as failure:
                problem = problem or str(failure)
                if failure.final:
                    break
                continue
            # The first library tells what the compiler can do; a later one that needs less must not hold back others.
            _level = level if _level is None else _level
            return library
    except _cache.CacheError as error:
        raise Unavailable(str(error)) from error
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
    if _cache.is_whole(path):
        handle = _open(path, functions)
        if handle is not None:
            return Library(handle, path, text, flags)
    _cache.remove_leftovers(where)
    _cache.publish(where, text.name, source.encode(), sealed=False)
    _cache.publish(where, path.name, _compile(source, tool, flags, libraries), sealed=True)
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
