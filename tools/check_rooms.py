"""Refuse private names of torch outside of `moduli/_torch.py`, and imports of another room's private modules.

`make lint` runs it, and so does `tests/test_house.py`. A room is a file or folder directly in `src/moduli`; it uses another
through its front door: `from ..optim import X`, never `from ..optim._vectors import X`.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src" / "moduli"
BOUNDARY = "_torch"
SHARED = (
    BOUNDARY,
    "_cache",
    "_deprecated",
    "_encoding",
    "_figures",
    "_html",
    "_loading",
    "_plugins",
    "_search_ranges",
    "_texts",
    "_version",
)
# Named in torch's documentation, in spite of the underscore.
DOCUMENTED = (
    "torch._foreach_",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.Tensor._make_wrapper_subclass",
    "torch.nn.Module._",  # hooks that subclasses override
)
# Names of the interpreter that are details of CPython, or read memory at an address.
INTERPRETER = {"getrefcount", "pythonapi", "from_address", "_getframe"}


def main() -> int:
    """Print all violations; return 1 if there are any."""
    lines = list(check(SOURCE))
    print(*lines, f"{len(lines)} private names or imports" if lines else "Rooms use front doors only", sep="\n")
    return 1 if lines else 0


def check(source: pathlib.Path) -> Iterator[str]:
    """Yield a line for every violation in the package at `source`."""
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        room = inside.parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if room != BOUNDARY:
            for line, name in _private(tree):
                yield f"{source.name}/{inside}:{line}: {name} is private; use a shim of {source.name}/{BOUNDARY}.py"
        package = (source.name, *inside.parts[:-1])
        for line, name in _imported(tree, package):
            parts = name.split(".")[1:]
            if parts[0] != room and parts[0] not in SHARED and room != "__init__" and _is_private(parts[1:]):
                yield f"{source.name}/{inside}:{line}: {name} is inside another room; import it from {parts[0]}"


def _private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every private name of torch or the interpreter."""
    modules = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            dotted = _dotted(node)
            first, _, rest = dotted.partition(".")
            names = [f"{modules[first]}.{rest}" if first in modules else f".{dotted or node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch._"):
            names = [node.value] if node.value.replace(".", "").replace("_", "").isalnum() else []
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            torchs = first == "torch" and _is_private(parts) and not name.startswith(DOCUMENTED)
            if torchs or INTERPRETER.intersection(parts):
                yield node.lineno, name.lstrip(".")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of every import from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            before = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*before, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.startswith(f"{package[0]}."))


def _is_private(parts: list[str]) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


if __name__ == "__main__":
    sys.exit(main())
