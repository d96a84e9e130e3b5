"""`moduli race`."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from . import _console as console
from ._catalogue import read_catalogue
from ._complete import complete_chain, complete_problem
from ._console import file_option
from ._race_files import RaceFiles

if TYPE_CHECKING:
    from .. import lab


def race(
    problem: Annotated[
        list[str] | None,
        Argument(metavar="PROBLEM", help="Names (--list), or FILE.py:name.", autocompletion=complete_problem),
    ] = None,
    chain: Annotated[
        list[str] | None,
        Option(
            "--with",
            "-w",
            metavar="CHAIN",
            help="A chain, a preset, FILE.py:Name, or LABEL: CHAIN.",
            autocompletion=complete_chain,
        ),
    ] = None,
    seeds: Annotated[str, Option(metavar="N", help="How many seeds, or which: 3, or 0,4,7.")] = "3",
    budget: Annotated[int | None, Option(min=1, metavar="N", help="Evaluations per run.")] = None,
    seconds: Annotated[float, Option(min=0.1, metavar="S", help="The time limit of a run.")] = 30.0,
    workers: Annotated[int | None, Option(min=0, metavar="N", help="Runs at a time; one per core.")] = None,
    threads: Annotated[int, Option(min=1, metavar="N", help="Threads of each run.")] = 1,
    target: Annotated[float | None, Option(metavar="VALUE", help="A loss as small as this is solved.")] = None,
    tune: Annotated[
        int | None, Option(min=1, metavar="N", help="Settings of each optimizer, dealt to the seeds.")
    ] = None,
    ranges: Annotated[
        list[str] | None,
        Option("--range", metavar="NAME=LOW..HIGH", help="With --tune, a range, or NAME=VALUE to fix."),
    ] = None,
    by: Annotated[str, Option(metavar="COST", help="With --tune, rank by evaluations or by seconds.")] = "evaluations",
    output: Annotated[Path, file_option("The report.", "--out", "-o")] = Path("race.html"),
    file: Annotated[Path | None, file_option("Where finished runs are kept.")] = None,
    resume: Annotated[bool, Option("--resume", help="Keep the runs that the file has, and do the others.")] = False,
    repeat: Annotated[Path | None, file_option("Do the race that this file holds again.", exists=True)] = None,
    table: Annotated[
        str | None,
        Option(metavar="FORM|FILE", help="Medians: csv, md or latex, or FILE.md or .tex. Runs: FILE.csv or .jsonl."),
    ] = None,
    picture: Annotated[Path | None, file_option("The race, and each figure, as FILE.pdf, .svg or .png.")] = None,
    curves: Annotated[Path | None, file_option("All learning curves as FILE.csv.")] = None,
    show: Annotated[bool, Option("--open", help="Open the report in the browser.")] = False,
    listing: Annotated[bool, Option("--list", help="List the problems and end.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run optimizers side by side on problems, and write a report.

    Runs are done in other processes: one that crashes, hangs or diverges is a row of the table like any other. Ctrl-C keeps
    the runs that have finished, and --resume does the rest. The default race has twelve optimizers on seven problems.

    \b
    moduli race --open
    moduli race rosenbrock bands --with adamw --with "ClipNorm(1) | Lion | LR(1e-3)" --seeds 5
    moduli race wave.py:problem --with "slow: Adam | LR(0.01)" --with "fast: Adam | LR(0.1)"
    moduli race beale --with "mylink.py:SoftSign | LR(0.01)"
    moduli race digits-mlp spirals --tune 15 --with "Adam | LR" --with "Lion | LR" --range "lr=1e-4..0.3"
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    if listing:
        _print_problems(as_json)
        return
    from .. import lab

    if by not in ("evaluations", "seconds"):
        console.exit_with_usage(f"--by {by}: a race is judged by evaluations or by seconds")
    table_file = None if table in (None, *lab.TABLE_FORMS) else Path(table)
    files = RaceFiles(file or output.with_suffix(".jsonl"), output, picture, table_file, curves)
    files.check()
    problems, chains = problem or [], chain or []
    if repeat is not None:
        spec = _read_race(repeat, problems, chains)
    else:
        spec = {
            **_fill_in_defaults(problems, chains, budget), "seeds": _parse_seeds(seeds), "seconds": seconds,
            "threads": threads, "target": target, "tune": tune, "ranges": dict(map(_read_range, ranges or [])),
        }  # fmt: skip
    total = _count_runs(spec)
    results, interrupted = _run_race({**spec, "workers": workers, "file": files.runs, "resume": resume}, total)
    if results.runs:
        files.write(results)
    if as_json:
        console.print_json(results.to_json())
    elif results.runs:
        _print_table(results, table, by)
    if results.runs:
        console.open_errors().print(f"report: {output}   runs: {files.runs}", markup=False, style="dim")
    if interrupted:
        console.fail(
            f"interrupted: {len(results.runs)} of {total} runs are kept; go on with the same command and --resume",
            console.INTERRUPTED,
        )
    if show:
        webbrowser.open(output.resolve().as_uri())


def _fill_in_defaults(problems: list[str], chains: list[str], budget: int | None) -> dict[str, Any]:
    """Return these arguments of `lab.race`; in place of empty ones, those of the default race."""
    from .. import lab

    return {
        "problems": problems or list(lab.DEFAULT_PROBLEMS),
        "contenders": [_parse_contender(text) for text in chains] or lab.default_field(),
        "budget": budget or (None if problems else lab.DEFAULT_BUDGET),
    }


def _count_runs(spec: dict[str, Any]) -> int:
    """Return the number of runs of a race, or slightly more: a contender with nothing to tune has fewer."""
    seeds = spec["seeds"] if isinstance(spec["seeds"], int) else len(spec["seeds"])
    return len(spec["problems"]) * len(spec["contenders"]) * (seeds + (spec["tune"] or 0))


def _run_race(options: dict[str, Any], total: int) -> tuple[lab.Results, bool]:
    """Run a race with a progress bar, and print each run that fails.

    Args:
        options: The arguments of `lab.race`.
        total: The number of runs that the bar shows.

    Returns:
        The results, those of its file after Ctrl-C; and whether it was interrupted.
    """
    from rich.progress import TimeElapsedColumn

    from .. import lab

    problems = [lab.load_problem(reference) for reference in options["problems"]]
    bar = console.make_bar("race", TimeElapsedColumn())
    line = bar.add_task("race", total=total)

    def listen(event: str, _: Any, message: dict[str, Any]) -> None:
        if event == "end" and lab.RunReason(message["reason"]).failed:
            what = f"{message['contender']} on {message['problem']}, seed {message['seed']}"
            fact = console.escape(f"{what}: {message['reason']}, {message['detail']}")
            bar.console.print(fact, markup=False, style="yellow")
        bar.update(line, completed=message["finished"], refresh=event == "begin")

    try:
        with bar:
            return lab.race(**options, command=["moduli", *sys.argv[1:]], listen=listen), False
    except (ValueError, TypeError) as error:
        console.exit_with_usage(str(error))
    except KeyboardInterrupt:
        if not options["file"].exists():
            raise
        results = lab.Results.read(options["file"])
        results.problems = {each.name: each for each in problems}
        return results, True


def _print_problems(as_json: bool) -> None:
    """Print the problems, as a table or as JSON."""
    problems = read_catalogue()["problems"].values()
    if as_json:
        console.print_json(list(problems))
        return
    rows = [
        (
            p["name"],
            str(p["parameters"] or ""),
            _show_seconds(p["step_seconds"]),
            _show_best(p),
            ", ".join(p["tags"]),
            p["summary"],
        )
        for p in problems
    ]
    console.print_columns([("name", "parameters", "step", "best value", "tags", "summary"), *rows], 5)


def _show_seconds(seconds: float | None) -> str:
    """Return the time of a loss with its gradient as text; an empty one if it was not measured."""
    return "" if seconds is None else f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _show_best(problem: dict[str, Any]) -> str:
    """Return the optimum as text, marked if it is only the best known value."""
    if problem["optimum"] is None:
        return "unknown"
    return console.format_number(problem["optimum"], 6) + ("" if problem["exact"] else " (best known)")


def _parse_contender(text: str) -> lab.Contender:
    """Return the contender of `LABEL: CHAIN`, or of a chain.

    In a chain, a colon only follows the name of a file; labels have no quotes.
    """
    from .. import lab

    label, colon, rest = text.partition(":")
    is_file = (label.endswith(".py") and rest[:1].isidentifier()) or (len(label) == 1 and rest[:1] in ("\\", "/"))
    if colon and not is_file and not set(label) & set("'\"()|[]=,"):
        return lab.contender(rest.strip(), label=label.strip())
    return lab.contender(text)


def _parse_seeds(text: str) -> int | list[int]:
    """Return the number of seeds, or a list of several seeds."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        console.exit_with_usage(f"--seeds {text}: give a number of seeds, such as 3, or the seeds, such as 0,4,7")
    return numbers[0] if len(numbers) == 1 else numbers


