"""Run the benchmarks, print their tables, and write them to docs/benchmarks.md.

    python benchmarks/run.py                  all of them
    python benchmarks/run.py layout labels    some; the sections of the others stay as they are
    python benchmarks/run.py --quick          in five minutes: fewer turns, without the files that run whole optimizations; no page
    python benchmarks/run.py --strict         exit with an error when a bar is missed
    python benchmarks/run.py optim --repeat 3 --capability default avx2
                                              three runs, of which the median and the range are shown, and one run with torch's
                                              kernels for each of these processors (ATEN_CPU_CAPABILITY)

A benchmark is a file here with a function `table()`, which returns rows: dicts with "name", "value", "bar" (a
number in the same unit, a text such as "at least 6 x", or None), "unit" and "ok". Runs after the first add "values", all of
them in order, and "others", the values by capability.
"""

import argparse
import importlib.util
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

import moduli

LONG = {"bbob", "character_lm", "evolution", "labels", "lbfgs", "links", "minimize", "nist", "race"}
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

`make bench` measures these on the machine at hand and writes this page. Candidates take turns in one process, on one
thread; each number is the median over the turns. The bar is what the project asks of itself; one that was missed is
shown as missed.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run benchmarks and write docs/benchmarks.md.")
    parser.add_argument("names", nargs="*", help="which files, without .py; all when left out")
    parser.add_argument("--strict", action="store_true", help="exit with an error when a bar is missed")
    parser.add_argument(
        "--quick", action="store_true", help="fewer turns, and only files that take seconds; writes no page"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="how many runs; shows the median and the range"
    )
    parser.add_argument("--capability", nargs="+", default=[], metavar="NAME", help="more runs, by ATEN_CPU_CAPABILITY")
    parser.add_argument("--rows", action="store_true", help="print the rows of one run as JSON; writes no page")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write the page")
    options = parser.parse_args(argv)

    benchmarks = {p.stem: p for p in sorted(HERE.glob("*.py")) if not p.stem.startswith("_") and p != Path(__file__)}
    unknown = [name for name in options.names if name.removesuffix(".py") not in benchmarks]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(benchmarks)}")

    names = [name.removesuffix(".py") for name in options.names] or list(benchmarks)
    if options.quick:
        os.environ["MODULI_BENCH_QUICK"] = "1"
        names = [name for name in names if name not in LONG or options.names]
    console = Console()
    sections = existing(options.page)
    missed = failed = 0
    for name in names:
        start = perf_counter()
        try:
            module = load(name, benchmarks[name])
            if not hasattr(module, "table"):
                continue
            rows = module.table()
            if options.rows:
                print(json.dumps(rows))
                continue
            rows = add_runs(rows, [module.table() for _ in range(options.repeat - 1)])
            for capability in options.capability:
                try:
                    add_capability(rows, capability, run_elsewhere(benchmarks[name], capability, options.quick))
                except subprocess.CalledProcessError as error:  # torch.compile, for example, fails with some of them
                    console.print(
                        f"[red]{name} failed with ATEN_CPU_CAPABILITY={capability}:[/red]", error.stderr[-2000:]
                    )
                    failed += 1
        except ModuleNotFoundError as error:
            console.print(f"[red]{name}: {error.name} is not installed; `make bench` installs the peers[/red]")
            failed += 1
            continue
        missed += sum(not row["ok"] for row in rows)
        console.print(drawn(title(module), rows), f"{name}: {perf_counter() - start:.0f} s", sep="\n")
        sections[name] = section(module, rows)
        if not options.quick:  # written after every benchmark, so that an interruption loses none
            write_page(options.page, sections)
    if sections and not options.quick and not options.rows:
        console.print(f"written to {options.page}")
    return 1 if failed or (options.strict and missed) else 0


