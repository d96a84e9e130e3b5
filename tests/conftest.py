"""Settings shared by every test: one torch thread per worker, and hypothesis without deadlines."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from moduli._torch import can_hold_constants

torch.set_num_threads(1)

# Derandomised, so that a failure is reproducible everywhere; without deadlines, which depend on the machine.
for name, examples in (("moduli", 30), ("moduli-all", 60)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("moduli")

# These files take minutes and rarely fail: every link resumed in a new process, kernels under a sanitizer, every link in
# two and four processes, the notebooks of the gallery. `make test-all` runs them.
LONG = (
    "tests/io/test_resume.py",
    "tests/kernels/test_sanitized.py",
    "tests/optim/test_every_wrapping.py",
    "tests/test_gallery_executed.py",
)
# Single tests that are left out too: another parameter of a test that runs, or several processes for a result of one.
LONG_TESTS = (
    "tests/evolve/test_executor.py::test_a_lost_rank_ends_with_a_checkpoint_that_all_resume_from",
    "tests/evolve/test_search.py::test_a_killed_driver_loses_nothing[0]",
    "tests/evolve/test_search.py::test_a_killed_driver_loses_nothing[1]",
    "tests/evolve/test_search.py::test_a_program_without_a_guard_ends_with_one_error[spawn]",
    "tests/kernels/test_safety.py::test_a_list_may_be_emptied_while_its_kernel_runs[foreach]",
    "tests/kernels/test_safety.py::test_a_list_may_be_emptied_while_its_kernel_runs[plain]",
    "tests/lab/test_race.py::test_chains_that_end_or_hang_their_process_when_they_are_made_stop_no_other_run[while",
    "tests/lab/test_safety.py::test_a_race_that_is_ended_leaves_no_process_and_no_file[1]",
    "tests/lab/test_safety.py::test_a_race_that_is_ended_leaves_no_process_and_no_file[9]",
    "tests/lab/test_safety.py::test_a_worker_that_hangs_on_an_import_does_not_survive_its_driver[9]",
    "tests/optim/test_checkpoints.py::test_every_number_of_processes_resumes_from_every_other",
    "tests/optim/test_wrappings.py::test_chains_take_the_steps_of_one_process[fsdp1]",
    "tests/particles/test_ecosystem.py::test_a_thousand_steps_keep_one_model_alive[Large",
    "tests/particles/test_ecosystem.py::test_a_thousand_steps_keep_one_model_alive[<lambda>",
    "tests/population/test_shard.py::test_processes_together_compute_what_one_does[4]",
    "tests/test_benchmarks.py::test_a_quick_run_takes_fewer_turns_and_writes_no_page",
)
BOOK = "tests/laws/test_laws.py"
"""The law book runs as a whole after a change of the packages that it tests, and a fifth of it otherwise."""
BOOK_ROOMS = ("src/moduli/optim", "src/moduli/m", "src/moduli/kernels", "src/moduli/testing")
# One test in five of these runs. The fifth changes with each commit, so five commits run every law on every row. Five is prime
# to the number of laws, so each fifth has every law.
SHARED = (
    BOOK,
    "tests/evolve/test_laws.py",
    "tests/laws/test_accelerator.py::test_links",
    "tests/laws/test_edits.py::test_parameters_that_are_not_edited_continue",
    "tests/m/test_population.py",
    "tests/m/test_globalisation.py",
    "tests/optim/test_fused_attributes.py::test_attributes_are_read_at_every_step",
)
FIFTHS = 5
# Thousands of random cases, or other processes: they are slow under coverage and cover little that others do not, so
# `make test` runs them and the law book without coverage.
UNCOVERED = (
    "tests/laws/test_laws.py",
    "tests/laws/test_accelerator.py",
    # An interrupt inside the tracer of coverage would deadlock on its lock.
    "tests/laws/test_interrupts.py",
    "tests/laws/test_threads.py",
    "tests/axes/test_transformers.py",
    "tests/labels/test_compile.py",
    "tests/labels/test_elementwise.py",
    "tests/io/test_crash.py",
    "tests/merge/test_formulas.py",
    "tests/merge/test_laws.py",
    "tests/minimize/test_hock_schittkowski.py",
    "tests/minimize/test_nist.py",
    "tests/particles/test_laws.py",
    "tests/particles/test_edits.py",
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
        os.environ["MODULI_ALL"] = "1"  # read by programs in other processes


def pytest_ignore_collect(collection_path, config):
    """Ignore files that are not run, because reading all of them takes a minute."""
    path = collection_path.as_posix()
    if not path.endswith(".py"):
        return None
    if any("::" in str(argument) or str(argument).endswith(".py") for argument in config.args):
        return None  # files given by name are always read
    part = config.getoption("--part")
    if part is not None and path.endswith(UNCOVERED) != (part == "uncovered"):
        return True
    if not config.getoption("--all") and path.endswith(LONG):
        return True
    return None


def ask_git(*words):
    """Return what git prints about this checkout; None where it has no history, as for the tests of an sdist."""
    command = ["git", "-C", str(Path(__file__).parent.parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def choose_fifth() -> int:
    """Return the fifth that this commit runs: `MODULI_FIFTH`, or the number of commits before it, modulo five."""
    chosen = os.environ.get("MODULI_FIFTH") or ask_git("rev-list", "--count", "HEAD")
    return int(chosen or 0) % FIFTHS


def needs_whole_book() -> bool:
    """Whether commits since `MODULI_BASE` (by default the last one), or uncommitted changes, touch a package of the book."""
    if "MODULI_FIFTH" in os.environ or ask_git("rev-parse", "HEAD") is None:
        return False
    changed = ask_git("diff", "--name-only", os.environ.get("MODULI_BASE") or "HEAD^", "--", *BOOK_ROOMS)
    return changed is None or bool(changed)  # after an unknown base anything may have changed


def pytest_report_header(config):
    if config.getoption("--all"):
        return "law book: all of it"
    book = "all of it, for optim, m or kernels have changed" if needs_whole_book() else f"fifth {choose_fifth()}"
    return f"law book: {book} (MODULI_FIFTH=k for fifth k of 0 to {FIFTHS - 1}, --all for all)"


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
    shared = [name for name in SHARED if name != BOOK] if needs_whole_book() else SHARED
    chosen, deselected, counts = [], [], dict.fromkeys(shared, 0)
    for item in items:
        if item.nodeid.startswith(LONG_TESTS):
            deselected.append(item)
            continue
        name = next((name for name in shared if item.nodeid.startswith(name)), None)
        if name is None:
            chosen.append(item)
        else:
            counts[name] += 1
            (chosen if counts[name] % FIFTHS == fifth else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = chosen
