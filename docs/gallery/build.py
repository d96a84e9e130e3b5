"""Executes the notebooks of the gallery and writes their pages.

    python docs/gallery/build.py            execute the notebooks whose text, or whose packages, have changed since
    python docs/gallery/build.py --all      execute all of them
    python docs/gallery/build.py races      execute this one
    python docs/gallery/build.py --check    execute nothing, and say which would be

A notebook is `NAME.ipynb`, without outputs. From it come `NAME.md` (its words, code and outputs), `NAME-1.svg` and so on (its
figures), an entry of `executed.json` (a hash of its text, the versions of the packages that it imports, the seconds of processor
time that it took) and an entry of `index.md`. All are committed, so that the documentation is built without executing anything.
"""

import argparse
import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORD = HERE / "executed.json"
SECONDS = 30  # of processor time, that a notebook may take
LARGEST = 60_000  # bytes of a figure

# In the order of the page.
NAMES = (
    "labelled-fit",
    "virtual-weights",
    "task-vectors",
    "uncertainty",
    "own-optimizer",
    "races",
    "growing",
    "strangers",
    "heads-and-mup",
    "cartpole",
    "implicit-gradients",
    "checkpoints",
)

# Executed before the cells of a notebook. Figures are the same bytes whenever they are drawn (no dates, no random ids), and their
# letters are text.
SETUP = """
import matplotlib, matplotlib_inline.backend_inline, torch
matplotlib_inline.backend_inline.set_matplotlib_formats(
    "svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
)
matplotlib.rcParams |= {
    "svg.hashsalt": "moduli", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "figure.figsize": (5.6, 3.2), "figure.dpi": 60, "figure.constrained_layout.use": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}
torch.set_num_threads(1)
"""
# Executed after them: the processor time of this process and of those that it has waited for.
TAKEN = "import os; print(sum(os.times()[:4]))"


class GalleryError(RuntimeError):
    """A notebook that fails, warns, is slow, or has a figure that does not fit on a page."""


def read(name: str) -> Any:
    """Return a notebook as `json` reads it."""
    return json.loads((HERE / f"{name}.ipynb").read_text(encoding="utf-8"))


