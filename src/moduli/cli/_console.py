"""Where the command writes, how it ends when something is wrong, and the problems that it is given."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:  # at work it is imported by what needs it: it costs as much as the rest of a short command
    from rich.console import Console

    from ..lab.problems import Problem


FAILED, WRONG, INTERRUPTED = 1, 2, 130
# In a pipe a table of several wide columns has this width.
PIPED = 100


def out() -> Console:
    """Standard output. In a pipe a line is as long as it needs to be."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200, highlight=False)


def note() -> Console:
    """Standard error; in a pipe, likewise."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)


def escape(text: str) -> str:
    """Text for a terminal: what a file says is shown, and never obeyed."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End with a message on standard error."""
    note().print(escape(message), style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def exit_with_usage(message: str) -> NoReturn:
    """End because the command was wrong."""
    fail(message, WRONG)


def print_json(value: Any) -> None:
    """Print JSON, and nothing else, on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_columns(
    rows: Sequence[Sequence[str]], wrap: int, *, styles: Sequence[str] = (), piped: int | None = None
) -> None:
    """Print a table, of which one column is wrapped to fit the terminal, or a pipe if it is said to have a width.

    Args:
        rows: The cells, the headings first.
        wrap: The column that is wrapped.
        styles: A colour for each row, or nothing.
        piped: The width of a table in a pipe; without it a line is as long as it needs to be.
    """
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else piped
    if width is not None:
        widths[wrap] = min(widths[wrap], max(12, width - sum(widths) - 2 * len(widths) + 2 + widths[wrap]))
    console = out() if any(styles) and sys.stdout.isatty() else None  # rich takes longer than all else
    for place, row in enumerate(rows):
        cells = [textwrap.wrap(cell, widths[at]) if at == wrap else [cell] for at, cell in enumerate(row)]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "  ".join(f"{part:{size}}" for part, size in zip(parts, widths, strict=True)).rstrip()
            if console is None:
                sys.stdout.write(line + "\n")
            else:
                console.print(line, style=styles[place] or None, markup=False, soft_wrap=True)


def number(value: float | None, digits: int = 4) -> str:
    """A number in a table."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}"


def file_of(reference: str) -> Path | None:
    """The file that FILE.py:name is in; None for the name of a problem."""
    file, colon, _ = reference.rpartition(":")
    if not colon:
        return Path(reference).expanduser() if reference.endswith(".py") else None
    return Path(file).expanduser()


def problem_of(reference: str) -> Problem:
    """The problem, or the end of the command with a sentence that says why there is none."""
    from ..lab import ProblemFileError, load_problem, problems

    file = file_of(reference)
    try:
        return problems.get(reference) if file is None else load_problem(reference)
    except (ProblemFileError, problems.UnknownProblemError) as error:
        exit_with_usage(str(error))
    except Exception as error:  # noqa: BLE001 - the user's file is run, and may raise anything
        fail(f"{reference} cannot be loaded: {blame(error, file) or f'{type(error).__name__}: {error}'}")


def blame(error: BaseException, file: Path | None) -> str:
    """An error with the last line of the user's file that led to it; nothing when no line of it did."""
    if file is None:
        return ""
    fact = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return fact  # it says the line itself
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
    return f"{fact}\n  {file}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
