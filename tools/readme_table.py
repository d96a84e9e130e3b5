"""Make the README's table of ratios from docs/benchmarks.md, including rows that moduli loses, with ranges over runs.

python tools/readme_table.py           print the table
python tools/readme_table.py --write   put it into README.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
HEAD = "| work | peer | moduli / peer | script |\n|---|---|---|---|\n"


class Line(NamedTuple):
    """One line of the table: the work, the peer, the section of the page, and its rows there."""

    work: str
    peer: str
    section: str
    rows: tuple[str, ...]


FUSED = "`torch.optim.Adam(fused=True)`"
# A row is named as on the page, with its unit after a colon if names repeat; "a // b" is the ratio of two rows.
LINES = (
    Line("Adam step, 4 tiny tensors", FUSED, "optim", ("Adam step, 4 tiny tensors / torch fused",)),
    Line("Adam step, 1000 tensors of 10", FUSED, "optim", ("Adam step, 1000 x 10 / torch fused",)),
    Line("Adam step, 4 matrices of 2048 x 2048", FUSED, "optim", ("Adam step, 4 x 2048x2048 / torch fused",)),
    Line(
        "clip, Adam, decay, 200 matrices of 64 x 64", "the same chain in torchzero", "optim",
        ("the chain, 200 x 64x64 / torchzero",),
    ),
    Line(
        "`a + b` of two small networks, result read", "tensordict, which has no modules", "particles",
        ("MLP: a + b / tensordict",),
    ),
    Line(
        "`a + 0.5 * (b - c)`, 10.9M parameters, result read", "the same on flat vectors", "particles",
        ("a + 0.5*(b - c), 10.9M parameters / out= axpy // the same on flat vectors / out= axpy",),
    ),
    Line(
        "Adam on 64 / 256 networks at once: losses, gradients, step", "`torch.vmap(grad)` and `torch.optim.Adam(fused=True)`",
        "population", tuple(f"iteration, N={n} / vmap(grad) + fused Adam" for n in (64, 256)),
    ),
    Line(
        "CMA-ES generation, 50 / 1000 dimensions", "best of EvoX, pycma, cmaes", "evolution",
        tuple(f"CMA-ES, 256 members of {n}, against the best of EvoX, pycma and cmaes (EvoX)" for n in (50, 1000)),
    ),
    Line(
        "L-BFGS to 1e-8, Rosenbrock-100 / digits", "SciPy's L-BFGS-B", "lbfgs",
        ("Rosenbrock-100, time: of scipy", "digits, logistic, time: of scipy"),
    ),
    Line(
        "save / load, 100M parameters, no checksums", "safetensors", "io",
        tuple(f"100M parameters: {what}, no checksums / safetensors" for what in ("save", "load")),
    ),
)  # fmt: skip


def read_page(text: str) -> dict[tuple[str, str], tuple[float, str]]:
    """Return the ratios of the page and their ranges, by section and row, and also by row with its unit after a colon.

    Args:
        text: The page.
    """
    rows: dict[tuple[str, str], tuple[float, str]] = {}
    for section, body in re.findall(r"^<!-- (\w+) -->\n(.*?)(?=^<!-- |\Z)", text, re.MULTILINE | re.DOTALL):
        for line in body.splitlines():
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            match = re.fullmatch(r"([\d.,]+) (.+?)(?: \((\S+ to \S+)\))?", cells[1]) if len(cells) > 2 else None
            if match is not None:
                value = float(match[1].replace(",", "")), match[3] or ""
                rows.setdefault((section, cells[0]), value)
                rows[section, f"{cells[0]}: {match[2]}"] = value
    return rows


def find_ratio(rows: dict[tuple[str, str], tuple[float, str]], section: str, name: str) -> tuple[float, str]:
    """Return a ratio and its range, of one row or of two.

    Args:
        rows: What `read_page` returned.
        section: The section.
        name: The row, or two with ``//`` between them.

    Raises:
        LookupError: If the page has no such row.
    """
    names = name.split(" // ")
    missing = [each for each in names if (section, each) not in rows]
    if missing:
        raise LookupError(f"docs/benchmarks.md has no row {missing[0]!r} in its section {section!r}")
    entries = [rows[section, each] for each in names]
    return entries[0] if len(entries) == 1 else (entries[0][0] / entries[1][0], "")


def make_table(page: str) -> str:
    """Return the table as Markdown.

    Args:
        page: The text of docs/benchmarks.md.
    """
    rows, lines = read_page(page), []
    for line in LINES:
        ratios = [find_ratio(rows, line.section, name) for name in line.rows]
        cell = " / ".join(limits or f"{value:.2g}" for value, limits in ratios)
        slower = [value > 1.05 for value, _ in ratios]
        if any(slower):
            cell += " (slower)" if all(slower) or len(slower) == 1 or slower[-1] else " (slower where above 1)"
        lines.append(f"| {line.work} | {line.peer} | {cell} | [`{line.section}`](docs/benchmarks.md#{line.section}) |")
    return HEAD + "\n".join(lines) + "\n"


def replace_table(readme: str, table: str) -> str:
    """Return the text of the README with another table of ratios.

    Args:
        readme: Its text.
        table: The table.
    """
    pattern = re.escape(HEAD) + r"(?:\|.*\n)+"
    if not re.search(pattern, readme):
        raise LookupError("README.md has no table of ratios")
    return re.sub(pattern, lambda _: table, readme)


def main(argv: list[str]) -> None:
    """Print the table, or write it."""
    table = make_table(PAGE.read_text(encoding="utf-8"))
    if "--write" in argv:
        README.write_text(replace_table(README.read_text(encoding="utf-8"), table), encoding="utf-8")
    else:
        print(table, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
