"""The files that `moduli race` writes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from . import _console as console

if TYPE_CHECKING:
    from .. import lab


@dataclass(frozen=True)
class RaceFiles:
    """The files that a race writes; those that are None are not written.

    Attributes:
        runs: The finished runs, which `lab.race` writes.
        report: The report.
        picture: The race, and under similar names each figure.
        table: The medians (.md, .tex) or all runs (.csv, .jsonl).
        curves: The learning curves.
    """

    runs: Path
    report: Path
    picture: Path | None
    table: Path | None
    curves: Path | None

    def check(self) -> None:
        """Exit unless each file has a suffix that its option can write, and is not the file of the runs."""
        if self.picture is not None and find_spec("matplotlib") is None:
            console.exit_with_usage(
                "--picture is drawn by matplotlib, which is not installed: pip install 'moduli[docs]'"
            )
        options = (
            ("picture", self.picture, (".svg", ".png", ".pdf")),
            ("table", self.table, (".csv", ".jsonl", ".md", ".tex")),
            ("curves", self.curves, (".csv",)),
        )
        for option, path, suffixes in options:
            if path is not None and (path.suffix not in suffixes or path == self.runs):
                console.exit_with_usage(
                    f"--{option} {path}: give the name of another file that ends in {' or '.join(suffixes)}"
                )

    def write(self, results: lab.Results) -> None:
        """Write all files but that of the runs; exit if one cannot be written."""
        from .. import lab

        try:
            lab.write_report(results, self.report)
            if self.picture is not None:
                lab.write_picture(results, self.picture)
                lab.write_figures(results, self.picture)
            if self.table is not None:
                is_summary = self.table.suffix in (".md", ".tex")
                (lab.write_summary if is_summary else lab.write_table)(results, self.table)
            if self.curves is not None:
                lab.write_curves(results, self.curves)
        except (OSError, RuntimeError) as error:
            console.fail(f"{error}; the runs are in {self.runs}")
