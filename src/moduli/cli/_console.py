"""Where the command writes, and how it ends when something is wrong."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console

__all__ = ["FAILED", "INTERRUPTED", "WRONG", "fail", "note", "number", "out", "print_json", "wrong"]

FAILED, WRONG, INTERRUPTED = 1, 2, 130


def out() -> Console:
    """Standard output. In a pipe a line is as long as it needs to be."""
    return Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200, highlight=False)


def note() -> Console:
    """Standard error; in a pipe, likewise."""
    return Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End with a message on standard error."""
    note().print(message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def wrong(message: str) -> NoReturn:
    """End because the command was wrong."""
    fail(message, WRONG)


def print_json(value: Any) -> None:
    """Print JSON, and nothing else, on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def number(value: float | None, digits: int = 4) -> str:
    """A number in a table."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}"
