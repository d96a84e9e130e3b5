"""`moduli race`."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import lab
from ._console import INTERRUPTED, fail, note, number, out, print_json, wrong
from ._problems import problem_of

__all__ = ["race"]


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
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The report.")] = Path("race.html"),
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where finished runs are kept; without it, beside the report.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the runs that the file has, and do the others.")
    ] = False,
    repeat: Annotated[Path | None, typer.Option(metavar="FILE", help="Do the race that this file holds again.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the race as one SVG.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the problems and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run optimizers side by side on problems, and write a report.

    Each run has a process of its own: one that crashes, hangs or diverges is a row of the table like any other. Ctrl-C keeps
    the runs that have finished, and --resume does the rest. The default race has eleven optimizers on seven problems.

    \b
    moduli race --open
    moduli race rosenbrock bands --with adamw --with "ClipNorm(1) | Lion | LR(1e-3)" --seeds 5
    moduli race wave.py:problem --with "slow: Adam | LR(0.01)" --with "fast: Adam | LR(0.1)"
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    if listing:
        _list(as_json)
        return
    kept = file or output.with_suffix(".jsonl")
    if repeat is not None:
        spec = _repeated(repeat)
    else:
        try:
            field = [_labelled(text) for text in chain] if chain else lab.default_field()
        except lab.ChainError as error:
            wrong(str(error))
        given = budget if problem or budget else lab.DEFAULT_BUDGET
        spec = {
            "problems": problem or list(lab.DEFAULT_PROBLEMS),
            "contenders": field,
            "seeds": _seeds(seeds), "budget": given, "seconds": seconds, "threads": threads,
        }  # fmt: skip
    for reference in spec["problems"]:
        problem_of(reference)
    watch = _Watch(len(spec["problems"]) * len(spec["contenders"]) * _count(spec["seeds"]))
    interrupted = False
    try:
        with watch.bar:
            results = lab.race(
                **spec, workers=workers, file=kept, resume=resume, command=["moduli", *sys.argv[1:]], listen=watch
            )
    except lab.ChainError as error:
        wrong(str(error))
    except (lab.problems.UnknownProblemError, lab.ProblemFileError, ModuleNotFoundError) as error:
        wrong(str(error))
    except (lab.ResultsError, ValueError, TypeError) as error:
        wrong(str(error))
    except OSError as error:
        fail(f"the race cannot be kept: {error}")
    except KeyboardInterrupt:
        interrupted = True
        if not kept.exists():
            raise
        results = lab.Results.read(kept)
    if results.runs:
        lab.write_report(results, output)
        if picture is not None:
            lab.write_picture(results, picture)
    if as_json:
        print_json(results.to_json())
    elif results.runs:
        console = out()
        console.print(_table(results, console.width))
    if results.runs:
        note().print(f"report: {output}   runs: {kept}", markup=False, style="dim")
    if interrupted:
        fail(
            f"interrupted: {len(results.runs)} of {watch.total} runs are kept; go on with the same command and --resume",
            INTERRUPTED,
        )
    if show:
        webbrowser.open(output.resolve().as_uri())


def _list(as_json: bool) -> None:
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


def _labelled(text: str) -> lab.Contender:
    """`LABEL: CHAIN`, or a chain. A colon has no meaning in a chain outside of strings, and labels have no quotes."""
    label, colon, rest = text.partition(":")
    if colon and not set(label) & set("'\"()|[]=,"):
        return lab.contender(rest.strip(), label=label.strip())
    return lab.contender(text)


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        wrong(f"--seeds {text}: give a number of seeds, such as 3, or the seeds, such as 0,4,7")
    if min(numbers) < 0 or (len(numbers) == 1 and numbers[0] == 0 and "," not in text):
        wrong(f"--seeds {text}: there is at least one seed, and none is negative")
    return numbers[0] if len(numbers) == 1 else numbers


def _count(seeds: int | list[int]) -> int:
    return seeds if isinstance(seeds, int) else len(seeds)


def _repeated(path: Path) -> dict[str, Any]:
    if not path.is_file():
        wrong(f"there is no file {path}")
    try:
        header = lab.Results.read(path).header
        contenders = [lab.contender(c["source"], label=c["label"]) for c in header["contenders"]]
    except lab.ResultsError as error:
        fail(str(error))
    except lab.ChainError as error:
        wrong(f"{path} cannot be repeated: {error}")
    keys = ("seeds", "budget", "seconds", "threads")
    return {
        "problems": [p["reference"] for p in header["problems"]],
        "contenders": contenders,
        **{k: header[k] for k in keys},
    }


class _Watch:
    """What moves while a race runs, and a line per failed run."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.console = note()
        self.bar = Progress(
            TextColumn("race"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"),
            console=self.console, disable=not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("race", total=total, now="")
        self.running: dict[tuple[str, str, int], str] = {}

    def __call__(self, event: str, task: Any, message: dict[str, Any]) -> None:
        if not message:
            return
        key = (message["problem"], message["contender"], message["seed"])
        if event == "begin":
            self.running[key] = ""
        elif event == "progress":
            self.running[key] = number(message["value"], 3)
        elif event == "end":
            self.running.pop(key, None)
            if lab.Reason(message["reason"]).failed:
                what = f"{message['contender']} on {message['problem']}, seed {message['seed']}"
                self.console.print(f"{what}: {message['reason']}, {message['detail']}", markup=False, style="yellow")
        now = "  ".join(
            f"{contender} on {problem} {value}".strip() for (problem, contender, _), value in self.running.items()
        )
        self.bar.update(self.task, completed=message["finished"], now=now[:90])


# What a table shows first, and from which width on it shows the rest on one line.
FIRST = ("problem", "optimizer", "final loss", "evals", "solved")
ENDED, ALL = 76, 112


def _table(results: lab.Results, width: int) -> Table:
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
            max_width=19 if column == "ended" and not wide else None,
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
        cells = {
            "problem": row["problem"] if first else "", "optimizer": row["contender"], "final loss": number(row["median"]),
            "best": number(row["best"]), "evaluations": evaluations, "evals": evaluations,
            "seconds": number(row["seconds"], 3), "solved": f"{row['reached']}/{row['runs']}", "ended": why,
        }  # fmt: skip
        table.add_row(*(cells[column] for column in columns), style=style, end_section=last)
    return table
