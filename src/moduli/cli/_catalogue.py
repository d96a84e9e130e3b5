"""The catalogue as a file: `moduli links` answers from it, without importing torch.

`make catalogue` writes it again. It has the fingerprint of the files that it was made of; where they have
changed since, the catalogue is made of the links themselves.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["FILE", "describe", "entries", "fingerprint", "write"]

FILE = Path(__file__).with_name("catalogue.json")
_ROOMS = ("m", "presets")


def entries() -> dict[str, dict[str, Any]]:
    """Everything in the catalogue by name: kind, family, summary, arguments, signature and documentation."""
    try:
        kept = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    found: dict[str, dict[str, Any]] = kept.get("entries", {}) if kept.get("made_of") == fingerprint() else describe()
    return found


def fingerprint() -> str:
    """Of the names and sizes of the files that links and presets are in."""
    root = Path(__file__).resolve().parent.parent
    sizes = sorted(
        (os.path.relpath(os.path.join(folder, name), root), os.path.getsize(os.path.join(folder, name)))
        for room in _ROOMS
        for folder, _, names in os.walk(root / room)
        for name in names
        if name.endswith(".py")
    )
    return hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()


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
            "signature": str(_bare(entry.signature)),
            "documentation": entry.doc,
        }
        for entry in catalogue.entries().values()
    }


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """Names and defaults: in a chain there is nothing to write a type for."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters)


def _argument(parameter: inspect.Parameter) -> dict[str, Any]:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return {"name": parameter.name, "default": default, "by_position": by_position}


def write() -> None:
    """Write the file again."""
    content = {"made_of": fingerprint(), "entries": describe()}
    FILE.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
