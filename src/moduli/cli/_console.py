"""Where the command writes, and how it ends when something is wrong."""

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

if TYPE_CHECKING:  # at work it is imported by what needs it: it costs as much as the rest of a short command
    from rich.console import Console
    from rich.progress import Progress


FAILED, WRONG, INTERRUPTED = 1, 2, 130
# As of a program that SIGPIPE ended, which shells do not tell of.
NOT_READ = 141
# In a pipe a table of several wide columns has this width.
PIPED = 100


def file_option(text: str, *names: str, exists: bool = False) -> Any:
    """An option that is a file, and no directory."""
    return typer.Option(*names, exists=exists, dir_okay=False, metavar="FILE", help=text)


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


def explain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which ends with a sentence where a file, a name or a problem is not what it should be."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**given)
        except (typer.Exit, KeyboardInterrupt):
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and not is_read():
                raise typer.Exit(NOT_READ) from None
            from .. import io, lab, merge

            problems = given.get("problem") or []
            for reference in [problems] if isinstance(problems, str) else problems:
                if told := blame(error, reference):
                    fail(f"{reference} raised {told}")
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
    """Write what waits for standard output; if its reader is gone, end in silence."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # What waits would be written again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NOT_READ)


def print_json(value: Any) -> None:
    """Print JSON, and nothing else, on standard output."""
    clean = json.loads(json.dumps(value), parse_constant=lambda _: None)  # JSON has no infinity
    sys.stdout.write(json.dumps(clean, indent=2) + "\n")


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


def blame(error: BaseException, reference: str) -> str:
    """An error with the last line of the user's file that led to it; nothing when no line of it did."""
    from ..lab import split_reference

    place, fact = split_reference(reference), f"{type(error).__name__}: {error}"
    if place is None or isinstance(error, SyntaxError):  # that says the line itself
        return "" if place is None else fact
    file, _ = place
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
    return f"{fact}\n  {file}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def make_bar(*columns: Any) -> Progress:
    """A bar on standard error, which moves in a terminal only and leaves nothing there."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    return Progress(
        columns[0], BarColumn(), MofNCompleteColumn(), *columns[1:],
        console=note(), disable=not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
