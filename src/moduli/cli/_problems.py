"""Problems as the command line names them, and what is said when one cannot be had."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ._console import exit_with_usage, fail

if TYPE_CHECKING:
    from ..lab.problems import Problem


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
