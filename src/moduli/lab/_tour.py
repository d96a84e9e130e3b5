"""A tour of the library: six short programs that are run, and one page with their code, their numbers and their pictures."""

from __future__ import annotations

import ast
import contextlib
import html
import io
import os
import re
import runpy
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._results import write_file
from ._sketch import Sketch

TOUR = ("fit", "derive", "arithmetic", "population", "grow", "merge")
"""The names of the programs, in the order in which they are run."""


class UnknownStopError(LookupError):
    """No program of the tour has this name."""


class TourStop(NamedTuple):
    """One program of the tour after it was run.

    Attributes:
        name: Its name.
        title: What it shows, in a line.
        text: What it shows, in a few sentences.
        code: The program without its docstring.
        output: What it printed; where a package is missing, which one.
        picture: What it drew, or None.
        seconds: How long it took.
    """

    name: str
    title: str
    text: str
    code: str
    output: str
    picture: Sketch | None
    seconds: float


def read_program(name: str) -> str:
    """Return the text of one program of the tour.

    Args:
        name: One of `TOUR`.

    Raises:
        UnknownStopError: If there is no such program.

    >>> "mo.minimize" in read_program("fit")
    True
    """
    return str(_locate(name).read_text(encoding="utf-8"))


def run_program(name: str) -> TourStop:
    """Run one program of the tour in this process, and return what it printed and drew.

    Torch's random state and number of threads are restored afterwards.

    Args:
        name: One of `TOUR`.

    Raises:
        UnknownStopError: If there is no such program.

    >>> run_program("derive").title
    'A weight that is derived, not stored.'
    """
    text = read_program(name)
    tree = ast.parse(text)
    title, _, description = (ast.get_docstring(tree) or name).partition("\n\n")
    code = "".join(text.splitlines(keepends=True)[tree.body[0].end_lineno :]).strip()
    printed, began = io.StringIO(), time.perf_counter()
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    # The tensors are small: a second thread saves no time, and on a busy machine the first one waits for it.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed), as_file(_locate(name)) as path:
            names = runpy.run_path(str(path), run_name=f"moduli_tour_{name}")
    except ImportError as error:  # the program needs an extra, which the error names
        printed.write(f"{error}\n")
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - began
    return TourStop(name, title, description, code, printed.getvalue().rstrip(), names.get("picture"), seconds)


def _locate(name: str) -> Any:
    """Return the file of a program."""
    if name not in TOUR:
        raise UnknownStopError(f"the tour has no program {name!r}; it has {', '.join(TOUR)}")
    return files(__package__) / "tours" / f"{name}.py"


def tour_page(stops: Sequence[TourStop], race: str = "race.html") -> str:
    """Return the tour as one HTML page: no scripts, and nothing is loaded from elsewhere.

    Args:
        stops: The programs that were run.
        race: The address of the report of a race, which the page links to.

    >>> page = tour_page([run_program("derive")])
    >>> page[:15], page.count("<svg"), "<script" in page
    ('<!doctype html>', 1, False)
    """
    assets = files(__package__) / "assets"
    parts = {name: (assets / name).read_text(encoding="utf-8") for name in ("report.css", "tour.css", "tour.html")}
    seconds = sum(stop.seconds for stop in stops)
    texts = {
        "css": parts["report.css"] + parts["tour.css"],
        "lead": f"{len(stops)} programs, run in {seconds:.0f} seconds with torch {html.escape(torch.__version__)}.",
        "links": "".join(f'<a href="#{stop.name}">{stop.name}</a>' for stop in stops),
        "race": html.escape(race),
        "stops": "\n".join(map(_write_stop, stops)),
    }
    page = parts["tour.html"]
    for name, text in texts.items():
        page = page.replace("{{" + name + "}}", text, 1)
    return page


def _write_stop(stop: TourStop) -> str:
    """Return the section of a program on the page, as HTML."""
    picture = "" if stop.picture is None else stop.picture.svg()
    title, text, code, output = (html.escape(part) for part in (stop.title, stop.text, stop.code, stop.output))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return (
        f'<section class="card stop" id="{stop.name}"><div class="head"><h2>{title.rstrip(".")}</h2><p>{text}</p></div>'
        f'<div class="halves"><pre class="code">{code}</pre>'
        f'<div>{picture}<pre class="output">{output}</pre>'
        f'<p class="start">To start from it: <code>moduli tour {stop.name} &gt; {stop.name}.py</code></p></div></div></section>'
    )


def write_tour(stops: Sequence[TourStop], path: str | os.PathLike[str], race: str = "race.html") -> Path:
    """Write `tour_page` to a file, in one piece or not at all.

    Args:
        stops: The programs that were run.
        path: The file.
        race: The address of the report of a race, which the page links to.

    Returns:
        The path.
    """
    return write_file(path, tour_page(stops, race).encode())
