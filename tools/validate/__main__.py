"""Write docs/validation.md: results of this library beside those of established programs.

    python tools/validate              all sections, in at most half an hour on two cores (`make validate`)
    python tools/validate nist bbob    some; the others stay as they are

Each section runs in a process of its own. One that fails, or takes too long, says so on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _section import ROOT, Section, show_version

PAGE = ROOT / "docs" / "validation.md"
SECONDS = 900.0
"""How long one section may take."""
SECTIONS = {
    "nist": ("fitting", "check_nist"),
    "constraints": ("fitting", "check_constraints"),
    "bbob": ("fitting", "check_bbob"),
    "steps": ("steps", "check_steps"),
    "losses": ("training", "check_language_model"),
    "mup": ("training", "check_mup"),
    "growth": ("training", "check_growth"),
    "cartpole": ("training", "check_cart_pole"),
    "recipes": ("merging", "check_recipes"),
    "barriers": ("merging", "check_barriers"),
}
INTRODUCTION = """# Validation

`make validate` writes this page: what moduli computes beside programs that others trust, on the machine at hand. It takes at most
half an hour on two cores. Every section says the command that makes it, the versions, the date and the machine, how large the
noise is, and which rows this library loses. A peer that is not installed is named as such. Speed is not compared here but on the
page of [benchmarks](benchmarks.md).
"""


def main(argv: list[str]) -> int:
    """Make sections, and write the page."""
    parser = argparse.ArgumentParser(description="Write docs/validation.md.")
    parser.add_argument("names", nargs="*", choices=[[], *SECTIONS], help="sections; all when left out")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write the page")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # make one section in this process, and print it as JSON
    options = parser.parse_args(argv)
    if options.only:
        print_section(options.only)
        return 0
    failed = 0
    for name in options.names or SECTIONS:
        began = perf_counter()
        text = make_section(name)
        failed += "**Failed**" in text
        # Written after every section, so that an interruption loses none.
        write_page(options.page, {**read_sections(options.page), name: text})
        print(f"{name}: {perf_counter() - began:.0f} s", flush=True)
    return 1 if failed else 0


def print_section(name: str) -> None:
    """Make a section in this process, and print it as JSON in the last line."""
    import importlib

    module, function = SECTIONS[name]
    section = getattr(importlib.import_module(module), function)()
    print(json.dumps(asdict(section)), flush=True)


def make_section(name: str) -> str:
    """Return a section as Markdown, made in another process, or the reason of its failure."""
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    began = perf_counter()
    try:
        words = [sys.executable, str(Path(__file__).resolve().parent), "--only", name]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
            return f"## {name}\n\n**Failed**: {reason}\n"
        section = Section(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return f"## {name}\n\n**Failed**: it took more than {SECONDS:g} seconds\n"
    return show(section, perf_counter() - began)


def show(section: Section, seconds: float) -> str:
    """Return a section as Markdown."""
    lost = "\n".join(f"* {line}" for line in section.lost) if section.lost else "None."
    versions = ", ".join(map(show_version, section.packages))
    description = f"{datetime.now(UTC):%Y-%m-%d} on {describe_machine()}; {versions}; {seconds:.0f} s"
    parts = [
        f"## {section.title}",
        section.about,
        f"`{section.command}`",
        section.body.strip(),
        f"Rows that are lost: {lost}",
    ]
    if section.lost:
        parts[-1] = f"Rows that are lost:\n\n{lost}"
    return "\n\n".join([*parts, f"Made {description}."]) + "\n"


def describe_machine() -> str:
    """Return the processor, the system and the versions that every section depends on."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cpu = models[0] if models else platform.processor() or platform.machine()
    return f"{cpu} ({os.cpu_count()} cores), {platform.system()}, Python {platform.python_version()}, moduli {read_version()}"


def read_version() -> str:
    """Return the version of moduli in this repository."""
    return re.search(r'__version__ = "(.+)"', (ROOT / "src" / "moduli" / "_version.py").read_text())[1]


def read_sections(page: Path) -> dict[str, str]:
    """Return the sections that the page has now, by name."""
    if not page.exists():
        return {}
    parts = re.split(r"^<!-- (\w+) -->\n\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: text.rstrip() + "\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write_page(page: Path, sections: dict[str, str]) -> None:
    """Write the page, sections in the order of `SECTIONS`."""
    ordered = "\n".join(f"<!-- {name} -->\n\n{sections[name]}" for name in SECTIONS if name in sections)
    page.write_text(f"{INTRODUCTION}\n{ordered}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
