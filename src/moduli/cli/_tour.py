"""`moduli tour`."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from . import _console as console
from ._console import file_option


def tour(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="Print this program instead: fit, derive, arithmetic, ...")
    ] = None,
    output: Annotated[Path, file_option("The page.", "--out", "-o")] = Path("tour.html"),
    race: Annotated[str, Option(metavar="FILE", help="The report of a race that the page links to.")] = "race.html",
    show: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print what was run as JSON.")] = False,
) -> None:
    """Run six short programs, and write a page with their code, their numbers and their pictures.

    A labelled fit with error bars, a derived weight, model arithmetic with a version that follows, a population with
    uncertainty, a network that grows under its optimizer, and two strangers merged. With a name, the program is printed
    to start from.

    \b
    moduli tour --open
    moduli tour fit > fit.py && python fit.py
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    from .. import lab

    if name is not None:
        try:
            sys.stdout.write(lab.read_program(name))
        except lab.UnknownStopError as error:
            console.exit_with_usage(str(error))
        return
    stops, out = [], console.open_output()
    for each in lab.TOUR:
        stop = lab.run_program(each)
        stops.append(stop)
        if not as_json:
            out.print(f"{each}: {stop.title.rstrip('.')} ({stop.seconds:.1f} s)", style="bold", markup=False)
            out.print("".join(f"  {line}\n" for line in stop.output.splitlines()), markup=False)
    lab.write_tour(stops, output, race)
    if as_json:
        keys = ("name", "title", "code", "output", "seconds")
        console.print_json([{key: getattr(stop, key) for key in keys} for stop in stops])
    console.open_errors().print(
        f"page: {output}   a program to start from: moduli tour NAME", markup=False, style="dim"
    )
    if show:
        webbrowser.open(output.resolve().as_uri())