def add_runs(rows: list[dict], others: list[list[dict]]) -> list[dict]:
    """Return rows with the median of several runs, which are stored under "values"; a bar is met if the median meets it."""
    for row in rows:
        more = [each for run in others for each in run if name_row(each) == name_row(row)]
        if not more or not isinstance(row["value"], int | float):
            continue
        row["values"] = [row["value"], *(each["value"] for each in more)]
        # The middle run decides whether the bar is met, because bars may be texts.
        middle = sorted([dict(row), *more], key=lambda each: each["value"])[len(more) // 2]
        row["value"], row["ok"] = median(row["values"]), middle["ok"]
    return rows


def add_capability(rows: list[dict], capability: str, others: list[dict]) -> None:
    """Add the values of a run with other kernels to the rows, under "others".

    Args:
        rows: The rows.
        capability: The value of ATEN_CPU_CAPABILITY.
        others: The rows of the other run.
    """
    values = {name_row(other): other["value"] for other in others}
    for row in rows:
        row.setdefault("others", {})[capability] = values.get(name_row(row))


def name_row(row: dict) -> tuple[str, str]:
    """Return the name and the unit of a row, which together identify it: units name the peer."""
    return row["name"], row["unit"]


def run_elsewhere(path: Path, capability: str, quick: bool) -> list[dict]:
    """Run a benchmark in another process with torch's kernels for another processor, and return its rows.

    Args:
        path: The file of the benchmark.
        capability: The value of ATEN_CPU_CAPABILITY.
        quick: Whether to take fewer turns.
    """
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    words = [sys.executable, str(Path(__file__)), path.stem, "--rows", *(["--quick"] if quick else [])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_page(page: Path, sections: dict[str, str]) -> None:
    """Write the page with an anchor before each section, to which the rows of the README point."""
    ordered = "\n".join(f'<!-- {name} -->\n<a id="{name}"></a>\n\n{sections[name]}' for name in sorted(sections))
    page.write_text(f"{INTRODUCTION}\n{ordered}", encoding="utf-8")


def load(name: str, path: Path):
    """Import a benchmark under a name that cannot clash with an installed package."""
    spec = importlib.util.spec_from_file_location(f"moduli_benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def title(module) -> str:
    return (inspect.getdoc(module) or module.__name__).partition("\n")[0]


def drawn(heading: str, rows: list[dict]) -> Table:
    table = Table(title=heading, title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    for row in rows:
        verdict = "" if row["bar"] is None else "[green]met[/green]" if row["ok"] else "[red]missed[/red]"
        table.add_row(row["name"], show_measured(row), shown(row["bar"], row["unit"]), verdict)
    return table


def section(module, rows: list[dict]) -> str:
    heading, _, rest = (inspect.getdoc(module) or module.__name__).partition("\n")
    lines = [f"## {heading.rstrip('.')}", ""]
    if rest.strip():
        lines += [rest.strip(), ""]
    others = list(dict.fromkeys(name for row in rows for name in row.get("others", {})))
    heads = "".join(f" {name} |" for name in others)
    lines += [f"| what | measured | bar | |{heads}", "|---|---:|---:|---|" + "---:|" * len(others)]
    for row in rows:
        verdict = "" if row["bar"] is None else "met" if row["ok"] else "**missed**"
        name = row["name"].replace("|", "\\|")
        more = "".join(f" {shown(row.get('others', {}).get(each), row['unit'])} |" for each in others)
        lines.append(f"| {name} | {show_measured(row)} | {shown(row['bar'], row['unit'])} | {verdict} |{more}")
    if others:
        lines += ["", f"The last columns are one run each with `ATEN_CPU_CAPABILITY` set to {', '.join(others)}."]
    return "\n".join([*lines, "", machine(), ""])


def show_measured(row: dict) -> str:
    """Return the value, and the range over runs if there were several."""
    text = shown(row["value"], row["unit"])
    values = row.get("values", [])
    return f"{text} ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else text


def shown(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def machine() -> str:
    """Return the date and the machine of a measurement, as a sentence."""
    cpu = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        models = re.findall(r"^model name\s*:\s*(.+)$", described.read_text(), re.MULTILINE)
        cpu = models[0] if models else cpu
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d} on {cpu} ({os.cpu_count()} cores), {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, moduli {moduli.__version__}."
    )


def existing(page: Path) -> dict[str, str]:
    """Return the current sections of the page, by benchmark."""
    if not page.exists():
        return {}
    parts = re.split(r"^<!-- (\w+) -->\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    anchor = re.compile(r'^<a id="\w+"></a>\n\n')
    return {name: anchor.sub("", text.rstrip()) + "\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
