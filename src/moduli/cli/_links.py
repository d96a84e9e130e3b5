"""`moduli links`."""

import difflib
import sys
from typing import Annotated, Any

from typer import Argument, Option

from ._catalogue import entries
from ._complete import complete_link
from ._console import exit_with_usage, print_columns, print_json


def links(
    query: Annotated[
        str | None,
        Argument(metavar="NAME", help="A name, a family, or words to search for.", autocompletion=complete_link),
    ] = None,
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
