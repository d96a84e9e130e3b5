"""The stored list of links, presets and problems, which `moduli links`, `moduli race --list` and the completion read.

To list the names, moduli and torch have to be imported, which takes seconds. The list is therefore stored in the user's cache
directory when it is first made, together with a key that changes with every file of moduli, with torch, and with packages that
add names: a stored list is used only if it was made from the installed files, and otherwise made again.
"""

import contextlib
import hashlib
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._cache import find_cache
from .._plugins import KINDS, list_plugins

PACKAGE = Path(__file__).resolve().parent.parent
# The version of the file's format; with another number, stored lists are made again.
FORMAT = 2


def entries() -> dict[str, dict[str, Any]]:
    """Return links, presets and optimizers by name: kind, family, summary, arguments, signature and documentation."""
    catalogue: dict[str, dict[str, Any]] = read_catalogue()["entries"]
    return catalogue


def read_catalogue() -> dict[str, Any]:
    """Return the stored list (`entries` and `problems`) if it matches the installed files; otherwise make and store it."""
    file, key = locate_cache(), compute_key()
    stored = _read(file)
    if stored.get("key") == key:
        return stored
    catalogue = {"key": key, **describe()}
    # If the file can't be written, the list is made at each call.
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as part:
            json.dump(catalogue, part, ensure_ascii=False)
        os.replace(part.name, file)
    return catalogue


def read_names() -> dict[str, Any]:
    """Return the list for a completion: the stored one, even if it is older than the installed files, or else a new one."""
    stored = _read(locate_cache())
    return stored if stored else read_catalogue()


def _read(file: Path) -> dict[str, Any]:
    """Return the stored list, or an empty dictionary if there is none that can be read."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) and {"key", "entries", "problems"} <= stored.keys() else {}


def locate_cache() -> Path:
    """Return the file of this installation: each environment has one."""
    digest = hashlib.sha256(f"{PACKAGE}\n{sys.prefix}".encode()).hexdigest()[:16]
    return find_cache() / f"catalogue-{digest}.json"


def compute_key() -> str:
    """Return a digest of what the list depends on: the versions, and sizes and times of the sources."""
    parts: list[object] = [FORMAT, sys.version_info[:3], _find_version("torch"), *_list_sources(PACKAGE)]
    for kind in KINDS:
        for point in list_plugins(kind).values():
            parts += [kind, point.name, point.value, point.dist and point.dist.version]
            # The outermost package only: to find a module inside of it, Python would import it.
            spec = find_spec(point.module.partition(".")[0])
            for folder in (spec and spec.submodule_search_locations) or []:
                parts += _list_sources(Path(folder))
            if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
                parts.append(os.stat(spec.origin).st_mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _list_sources(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and time of change of each Python file in a folder, in order."""
    for inside, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                info = os.stat(os.path.join(inside, name))
                yield os.path.join(inside, name), info.st_size, info.st_mtime_ns


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def describe() -> dict[str, dict[str, dict[str, Any]]]:
    """Import all links and problems, and return the list of them."""
    from ..lab import catalogue, problems

    chained = {
        entry.name: {
            "name": entry.name,
            "kind": entry.kind,
            "called": catalogue.KINDS[entry.kind],
            "family": entry.family,
            "summary": entry.summary,
            "arguments": [_describe_argument(parameter) for parameter in entry.signature.parameters.values()],
            "signature": _format_signature(entry.signature),
            "documentation": entry.doc,
        }
        for entry in catalogue.entries().values()
    }
    for name in list_plugins("links").keys() - chained.keys():
        chained[name] = _describe_failure(name)
    return {"entries": chained, "problems": {name: _describe_problem(name, problems) for name in problems.names()}}


def _describe_failure(name: str) -> dict[str, Any]:
    """Return the entry of a name of another package that can't be used, with the reason as its text."""
    from ..lab import ChainSyntaxError, catalogue

    reason = ""
    try:
        catalogue.find(name)
    except ChainSyntaxError as error:
        reason = error.fact
    texts = {"summary": reason, "documentation": reason, "signature": "", "arguments": []}
    return {"name": name, "kind": "broken", "called": "can't be loaded", "family": "broken", **texts}


def _describe_problem(name: str, problems: Any) -> dict[str, Any]:
    """Return the entry of a problem of the room `problems`."""
    try:
        problem = problems.get(name)
    except ImportError as error:  # of another package; it is listed with the reason
        unknown = dict.fromkeys(("optimum", "exact", "parameters", "step_seconds"))
        return {"name": name, "summary": str(error), "tags": [], **unknown}
    entry = {"name": name, "summary": problem.summary, "tags": list(problem.tags), "optimum": problem.optimum}
    return {**entry, "exact": problem.exact, "parameters": problem.dimension, "step_seconds": _time_step(problem)}


def _time_step(problem: Any) -> float | None:
    """Return the processor seconds of a loss with its gradient, the least of a few; None if it can't be evaluated here."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        problem.resample(torch.Generator().manual_seed(0))
        model = problem.model(0)
        for _ in range(4):
            began = time.thread_time()
            problem.loss(model).backward()
            times.append(time.thread_time() - began)
    except (ImportError, RuntimeError, ValueError):  # data that are not installed, or a loss without a gradient
        return None
    finally:
        torch.set_num_threads(threads)
    return float(f"{min(times):.2g}")


def _format_signature(signature: inspect.Signature) -> str:
    """Return names and defaults as text, without types, which are not written in a chain."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters))


def _describe_argument(parameter: inspect.Parameter) -> dict[str, Any]:
    """Return the entry of an argument: its name, its default as text, and whether it may be positional."""
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return {"name": parameter.name, "default": default, "by_position": by_position}
