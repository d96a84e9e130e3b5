"""Change links one line at a time and check that their quick tests fail: ``make mutants``.

A mutant is one line of a link, changed to something plausible and wrong: a bias correction left out, two axes swapped, a
bound dropped. Each is tried in a new process, which imports the changed file instead of the original, and runs the tests of
the link: its rows of the law book under the laws "reference" and "optimum", and pytest with the given arguments. A mutant
survives if no test fails; then a test is missing.

    python tools/mutants.py            all of them
    python tools/mutants.py Dion LMO   those of some links
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch  # noqa: F401 (imported once, before the processes fork)

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "moduli" / "m"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from mutant_table import LINKS, Link  # noqa: E402 (a file beside this one)


def main(names: list[str]) -> int:
    """Try the mutants and print the survivors and the score; return 1 if one survives, 2 for wrong arguments."""
    unknown = set(names) - {link.name for link in LINKS}
    if unknown:
        print(f"no mutants of {', '.join(sorted(unknown))}; there are some of {', '.join(link.name for link in LINKS)}")
        return 2
    links = [link for link in LINKS if not names or link.name in names]
    if stale := find_stale(links):
        print(*stale, "bring tools/mutant_table.py up to date", sep="\n")
        return 2
    killed = 0
    for link in links:
        if try_mutant(link, "", ""):
            print(f"the tests of {link.name} fail without a mutant")
            return 1
        for old, new in link.mutants:
            dead = try_mutant(link, old, new)
            killed += dead
            print(f"{'killed  ' if dead else 'SURVIVES'} {link.name}: {old!r} -> {new!r}", flush=True)
    total = sum(len(link.mutants) for link in links)
    families = len({link.file.partition("/")[0] for link in links})
    print(f"{killed} of {total} mutants of {len(links)} links in {families} families are killed")
    return 0 if killed == total else 1


def find_stale(links: Sequence[Link]) -> list[str]:
    """Return a line for each mutant whose text is no longer in the file of its link."""
    texts = {
        link.file: path.read_text(encoding="utf-8") if (path := SOURCE / link.file).exists() else "" for link in links
    }
    return [
        f"{link.name}: {old!r} is not in {link.file}"
        for link in links
        for old, _ in link.mutants
        if old not in texts[link.file]
    ]


def try_mutant(link: Link, old: str, new: str) -> bool:
    """Whether a test of a link fails in a new process with a line of its file changed.

    Args:
        link: The link.
        old: The text to replace; nothing is changed if it is empty.
        new: The replacement.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return status != 0
    status = 1
    try:
        sys.meta_path.insert(0, MutantFinder(link.file, old, new))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = int(notices(link))
    finally:
        os._exit(status)


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """An importer of one file of `moduli.m` with changed text; other modules are imported normally."""

    def __init__(self, file: str, old: str, new: str) -> None:
        self.path = SOURCE / file
        self.name = "moduli.m." + file.removesuffix(".py").replace("/", ".")
        self.text = self.path.read_text(encoding="utf-8")
        self.text = self.text.replace(old, new) if old else self.text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of the changed module, and None for every other module."""
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_filename(self, fullname: str) -> str:
        """Return the path of the file."""
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        """Return the changed text."""
        return self.text.encode()


def notices(link: Link) -> bool:
    """Whether a test of a link fails."""
    from laws.registry import collect
    from moduli.testing import check_law

    for row in collect() if link.rows else []:
        if row.name.split(",")[0] in link.rows:
            for law in ("reference", "optimum"):
                try:
                    check_law(row, law)
                except Exception:  # noqa: BLE001 (any error of a broken link counts as noticed)
                    return True
    if not link.tests:
        return False
    with warnings.catch_warnings():
        return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *link.tests]) != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
