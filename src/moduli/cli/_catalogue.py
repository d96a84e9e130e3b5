"""The catalogue as a file: `moduli links` answers from it, without importing torch.

`make catalogue` makes the file of the links, and the tests compare the two. An installed package has the file that it was built
with. In a checkout links may have been edited since: each source file stands in the catalogue with a checksum of its text and
one of what the catalogue tells of it. Where the latter has changed, the answer is made of the links themselves, with a note that
says how to renew the file.
"""

import ast
import inspect
import json
import os
import zlib
from pathlib import Path
from typing import Any

from ._console import note

FILE = Path(__file__).with_name("catalogue.json")
PACKAGE = Path(__file__).resolve().parent.parent
_ROOMS = ("m", "presets")


def entries() -> dict[str, dict[str, Any]]:
    """Everything in the catalogue by name: kind, family, summary, arguments, signature and documentation."""
    try:
        kept = json.loads(FILE.read_text(encoding="utf-8"))
        found: dict[str, dict[str, Any]] = kept["entries"]
        changed = find_changes(kept["sources"]) if (PACKAGE.parent.parent / "pyproject.toml").is_file() else []
    except (OSError, ValueError, KeyError):
        return describe()
    if not changed:
        return found
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    note().print(f"{changed[0]}{more} changed since the catalogue was written: make catalogue renews it", markup=False)
    return describe()


def find_changes(sources: dict[str, str]) -> list[str]:
    """The files whose names, arguments or documentation are no longer those that the catalogue was made of.

    Args:
        sources: By file, the checksum of its text and that of its outline, as sixteen digits.
    """
    now = _list_sources()
    changed = [name for name in sources if name not in now]
    for name, file in now.items():
        with open(file, "rb") as opened:
            text = opened.read()
        kept = sources.get(name, "")
        if _digits(zlib.crc32(text)) != kept[:8] and _outline(text) != kept[8:]:
            changed.append(name)
    return changed


def _list_sources() -> dict[str, str]:
    found = sorted(
        os.path.join(folder, name)
        for room in _ROOMS
        for folder, _, names in os.walk(os.path.join(PACKAGE, room))
        for name in names
        if name.endswith(".py")
    )
    return {os.path.relpath(file, PACKAGE).replace(os.sep, "/"): file for file in found}


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"


def _outline(text: bytes) -> str:
    """The checksum of a file without imports and what its functions do: names, arguments, documentation, values."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
    return _digits(zlib.crc32(ast.dump(tree).encode()))


def describe() -> dict[str, dict[str, Any]]:
    """The catalogue, made of the links themselves. Imports all of them."""
    from ..lab import catalogue

    return {
        entry.name: {
            "name": entry.name,
            "kind": entry.kind,
            "called": catalogue.KINDS[entry.kind],
            "family": entry.family,
            "summary": entry.summary,
            "arguments": [_argument(parameter) for parameter in entry.signature.parameters.values()],
            "signature": str(_strip_annotations(entry.signature)),
            "documentation": entry.doc,
        }
        for entry in catalogue.entries().values()
    }


def _strip_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Names and defaults: in a chain there is nothing to write a type for."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters)


def _argument(parameter: inspect.Parameter) -> dict[str, Any]:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return {"name": parameter.name, "default": default, "by_position": by_position}


def write() -> None:
    """Write the file again."""
    texts = {name: Path(file).read_bytes() for name, file in _list_sources().items()}
    content = {
        "entries": describe(),
        "sources": {name: _digits(zlib.crc32(text)) + _outline(text) for name, text in texts.items()},
    }
    FILE.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