def cells(name: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each cell of a notebook."""
    return [
        (cell["cell_type"], "".join(cell["source"])) for cell in read(name)["cells"]
    ]


def find_hash(name: str) -> str:
    """Return a hash of what a notebook says, which does not depend on how its file is written."""
    return hashlib.blake2b(
        json.dumps(cells(name)).encode(), digest_size=8
    ).hexdigest()


@functools.cache
def _find_owners() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def find_versions(name: str) -> dict[str, str]:
    """Return the versions, without patch numbers, of the packages that a notebook imports."""
    roots = set()
    for kind, text in cells(name):
        for node in ast.walk(ast.parse(text)) if kind == "code" else ():
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add((node.module or "").partition(".")[0])
    owners = _find_owners()
    packages = {
        owners.get(root, [root])[0] for root in roots - sys.stdlib_module_names
    }
    return {package: _find_version(package) for package in sorted(packages)}


def _find_version(package: str) -> str:
    try:
        return ".".join(importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return ""


def read_record() -> dict[str, Any]:
    """Return what `executed.json` says of each notebook."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def is_fresh(name: str, *, versions: bool = True) -> bool:
    """Whether a notebook's page shows what it says now, executed with the packages that are installed (`versions`)."""
    entry = read_record().get(name)
    if (
        entry is None
        or entry["hash"] != find_hash(name)
        or not (HERE / f"{name}.md").exists()
    ):
        return False
    return not versions or entry["versions"] == find_versions(name)


# -- executing --------------------------------------------------------------------------------------------------------


def execute(name: str) -> tuple[list[Any], float]:
    """Run a notebook in a process and a directory of its own.

    Returns:
        Its cells with their outputs, as nbformat has them, and the seconds of processor time that all of it took, imports included.

    Raises:
        GalleryError: If a cell raises, prints to standard error (as warnings do), or takes two minutes.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP, id="setup"))
    notebook.cells.append(nbformat.v4.new_code_cell(TAKEN, id="taken"))
    with tempfile.TemporaryDirectory() as folder, _environment(Path(folder)):
        work = Path(folder) / "work"
        work.mkdir()
        client = NotebookClient(
            notebook,
            timeout=4 * SECONDS,
            kernel_name="gallery",
            resources={"metadata": {"path": str(work)}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError) as error:
            raise GalleryError(
                f"{name}.ipynb: " + re.sub(r"\x1b\[[0-9;]*m", "", str(error))
            ) from None
    *executed, taken = notebook.cells[1:]
    for cell in executed:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream" and output.name == "stderr":
                raise GalleryError(
                    f"{name}.ipynb: the cell '{cell.id}' prints to standard error:\n{output.text}"
                )
    return executed, float(taken.outputs[0].text)


class _environment:
    """A kernel of this interpreter, one thread, and no settings of the user, as long as the block runs."""

    def __init__(self, folder: Path) -> None:
        kernel = folder / "kernels" / "gallery"
        kernel.mkdir(parents=True)
        argv = [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            "--log-level=ERROR",
        ]
        text = json.dumps(
            {"argv": argv, "display_name": "gallery", "language": "python"}
        )
        (kernel / "kernel.json").write_text(text, encoding="utf-8")
        own = {
            name: str(folder / name.lower())
            for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
        }
        path = os.pathsep.join(
            filter(
                None,
                [str(HERE.parent.parent / "src"), os.environ.get("PYTHONPATH")],
            )
        )
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.values = {
            **own,
            **threads,
            "JUPYTER_PATH": str(folder),
            "PYTHONPATH": path,
            "MPLBACKEND": "",
        }
        self.before = {name: os.environ.get(name) for name in self.values}

    def __enter__(self) -> None:
        os.environ.update(self.values)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- writing ----------------------------------------------------------------------------------------------------------


def outputs_of(cell: Any) -> Iterator[tuple[str, str]]:
    """Yield the outputs of an executed cell as ("text" | "html" | "svg", content), what was printed in one."""
    printed = "".join(
        output.text
        for output in cell.get("outputs", ())
        if output.output_type == "stream"
    )
    if printed.strip():
        yield "text", printed.rstrip()
    figures = set()
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            figure = clean(data["image/svg+xml"])
            if figure not in figures:
                figures.add(figure)
                yield "svg", figure
        elif "text/html" in data:
            yield "html", re.sub(r"\n\s*\n", "\n", data["text/html"].strip())
        elif "text/plain" in data:
            yield "text", data["text/plain"]


def clean(svg: str) -> str:
    """Return a figure without its prologue, its metadata and names of groups, and with coordinates to a tenth of a point."""

    def shorten(attribute: re.Match[str]) -> str:
        return re.sub(
            r"-?\d+\.\d+",
            lambda number: f"{float(number[0]):.1f}".removesuffix(".0"),
            attribute[0],
        )

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<= d=)"[^"]*"|(?<= [xy]=)"[^"]*"', shorten, svg)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"|(?<=<g) id="[^"]*"', "", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip() + "\n"


def write_code(source: str) -> str:
    """Return a cell as a block of a page, without the last semicolon, which keeps a notebook from showing a value."""
    return f"```python\n{source.removesuffix(';')}\n```"


def render(name: str, executed: list[Any]) -> tuple[str, list[str]]:
    """Return the page of an executed notebook, and its figures."""
    parts: list[str] = []
    figures: list[str] = []
    title = read_title(name)
    for cell in executed:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(write_code(cell.source))
        for kind, content in outputs_of(cell):
            if kind == "svg":
                figures.append(content)
                parts.append(
                    f"![{title}, figure {len(figures)}]({name}-{len(figures)}.svg)"
                )
            elif kind == "html":
                parts.append(
                    f'<div class="output" markdown="0">\n{content}\n</div>'
                )
            else:
                parts.append(f"```text\n{content}\n```")
    parts.append(
        f'[Download this notebook]({name}.ipynb){{ download="{name}.ipynb" }}, or see [the others](index.md).'
    )
    return "\n\n".join(parts) + "\n", figures


def write(name: str, executed: list[Any], seconds: float) -> None:
    """Write the page, the figures and the record of an executed notebook.

    Raises:
        GalleryError: If it was slow, has no figure, or one that is too large.
    """
    page, figures = render(name, executed)
    if seconds > SECONDS:
        raise GalleryError(f"{name}.ipynb took {seconds:.0f} s, and has {SECONDS}")
    if address := re.search(r".*\b0x[0-9a-f]{6,}.*", page):
        raise GalleryError(
            f"{name}.ipynb shows an address, which is another each time: {address[0]}"
        )
    if not figures:
        raise GalleryError(f"{name}.ipynb draws no figure")
    for number, figure in enumerate(figures, 1):
        if len(figure.encode()) > LARGEST:
            raise GalleryError(
                f"figure {number} of {name}.ipynb has {len(figure.encode()):,} bytes, and may have {LARGEST:,}"
            )
    for path in HERE.glob(f"{name}-*.svg"):
        path.unlink()
    for number, figure in enumerate(figures, 1):
        (HERE / f"{name}-{number}.svg").write_text(figure, encoding="utf-8")
    (HERE / f"{name}.md").write_text(page, encoding="utf-8")
    record = read_record()
    record[name] = {
        "hash": find_hash(name),
        "versions": find_versions(name),
        "seconds": round(seconds),
    }
    record = {each: record[each] for each in NAMES if each in record}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def printed_in(page: str) -> list[str]:
    """Return what the cells of a page print."""
    return re.findall(r"^```text\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)


def agree(said: str, printed: str) -> bool:
    """Whether two outputs have the same words, and numbers that differ by a tenth or by one unit of the last digit at most.

    Another processor rounds differently, and training makes more of it. Integers below a hundred have to be equal.
    """
    if _NUMBER.sub("#", said) != _NUMBER.sub("#", printed):
        return False
    for before, now in zip(
        _NUMBER.findall(said), _NUMBER.findall(printed), strict=True
    ):
        a, b = float(before.replace(",", "")), float(now.replace(",", ""))
        mantissa, _, exponent = before.partition("e")
        unit = (
            10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
            if {".", "e"} & set(before)
            else 0.0
        )
        share = 0.1 * abs(a) if unit or abs(a) >= 100 else 0.0
        if abs(a - b) > max(1.01 * unit, share):
            return False
    return True


def read_title(name: str) -> str:
    """Return the title of a notebook, the heading of its first cell."""
    return cells(name)[0][1].partition("\n")[0].removeprefix("# ")


def write_index() -> str:
    """Return the page with a picture and a line for each notebook: its title and its first paragraph."""
    parts = [
        "# Gallery",
        "Twelve notebooks, each about one problem that takes much more code with other libraries. They run in a few seconds on one "
        "core, and print the same numbers every time. Each page has its notebook to download; besides moduli they need matplotlib "
        "and a few other packages (`pip install 'moduli[lab,merge,plot]'`). Each says what the method costs.",
    ]
    rows = []
    for name in NAMES:
        summary = " ".join(cells(name)[0][1].split("\n\n")[1].split())
        picture = f'[![]({name}-1.svg){{ width="220" }}]({name}.md)'
        rows.append(
            f"| {picture} | **[{read_title(name)}]({name}.md)**<br>{summary} |"
        )
    parts.append("| | what it shows |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Execute what is not fresh, and write the page of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--all", action="store_true", help="execute all")
    parser.add_argument(
        "--check",
        action="store_true",
        help="execute nothing, and fail if the text of one has changed since",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(
            f"no notebook is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}"
        )
    if options.check:
        stale = [name for name in NAMES if not is_fresh(name, versions=False)]
        sys.exit(
            f"stale pages of the gallery: {', '.join(stale)}: make docs, and commit them"
            if stale
            else None
        )
    for name in options.names or NAMES:
        if options.names or options.all or not is_fresh(name):
            executed, seconds = execute(name)
            write(name, executed, seconds)
            print(f"{name}: executed in {seconds:.1f} s")
    index = write_index()
    if (
        not (HERE / "index.md").exists()
        or (HERE / "index.md").read_text(encoding="utf-8") != index
    ):
        (HERE / "index.md").write_text(index, encoding="utf-8")


if __name__ == "__main__":
    main()
