"""Settings shared by every test: one torch thread per worker, and hypothesis without deadlines."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from moduli._torch import can_hold_constants

torch.set_num_threads(1)

# Derandomised, so that a red build is red everywhere; deadlines measure the machine, not the code.
for name, examples in (("moduli", 30), ("moduli-all", 60)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("moduli")

# Minutes, for what seldom breaks: every link saved and resumed in a new process, kernels under a sanitizer, every link in
# two and four processes, the notebooks of the gallery.
# `make test-all` runs it.
LONG = (
    "tests/io/test_resume.py",
    "tests/kernels/test_sanitized.py",
    "tests/optim/test_every_wrapping.py",
    "tests/test_gallery_executed.py",
)
# Of these, one test in five: which one turns with the commits, so that five in a row run every law on every row. Five is prime
# to the number of laws, so that each fifth has every law.
SHARED = (
    "tests/laws/test_laws.py",
    "tests/evolve/test_laws.py",
    "tests/laws/test_accelerator.py::test_links",
    "tests/optim/test_fused_attributes.py::test_attributes_are_read_at_every_step",
)
FIFTHS = 5
# Thousands of random cases, or other processes: they take longest under coverage and cover little that others do not, so
# `make test` runs them, with the law book, without it.
UNCOVERED = (
    "tests/laws/test_laws.py",
    "tests/laws/test_accelerator.py",
    # An interrupt may fall into the tracer of coverage, which then waits for its own lock for ever.
    "tests/laws/test_interrupts.py",
    "tests/laws/test_threads.py",
    "tests/axes/test_transformers.py",
    "tests/labels/test_compile.py",
    "tests/labels/test_elementwise_laws.py",
    "tests/io/test_crash.py",
    "tests/merge/test_formulas.py",
    "tests/merge/test_laws.py",
    "tests/minimize/test_hock_schittkowski.py",
    "tests/minimize/test_nist.py",
    "tests/particles/test_laws.py",
    "tests/particles/test_versions.py",
    "tests/population/test_loop.py",
    "tests/test_examples.py",
    "tests/layout/test_structure.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        choices=("covered", "uncovered"),
        help="only the tests that coverage is measured on, or only the others",
    )
    parser.addoption(
        "--all", action="store_true", help="also the tests that take minutes, every pair of the law book, more examples"
    )


def pytest_configure(config):
    if config.getoption("--all"):
        settings.load_profile("moduli-all")


def pytest_ignore_collect(collection_path, config):
    """Files that are not run are not read either: reading all of them takes a minute."""
    path = collection_path.as_posix()
    if not path.endswith(".py"):
        return None
    if any("::" in str(argument) or str(argument).endswith(".py") for argument in config.args):
        return None  # asked for by name
    part = config.getoption("--part")
    if part is not None and path.endswith(UNCOVERED) != (part == "uncovered"):
        return True
    if not config.getoption("--all") and path.endswith(LONG):
        return True
    return None


def choose_fifth() -> int:
    """The part of the law book that this commit runs: `MODULI_FIFTH`, or the number of commits before it, modulo five."""
    chosen = os.environ.get("MODULI_FIFTH")
    if chosen is not None:
        return int(chosen) % FIFTHS
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        count = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # the tests of an sdist have no history
        return 0
    return int(count) % FIFTHS


def pytest_report_header(config):
    if config.getoption("--all"):
        return "law book: all of it"
    return f"law book: fifth {choose_fifth()} of 0 to {FIFTHS - 1} (MODULI_FIFTH=k for another, --all for all)"


def skip_what_old_torches_cannot(items):
    """Skip tests that compile labelled tensors into one graph, which torch refuses before 2.13 (docs/torch-versions.md)."""
    if can_hold_constants():
        return
    for item in items:
        if item.get_closest_marker("compiles_labels"):
            item.add_marker(pytest.mark.skip(reason="compiling labelled tensors needs torch 2.13"))


def pytest_collection_modifyitems(config, items):
    skip_what_old_torches_cannot(items)
    if config.getoption("--all") or any("::" in str(argument) for argument in config.args):
        return
    fifth = choose_fifth()
    kept, left, seen = [], [], dict.fromkeys(SHARED, 0)
    for item in items:
        book = next((name for name in SHARED if item.nodeid.startswith(name)), None)
        if book is None:
            kept.append(item)
        else:
            seen[book] += 1
            (kept if seen[book] % FIFTHS == fifth else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
