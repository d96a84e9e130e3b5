"""`moduli inspect` and `moduli merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._console import fail, note, out, print_json, wrong

__all__ = ["inspect", "merge"]

# Said here, so that the help needs no torch.
RECIPES = ("linear", "soup", "lerp", "slerp", "task_vector", "task_arithmetic", "ties", "dare", "stock")


def inspect(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A checkpoint of moduli, a safetensors file, or one of torch.save.")
    ],
    verify: Annotated[bool, typer.Option(help="Compare every tensor with its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a checkpoint holds: tensors, labels, versions. Nothing in the file is run."""
    from .. import io

    _existing(file)
    try:
        found = io.inspect(file, verify=verify)
    except io.CheckpointError as error:
        fail(str(error))
    if as_json:
        print_json({**found.as_dict(), "parameters": found.parameters})
    else:
        out().print(str(found), markup=False)


def merge(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="How: " + ", ".join(RECIPES) + ".")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="The files; with a base, the base first.")],
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="NAME=VALUE", help="An argument of the recipe: t=0.3, weights=[2,1], density=0.2."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make one model of several, tensor by tensor, without holding a whole model in memory.

    \b
    moduli merge lerp a.safetensors b.safetensors -o c.safetensors --set t=0.3
    moduli merge ties base.safetensors a.safetensors b.safetensors -o c.safetensors --set density=0.2
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    from .. import io
    from ..merge import MergeError

    for file in files:
        _existing(file)
    options = dict(_option(text) for text in option or [])
    if recipe not in io.RECIPES:
        wrong(f"{recipe!r} is not a recipe for files; choose from {', '.join(io.RECIPES)}")
    try:
        io.merge_files(recipe, files, output, **options)
    except MergeError as error:
        wrong(str(error))
    except io.CheckpointError as error:
        fail(str(error))
    found = io.inspect(output)
    if as_json:
        print_json(
            {"path": str(output), "recipe": recipe, "tensors": len(found.tensors), "parameters": found.parameters}
        )
    else:
        note().print(f"{output}: {found.parameters:,} numbers in {len(found.tensors)} tensors", markup=False)


def _existing(file: Path) -> None:
    if file.is_dir():
        wrong(f"{file} is a directory, not a file")
    if not file.is_file():
        wrong(f"there is no file {file}")


def _option(text: str) -> tuple[str, Any]:
    """`name=value`, the value written as in a chain: read by the same parser, so nothing is run."""
    from ..lab import ChainError, parse

    try:
        found = parse(f"option({text})")
    except ChainError as error:
        wrong(f"--set {text}: {error.fact}; write it as t=0.3 or weights=[2, 1]")
    if len(found.links) != 1 or found.links[0].args or len(found.links[0].kwargs) != 1:
        wrong(f"--set {text}: write it as t=0.3 or weights=[2, 1]")
    return found.links[0].kwargs[0]