def _read_race(path: Path, problems: list[str], chains: list[str]) -> dict[str, Any]:
    """Return the arguments of `lab.race` that do the race of a file again.

    Args:
        path: The file of the race.
        problems: The problems in the command. A file with a problem is run only if it is one of them; otherwise the command exits.
        chains: The chains in the command, in which files with links must be named likewise.
    """
    from .. import lab

    try:
        header = lab.Results.read(path).header
        # A file is never run only because results name it.
        for source in (c["source"] for c in header["contenders"]):
            if lab.parse(source).references and source not in chains:
                fact = f"{path} is a race of {source!r}, which is a file to run"
                console.exit_with_usage(f"{fact}; say so: moduli race --repeat {path} --with {shlex.quote(source)}")
        contenders = [lab.contender(c["source"], label=c["label"]) for c in header["contenders"]]
    except ValueError as error:
        console.fail(f"{path} cannot be repeated: {error}")
    references = [p["reference"] for p in header["problems"]]
    for each in references:
        if lab.split_reference(each) is not None and each not in problems:
            fact = f"{path} is a race on {each}, which is a file to run"
            console.exit_with_usage(f"{fact}; say so: moduli race {each} --repeat {path}")
    keys = ("seeds", "budget", "seconds", "threads", "target", "tune")
    spec = {"problems": references, "contenders": contenders, **{k: header.get(k) for k in keys}}
    return {**spec, "ranges": header.get("ranges")}


