"""The output of the command, and its exits with an error."""

from __future__ import annotations

import functools
import json
import math
import os
import select
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:  # functions import it when they need it: that takes as long as the rest of a short command
    from rich.console import Console
    from rich.progress import Progress


FAILED, WRONG, INTERRUPTED = 1, 2, 130
# The code of a program that SIGPIPE ended, which shells do not report.
NOT_READ = 141
# In a pipe a table of several wide columns has this width.
PIPED = 100


def file_option(text: str, *names: str, exists: bool = False) -> Any:
    """Return an option that takes a file, and no directory."""
    return typer.Option(*names, exists=exists, dir_okay=False, metavar="FILE", help=text)


def open_output() -> Console:
    """Return a console on standard output; in a pipe, it does not wrap lines."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200, highlight=False)


def open_errors() -> Console:
    """Return a console on standard error; in a pipe, it does not wrap lines."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)


def escape(text: str) -> str:
    """Return text in which control characters are escaped, so that a terminal does not act on texts from files."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Exit with a message on standard error."""
    open_errors().print(escape(message), style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def exit_with_usage(message: str) -> NoReturn:
    """Exit with a message because the command was wrong."""
    fail(message, WRONG)


def explain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with errors of files, names and problems turned into a message and an exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except (typer.Exit, KeyboardInterrupt):
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and not is_read():
                raise typer.Exit(NOT_READ) from None
            from .. import io, lab, merge

            problems = options.get("problem") or []
            for reference in [problems] if isinstance(problems, str) else problems:
                if fact := blame(error, reference):
                    fail(f"{reference} raised {fact}")
            if isinstance(error, io.CheckpointError | OSError):
                fail(str(error))
            names = (lab.ChainSyntaxError, lab.ProblemFileError, lab.problems.UnknownProblemError, merge.MergeError)
            if isinstance(error, (*names, ModuleNotFoundError)):
                exit_with_usage(str(error))
            raise

    return run


def is_read() -> bool:
    """Whether standard output is anything but a pipe whose reader is gone."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return not any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, AttributeError):  # no file, or a system without `poll`
        return True


def flush() -> None:
    """Flush standard output; if the reader of the pipe is gone, exit without a message."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise the interpreter would flush the same buffer again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NOT_READ)


def print_json(value: Any) -> None:
    """Print JSON, and nothing else, on standard output."""
    clean = json.loads(json.dumps(value), parse_constant=lambda _: None)  # JSON has no infinity
    sys.stdout.write(json.dumps(clean, indent=2) + "\n")


def print_columns(
    rows: Sequence[Sequence[str]], wrap: int, *, styles: Sequence[str] = (), piped: int | None = None
) -> None:
    """Print a table, and wrap one column to fit the terminal, or the width `piped` of a pipe.

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
    # Importing rich takes longer than the rest, so it prints colours only.
    console = open_output() if any(styles) and sys.stdout.isatty() else None
    for row_number, row in enumerate(rows):
        cells = [textwrap.wrap(cell, widths[at]) if at == wrap else [cell] for at, cell in enumerate(row)]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "  ".join(f"{part:{size}}" for part, size in zip(parts, widths, strict=True)).rstrip()
            if console is None:
                sys.stdout.write(line + "\n")
            else:
                console.print(line, style=styles[row_number] or None, markup=False, soft_wrap=True)


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many digits; "-" if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}"


def blame(error: BaseException, reference: str) -> str:
    """Return the text of an error that the user's file raised, with the last line of the file that led to it.

    Args:
        error: The error.
        reference: `FILE.py:name`, or the name of a problem.

    Returns:
        The text; it is empty if no line of the file led to the error.
    """
    from ..lab import split_reference

    parts, fact = split_reference(reference), f"{type(error).__name__}: {error}"
    if parts is None or isinstance(error, SyntaxError):  # a SyntaxError names the line itself
        return "" if parts is None else fact
    file, _ = parts
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
    return f"{fact}\n  {file}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def make_bar(*columns: Any) -> Progress:
    """Return a progress bar on standard error; it is drawn in terminals only, and erased at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    return Progress(
        columns[0], BarColumn(), MofNCompleteColumn(), *columns[1:],
        console=open_errors(), disable=not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
