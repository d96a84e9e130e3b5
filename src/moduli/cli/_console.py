"""Where the command writes, and how it ends when something is wrong."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:  # at work it is imported by what needs it: it costs as much as the rest of a short command
    from rich.console import Console


FAILED, WRONG, INTERRUPTED = 1, 2, 130


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


def print_table(table: Any, console: Console, width: int | None = None) -> None:
    """Print a table without blanks at the ends of its lines."""
    options = console.options if width is None else console.options.update(width=width)
    lines = console.render_lines(table, options, pad=False)
    for line in lines:
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            last = line[-1]
            line[-1] = type(last)(last.text.rstrip(), last.style, last.control)
    from rich.segment import Segment, Segments

    console.print(Segments([part for line in lines for part in (*line, Segment.line())]), end="", soft_wrap=True)


def number(value: float | None, digits: int = 4) -> str:
    """A number in a table."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}"