def _read_range(text: str) -> tuple[str, tuple[float, float] | float]:
    """Return the name and the limits of `NAME=LOW..HIGH`, or the value of `NAME=VALUE`."""
    name, _, limits = text.partition("=")
    try:
        numbers = [float(part) for part in limits.split("..")]
    except ValueError:
        numbers = []
    if not name or len(numbers) not in (1, 2):
        console.exit_with_usage(
            f"--range {text}: give limits, such as lr=1e-4..0.1, or a value that is fixed, such as beta1=0.9"
        )
    return name, (numbers[0], numbers[1]) if len(numbers) == 2 else numbers[0]


def _print_table(results: lab.Results, form: str | None, by: str) -> None:
    """Print the medians, and for a tuned race the standings.

    Args:
        results: The results.
        form: If it is one of `lab.TABLE_FORMS`, the medians alone are printed in it, otherwise all in columns.
        by: The cost by which the standings are ranked.
    """
    from .. import lab

    if form in lab.TABLE_FORMS:
        sys.stdout.write(lab.summary_table(results, form))
        return
    rows = [("problem", "optimizer", "final loss", "evals", "solved", "ended")]
    styles = ["bold"]
    for row in lab.summary(results):
        reasons = ", ".join(reason if n == row["runs"] else f"{n}x {reason}" for reason, n in row["reasons"].items())
        solved = "-" if row["reached"] is None else f"{row['reached']}/{row['runs']}"
        median, evaluations = console.format_number(row["median"]), console.format_number(row["evaluations"], 6)
        cells = (row["problem"], row["contender"], median, evaluations, solved, reasons)
        rows.append(tuple(map(console.escape, cells)))  # type: ignore[arg-type]
        styles.append("red" if row["failed"] else "green" if row["reached"] else "")
    console.print_columns(rows, 1, styles=styles, piped=console.PIPED)
    if results.header.get("tune"):
        _print_standings(results, by)


def _print_standings(results: lab.Results, by: str) -> None:
    """Print the ranks of a tuned race with their intervals, and how often tuning helped."""
    from .. import lab

    gains = lab.tuning_gains(results)
    rows = [("optimizer", "mean rank", "95% interval", "solved within 4x", "tied with", "tuning helped")]
    for row in lab.standings(results, by=by):
        outcomes = [gain["helped"] for gain in gains if gain["source"] == row.source]
        interval = f"{row.rank_interval[0]:.3g} to {row.rank_interval[1]:.3g}"
        helped = f"on {sum(outcomes)} of {len(outcomes)}"
        cells = (
            row.contender,
            f"{row.rank:.3g}",
            interval,
            f"{row.solved:.0%}",
            ", ".join(row.tied) or "none",
            helped,
        )
        rows.append(tuple(map(console.escape, cells)))  # type: ignore[arg-type]
    console.print_columns(rows, 1, piped=console.PIPED)
