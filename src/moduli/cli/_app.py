"""The command and its parts."""

import io
import os
import signal
import sys
from typing import Annotated

import typer

from ._console import INTERRUPTED, explain_errors, flush
from ._files import diff, inspect, merge
from ._fit import fit
from ._links import links
from ._race import race
from ._tour import tour

EPILOG = "Exit codes: 0 done, 1 the work failed, 2 the command was wrong, 130 interrupted (what was finished is kept)."

app = typer.Typer(
    name="moduli",
    help="Models as values: race optimizers, fit your own problem, look into and merge checkpoints.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (race, fit, tour, links, inspect, diff, merge):
    app.command(epilog=EPILOG)(explain_errors(command))


def _print_version(requested: bool) -> None:
    if requested:
        from .._version import __version__

        typer.echo(f"moduli {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    return


def main() -> None:
    """Run the command, as the shell calls it.

    >>> from typer.testing import CliRunner
    >>> CliRunner().invoke(app, ["--version"]).output.split()[0]
    'moduli'
    """
    for name in ("SIGTERM", "SIGHUP"):
        # Exit by an exception, as for Ctrl-C, so that cleanup runs. A signal that is ignored from the start (nohup) stays ignored.
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # Replace a closed stream (`>&-`) by the null device: otherwise a file that is opened later would get its descriptor.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        # Characters that the locale can't encode are written as escape sequences.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="moduli")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        flush()
