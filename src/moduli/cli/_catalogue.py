"""`moduli links`, and the catalogue as a file: the command answers from it, without importing torch.

`make catalogue` makes the file of the links, and the tests compare the two.
"""

import difflib
import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ._console import exit_with_usage, print_columns, print_json

FILE = Path(__file__).with_name("catalogue.json")


def links(
    query: Annotated[str | None, Argument(metavar="NAME", help="A name, a family, or words to search for.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """The catalogue: links, presets and torch's optimizers, with arguments and references.

    \b
    moduli links Adam
    moduli links momentum
    moduli links "trust region"
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    known = entries()
    families = {entry["family"] for entry in known.values()}
    # A word may be the name of a family and of one preset; the family says more.
    if query is not None and query in known and query not in families:
        entry = known[query]
        if as_json:
            print_json(_describe_entry(entry, whole=True))
            return
        head, kind = f"{entry['name']}{entry['signature']}", f"{entry['called']}, family {entry['family']}"
        sys.stdout.write(f"{head}\n{kind}\n\n{entry['documentation']}\n")
        return
    found = list(known.values()) if query is None else _search(known, query, families)
    if as_json:
        print_json([_describe_entry(entry) for entry in found])
        return
    print_columns([("name", "family", "summary"), *((e["name"], e["family"], e["summary"]) for e in found)], 2)


def _search(known: dict[str, dict[str, Any]], query: str, families: set[str]) -> list[dict[str, Any]]:
    words = query.lower().split()

    def text(entry: dict[str, Any]) -> str:
        return f"{entry['name']} {entry['family']} {entry['kind']} {entry['documentation']}".lower()

    def rank(entry: dict[str, Any]) -> tuple[bool, bool, bool]:
        # The name itself, then the family, then names that contain a word, then texts that do.
        named = any(word in entry["name"].lower() for word in words)
        return entry["name"] != query, entry["family"] != query, not named

    found = [entry for entry in known.values() if all(word in text(entry) for word in words)]
    if query in families:
        found = [entry for entry in found if entry["family"] == query or query in entry["name"].lower()]
    if not found:
        near = [name for name in known if name.lower() == query.lower()] or difflib.get_close_matches(query, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; `moduli links` lists what there is"
        exit_with_usage(f"nothing is called {query!r}, and no text has these words{hint}")
    return sorted(found, key=rank)


def _describe_entry(entry: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    keys = ("name", "kind", "family", "summary", "arguments")
    return {key: entry[key] for key in (*keys, *(["documentation"] if whole else []))}


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
            "signature": _print_signature(entry.signature),
            "documentation": entry.doc,
        }
        for entry in catalogue.entries().values()
    }


def _print_signature(signature: inspect.Signature) -> str:
    """Names and defaults: in a chain there is nothing to write a type for."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters))


def _argument(parameter: inspect.Parameter) -> dict[str, Any]:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return {"name": parameter.name, "default": default, "by_position": by_position}


def write() -> None:
    """Write the file again."""
    FILE.write_text(json.dumps({"entries": describe()}, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
