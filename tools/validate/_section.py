"""A section of the validation page, and functions that several sections share."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@dataclass
class Section:
    """A section of the page.

    Attributes:
        title: Its heading.
        about: What is compared and how, and the size of the noise.
        command: The command that makes its tables by itself.
        body: Its tables, as Markdown.
        lost: The rows in which this library is worse, as sentences.
        packages: The packages whose versions the page gives.
    """

    title: str
    about: str
    command: str
    body: str
    lost: list[str] = field(default_factory=list)
    packages: Sequence[str] = ("torch",)


def load(path: Path):
    """Import a program of the repository by its path; files beside it can be imported too."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"validated_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def show_version(package: str) -> str:
    """Return the name and the version of a package, or that it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def tabulate(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as Markdown; bars in cells are escaped."""
    lines = [list(map(str, heads)), ["---"] * len(heads), *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


@contextlib.contextmanager
def capture() -> Iterator[io.StringIO]:
    """Collect what is printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield text


@contextlib.contextmanager
def quick_environment() -> Iterator[None]:
    """Let benchmarks take fewer turns inside the block."""
    before = os.environ.get("MODULI_BENCH_QUICK")
    os.environ["MODULI_BENCH_QUICK"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MODULI_BENCH_QUICK"]
        else:
            os.environ["MODULI_BENCH_QUICK"] = before


Maker = Callable[[], Section]
