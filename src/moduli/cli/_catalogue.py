"""The catalogue as a file: `moduli links` answers from it, without importing torch.

`make catalogue` makes the file of the links, and the tests compare the two.
"""

import inspect
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalogue.json")


def entries() -> dict[str, dict[str, Any]]:
    """Everything in the catalogue by name: kind, family, summary, arguments, signature and documentation."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["entries"]
    return found


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
    FILE.write_text(json.dumps({"entries": describe()}, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
