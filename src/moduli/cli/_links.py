"""`moduli links`."""

from __future__ import annotations

import inspect as inspection
from typing import Annotated, Any

import typer
from rich.table import Table

from ..lab import ChainError, catalogue
from ._console import out, print_json, wrong

__all__ = ["links"]


def links(
    query: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A name, or words to search for in names, families and texts."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The catalogue: links, presets and torch's optimizers, with arguments and references.

    \b
    moduli links Adam
    moduli links "trust region"
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    known = catalogue.entries()
    if query is not None and query in known:
        entry = known[query]
        if as_json:
            print_json(_about(entry, whole=True))
            return
        console = out()
        console.print(f"{entry.name}{_bare(entry.signature)}", style="bold", markup=False)
        console.print(f"{catalogue.KINDS[entry.kind]}, family {entry.family}\n", style="dim", markup=False)
        console.print(entry.doc, markup=False)
        return
    found = list(known.values())
    if query is not None:
        words = query.lower().split()
        found = [e for e in found if all(w in f"{e.name} {e.family} {e.kind} {e.doc}".lower() for w in words)]
        # A name that contains the word is a better answer than a text that does.
        found.sort(key=lambda entry: not any(word in entry.name.lower() for word in words))
        if not found:
            try:
                catalogue.find(query)
            except ChainError as error:
                wrong(str(error))
    if as_json:
        print_json([_about(entry) for entry in found])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "family", "summary"):
        table.add_column(column, no_wrap=column != "summary", overflow="fold")
    for entry in found:
        table.add_row(entry.name, entry.family, entry.summary)
    out().print(table, markup=False)


def _bare(signature: inspection.Signature) -> inspection.Signature:
    """Names and defaults: in a chain there is nothing to write a type for."""
    parameters = [p.replace(annotation=inspection.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters)


def _about(entry: catalogue.Entry, whole: bool = False) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "family": entry.family,
        "summary": entry.summary,
        "arguments": [_argument(p) for p in entry.signature.parameters.values()],
    }
    return {**about, "documentation": entry.doc} if whole else about


def _argument(parameter: inspection.Parameter) -> dict[str, Any]:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return {"name": parameter.name, "default": default, "by_position": by_position}
