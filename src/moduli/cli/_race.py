"""`moduli race`."""

from __future__ import annotations

import os
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import INTERRUPTED, escape, exit_with_usage, fail, note, number, out, print_json, print_table
from ._problems import file_of, problem_of

if TYPE_CHECKING:
    from rich.table import Table

    from .. import lab


def race(
    problem: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROBLEM", help="Names of problems (--list), or FILE.py:name. Without: the default race."
        ),
    ] = None,
    chain: Annotated[
        list[str] | None,
        typer.Option("--with", "-w", metavar="CHAIN", help="A chain, a preset, or LABEL: CHAIN; once per optimizer."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N", help="How many seeds, or which: 3, or 0,4,7.")] = "3",
    budget: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Evaluations per run; without it, each problem's own.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="The time limit of a run.")] = 30.0,
    workers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Runs at a time; without it, one per core.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads of each run.")] = 1,
    target: Annotated[
        float | None,
        typer.Option(metavar="VALUE", help="A loss as small as this is solved; without it, the known optimum."),
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The report.")] = Path("race.html"),
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where finished runs are kept; without it, beside the report.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the runs that the file has, and do the others.")
    ] = False,
    repeat: Annotated[Path | None, typer.Option(metavar="FILE", help="Do the race that this file holds again.")] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one row per run, as FILE.csv or FILE.jsonl.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the race as one picture, .svg or .png (matplotlib).")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the problems and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run optimizers side by side on problems, and write a report.

    Each run has a process of its own: one that crashes, hangs or diverges is a row of the table like any other. Ctrl-C keeps
    the runs that have finished, and --resume does the rest. The default race has twelve optimizers on seven problems.

    \b
    moduli race --open
    moduli race rosenbrock bands --with adamw --with "ClipNorm(1) | Lion | LR(1e-3)" --seeds 5
    moduli race wave.py:problem --with "slow: Adam | LR(0.01)" --with "fast: Adam | LR(0.1)"
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    if listing:
        _list(as_json)
        return
    from .. import lab

    _check_place(output)  # before its suffix is looked at: a directory may have no name of its own, as `.`
    kept = file or output.with_suffix(".jsonl")
    for place in (kept, picture, table):
        _check_place(place)
    if picture is not None and find_spec("matplotlib") is None:
        exit_with_usage("--picture is drawn by matplotlib, which is not installed: pip install 'moduli[docs]'")
    if picture is not None and picture.suffix not in (".svg", ".png", ".pdf"):
        exit_with_usage(f"--picture {picture}: a picture ends in .svg, .png or .pdf")
    if table is not None and table.suffix not in (".csv", ".jsonl"):
        exit_with_usage(f"--table {table}: a table ends in .csv or .jsonl")
    if table == kept:
        exit_with_usage(f"--table {table}: this is where the finished runs are kept; give another name")
    if repeat is not None:
        spec = _read_race(repeat, problem or [])
    else:
        try:
            field = [_parse_contender(text) for text in chain] if chain else lab.default_field()
        except lab.ChainSyntaxError as error:
            exit_with_usage(str(error))
        given = budget if problem or budget else lab.DEFAULT_BUDGET
        spec = {
            "problems": problem or list(lab.DEFAULT_PROBLEMS),
            "contenders": field,
            "seeds": _seeds(seeds), "budget": given, "seconds": seconds, "threads": threads, "target": target,
        }  # fmt: skip
    courses = [problem_of(reference) for reference in spec["problems"]]
    count = spec["seeds"] if isinstance(spec["seeds"], int) else len(spec["seeds"])
    watch = _RaceProgress(len(spec["problems"]) * len(spec["contenders"]) * count)
    interrupted = False
    try:
        with watch.bar:
            results = lab.race(
                **spec, workers=workers, file=kept, resume=resume, command=["moduli", *sys.argv[1:]], listen=watch
            )
    except (lab.problems.UnknownProblemError, ModuleNotFoundError, ValueError, TypeError) as error:
        exit_with_usage(str(error))  # chains, problem files and results that are no such thing are ValueErrors
    except OSError as error:
        fail(f"the race cannot be kept: {error}")
    except KeyboardInterrupt:
        interrupted = True
        if not kept.exists():
            raise
        results = lab.Results.read(kept)
        results.problems = {each.name: each for each in courses}
    if results.runs:
        try:
            lab.write_report(results, output)
            if picture is not None:
                lab.write_picture(results, picture)
            if table is not None:
                lab.write_table(results, table)
        except (OSError, RuntimeError) as error:
            fail(f"{error}; the runs are in {kept}")
    if as_json:
        print_json(results.to_json())
    elif results.runs:
        console = out()
        width = console.width if sys.stdout.isatty() else PIPED
        print_table(_table(results, width), console, width)
    if results.runs:
        note().print(f"report: {output}   runs: {kept}", markup=False, style="dim")
    if interrupted:
        fail(
            f"interrupted: {len(results.runs)} of {watch.total} runs are kept; go on with the same command and --resume",
            INTERRUPTED,
        )
    if show:
        webbrowser.open(output.resolve().as_uri())


def _check_place(place: Path | None) -> None:
    """Refuse, before anything runs, a place where nothing could be written afterwards."""
    if place is None:
        return
    if place.is_dir():
        exit_with_usage(f"{place} is a directory; give the name of a file, such as {place / 'race.html'}")
    if place.exists() and not place.is_file():
        exit_with_usage(f"{place} is not a regular file; give another name")
    folder = next(each for each in place.absolute().parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        exit_with_usage(
            f"{place} cannot be written: {folder} is {'no directory' if not folder.is_dir() else 'read-only'}"
        )


def _list(as_json: bool) -> None:
    from rich.table import Table

    from .. import lab

    found = [lab.problems.get(name) for name in lab.problems.names()]
    if as_json:
        print_json([{"name": p.name, "summary": p.summary, "tags": list(p.tags), "optimum": p.optimum} for p in found])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "optimum", "summary", "tags"):
        table.add_column(column, no_wrap=column == "name")
    for each in found:
        table.add_row(each.name, number(each.optimum, 6), each.summary, ", ".join(each.tags))
    out().print(table)


def _parse_contender(text: str) -> lab.Contender:
    """`LABEL: CHAIN`, or a chain. A colon has no meaning in a chain outside of strings, and labels have no quotes."""
    from .. import lab

    label, colon, rest = text.partition(":")
    if colon and not set(label) & set("'\"()|[]=,"):
        return lab.contender(rest.strip(), label=label.strip())
    return lab.contender(text)


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        exit_with_usage(f"--seeds {text}: give a number of seeds, such as 3, or the seeds, such as 0,4,7")
    if min(numbers) < 0 or (len(numbers) == 1 and numbers[0] == 0 and "," not in text):
        exit_with_usage(f"--seeds {text}: there is at least one seed, and none is negative")
    return numbers[0] if len(numbers) == 1 else numbers


def _read_race(path: Path, given: list[str]) -> dict[str, Any]:
    from .. import lab

    if not path.is_file():
        exit_with_usage(f"there is no file {path}")
    try:
        header = lab.Results.read(path).header
        contenders = [lab.contender(c["source"], label=c["label"]) for c in header["contenders"]]
    except lab.ResultsError as error:
        fail(str(error))
    except lab.ChainSyntaxError as error:
        exit_with_usage(f"{path} cannot be repeated: {error}")
    references = [p["reference"] for p in header["problems"]]
    unsaid = [each for each in references if file_of(each) is not None and each not in given]
    if unsaid:
        # What results name is never run because they name it.
        exit_with_usage(
            f"{path} is a race on {unsaid[0]}, which is a file to run; say so: moduli race {unsaid[0]} --repeat {path}"
        )
    keys = ("seeds", "budget", "seconds", "threads", "target")
    return {"problems": references, "contenders": contenders, **{k: header.get(k) for k in keys}}


class _RaceProgress:
    """What moves while a race runs, and a line per failed run."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.total = total
        self.console = note()
        self.bar = Progress(
            TextColumn("race"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", markup=False), console=self.console, disable=not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("race", total=total, now="")
        self.running: dict[tuple[str, str, int], str] = {}

    def __call__(self, event: str, task: Any, message: dict[str, Any]) -> None:
        from .. import lab

        if not message:
            return
        key = (message["problem"], message["contender"], message["seed"])
        if event == "begin":
            self.running[key] = ""
        elif event == "progress":
            self.running[key] = number(message["value"], 3)
        elif event == "end":
            self.running.pop(key, None)
            if lab.RunReason(message["reason"]).failed:
                what = f"{message['contender']} on {message['problem']}, seed {message['seed']}"
                told = escape(f"{what}: {message['reason']}, {message['detail']}")
                self.console.print(told, markup=False, style="yellow")
        now = "  ".join(
            f"{contender} on {problem} {value}".strip() for (problem, contender, _), value in self.running.items()
        )
        self.bar.update(self.task, completed=message["finished"], now=escape(now[:90]))


# What a table shows first, and from which width on it shows the rest on one line; in a pipe it has this width.
FIRST = ("problem", "optimizer", "final loss", "evals", "solved")
ENDED, ALL, PIPED = 76, 112, 100


def _table(results: lab.Results, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    from .. import lab

    wide = width >= ALL
    columns = list(FIRST) if width < ENDED else [*FIRST, "ended"]
    if wide:
        columns = ["problem", "optimizer", "final loss", "best", "evaluations", "seconds", "solved", "ended"]
    table = Table(title=None, pad_edge=False, box=None, header_style="bold")
    for column in columns:
        table.add_column(
            column,
            justify="left" if column in ("problem", "optimizer", "ended") else "right",
            no_wrap=column != "optimizer" and (not wide or column != "ended"),
            max_width=max(19, width - 64) if column == "ended" and not wide else None,
        )
    rows = lab.summary(results)
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1]["problem"] != row["problem"]
        first = place == 0 or rows[place - 1]["problem"] != row["problem"]
        why = ", ".join(reason if n == row["runs"] else f"{n}x {reason}" for reason, n in row["reasons"].items())
        best = min(
            (r["median"] for r in rows if r["problem"] == row["problem"] and r["median"] is not None), default=None
        )
        style = "green" if row["median"] is not None and row["median"] == best else "red" if row["failed"] else ""
        evaluations = number(row["evaluations"], 6)
        solved = "-" if row["reached"] is None else f"{row['reached']}/{row['runs']}"
        cells = {
            "problem": row["problem"] if first else "", "optimizer": row["contender"], "final loss": number(row["median"]),
            "best": number(row["best"]), "evaluations": evaluations, "evals": evaluations,
            "seconds": number(row["seconds"], 3), "solved": solved, "ended": why,
        }  # fmt: skip
        table.add_row(*(Text(escape(cells[column])) for column in columns), style=style, end_section=last)
    return table
