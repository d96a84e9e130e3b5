"""`moduli links`."""

import difflib
import sys
from typing import Annotated, Any

from typer import Argument, Option

from ._catalogue import entries
from ._complete import complete_link
from ._console import exit_with_usage, print_columns, print_json


def links(
    words: Annotated[
        list[str] | None,
        Argument(metavar="NAME", help="A name, a family, or words to search for.", autocompletion=complete_link),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """The catalogue: links, presets and torch's optimizers, with arguments and references.

    \b
    moduli links Adam
    moduli links momentum
    moduli links trust region
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    query = " ".join(words) if words else None
    catalogue = entries()
    families = {entry["family"] for entry in catalogue.values()}
    # A word may be the name of a family and of one preset; the family says more.
    if query is not None and query in catalogue and query not in families:
        entry = catalogue[query]
        if as_json:
            print_json(_describe_entry(entry, whole=True))
            return
        head, kind = f"{entry['name']}{entry['signature']}", f"{entry['called']}, family {entry['family']}"
        sys.stdout.write(f"{head}\n{kind}\n\n{entry['documentation']}\n")
        return
    matches = list(catalogue.values()) if query is None else _search(catalogue, query, families)
    if as_json:
        print_json([_describe_entry(entry) for entry in matches])
        return
    print_columns([("name", "family", "summary"), *((e["name"], e["family"], e["summary"]) for e in matches)], 2)


def _search(catalogue: dict[str, dict[str, Any]], query: str, families: set[str]) -> list[dict[str, Any]]:
    """Return the entries that have all words of a query, the best matches first; exit if there are none.

    Args:
        catalogue: The entries by name.
        query: A name, a family, or words.
        families: The families of the entries.
    """
    words = query.lower().split()

    def join_texts(entry: dict[str, Any]) -> str:
        return f"{entry['name']} {entry['family']} {entry['kind']} {entry['documentation']}".lower()

    def rank(entry: dict[str, Any]) -> tuple[bool, bool, bool]:
        # Sort an equal name first, then an equal family, then names that contain a word, then documentation that does.
        in_name = any(word in entry["name"].lower() for word in words)
        return entry["name"] != query, entry["family"] != query, not in_name

    matches = [entry for entry in catalogue.values() if all(word in join_texts(entry) for word in words)]
    if query in families:
        matches = [entry for entry in matches if entry["family"] == query or query in entry["name"].lower()]
    if not matches:
        near = [name for name in catalogue if name.lower() == query.lower()] or difflib.get_close_matches(
            query, catalogue, n=3
        )
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; `moduli links` lists what there is"
        exit_with_usage(f"nothing is called {query!r}, and no text has these words{hint}")
    return sorted(matches, key=rank)


def _describe_entry(entry: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """Return an entry for JSON, with its documentation if it is `whole`."""
    keys = ("name", "kind", "family", "summary", "arguments")
    return {key: entry[key] for key in (*keys, *(["documentation"] if whole else []))}
