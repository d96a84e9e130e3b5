"""`moduli fit`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from . import _console as console
from ._complete import complete_chain, complete_problem

if TYPE_CHECKING:
    from ..lab import Fit


def fit(
    problem: Annotated[
        str,
        Argument(metavar="PROBLEM", help="FILE.py:name, or the name of a problem.", autocompletion=complete_problem),
    ],
    chain: Annotated[
        str,
        Option("--with", "-w", metavar="CHAIN", help="The chain of links, or a preset.", autocompletion=complete_chain),
    ] = "lbfgs",
    output: Annotated[Path | None, console.file_option("A file for model and state.", "--out", "-o")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from --out, if it exists.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Start again, also if --out exists.")] = False,
    steps: Annotated[int, Option(min=0, metavar="N", help="Steps, those before a resume included.")] = 1000,
    target: Annotated[float | None, Option(metavar="VALUE", help="End when the loss is as small as this.")] = None,
    seconds: Annotated[float | None, Option(min=0, metavar="S", help="End after this many seconds.")] = None,
    every: Annotated[float, Option(min=0, metavar="S", help="Seconds between checkpoints.")] = 30.0,
    seed: Annotated[int, Option(min=0, metavar="N", help="Start, batches and the optimizer's randomness.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Minimise your own problem: FILE.py:name is a function that returns a loss, or a Problem.

    The arguments of the function are what is searched for, and their defaults where the search starts. A function without
    arguments returns a module and a function of it that returns the loss. A function that returns several numbers returns
    residuals: the loss is half the sum of their squares, and the fit has standard errors. Ctrl-C ends after the step under way,
    with a checkpoint.

    \b
    moduli fit wave.py:problem --with lbfgs --out wave.safetensors
    moduli fit wave.py:problem --with "Adam | LR(0.1)" --steps 5000 --out wave.safetensors --resume
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    from rich.progress import TimeRemainingColumn

    from ..lab import Ended, ProblemFileError, load_problem
    from ..lab import fit as fit_problem

    _check_output(output, resume, overwrite)
    loaded = load_problem(problem)
    bar = console.make_bar(
        "{task.fields[name]}", "loss {task.fields[loss]}", "{task.fields[rate]}", TimeRemainingColumn()
    )
    with bar:
        task = bar.add_task("fit", total=steps, name=loaded.name, loss="-", rate="")

        def listen(now: dict[str, Any]) -> None:
            rate = f"{now['steps'] / now['seconds']:.0f} steps/s"
            bar.update(task, completed=now["steps"], loss=console.format_number(now["loss"]), rate=rate)

        try:
            result = fit_problem(
                loaded, chain, steps=steps, target=target, seconds=math.inf if seconds is None else seconds, seed=seed,
                out=output, resume=resume, overwrite=overwrite, every=every, listen=listen,
            )  # fmt: skip
        except KeyboardInterrupt:
            hint = f"; {output} has the last checkpoint" if output is not None and output.exists() else ""
            console.fail(f"interrupted{hint}", console.INTERRUPTED)
        except ProblemFileError as error:
            console.fail(str(error))

    if as_json:
        console.print_json(_summarize(result, loaded.name, chain))
    else:
        sys.stdout.write(console.escape("\n".join(_format_result(result, loaded.name))) + "\n")
    if result.reason is Ended.INTERRUPTED:
        if output is not None:
            console.open_errors().print("go on with the same command and --resume", markup=False)
        raise Exit(console.INTERRUPTED)
    if not result.reason.success:
        raise Exit(console.FAILED)


def _check_output(output: Path | None, resume: bool, overwrite: bool) -> None:
    """Exit if it is unclear what to do with an existing file.

    Args:
        output: The file.
        resume: Whether the command has --resume.
        overwrite: Whether the command has --overwrite.
    """
    if resume and output is None:
        console.exit_with_usage("--resume goes on from a file: give it with --out")
    if resume and overwrite:
        console.exit_with_usage("--resume goes on and --overwrite starts again: give one of them")
    if output is not None and output.exists() and not resume and not overwrite:
        console.exit_with_usage(f"{output} exists: go on from it with --resume, or start again with --overwrite")


def _summarize(result: Fit, problem: str, chain: str) -> dict[str, Any]:
    """Return a fit as an object of JSON.

    Args:
        result: The fit.
        problem: The name of the problem.
        chain: The chain in the command.
    """
    return {
        "problem": problem, "chain": chain, "reason": str(result.reason), "value": result.value, "start": result.start,
        "steps": result.steps, "evaluations": result.evaluations, "seconds": round(result.seconds, 3),
        "path": None if result.path is None else str(result.path), "parameters": result.parameters,
        "standard_errors": result.errors,
    }  # fmt: skip


def _format_result(result: Fit, problem: str) -> list[str]:
    """Return the lines that describe the fit of a problem."""
    counts = f"{result.steps} steps, {result.evaluations} evaluations, {result.seconds:.1f} s"
    losses = f"loss {console.format_number(result.start, 6)} -> {console.format_number(result.value, 6)}"
    saved = "" if result.path is None else f", saved in {result.path}"
    parameters = format_fit(result.parameters, result.errors)
    return [f"{problem}: {result.reason}", losses, counts + saved, *parameters]


def format_fit(parameters: dict[str, Any], errors: dict[str, Any] | None) -> list[str]:
    """Return the fitted values, one to a line, with their standard errors if there are any."""
    import numpy

    sign = "±" if "utf" in (sys.stdout.encoding or "").lower() else "+-"
    rows = {}
    for name, values in parameters.items():
        stderr = None if errors is None else numpy.array(errors[name])
        for index, value in numpy.ndenumerate(numpy.array(values)):
            error = "" if stderr is None else f" {sign} {console.format_number(float(stderr[index]), 2)}"
            rows["".join([name, *(f"[{at}]" for at in index)])] = console.format_number(value, 6) + error
    width = max(map(len, rows), default=0)
    return [f"  {name:{width}} = {value}" for name, value in rows.items()]
