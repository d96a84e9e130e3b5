"""Operations interrupted at random instants are complete or undone; a short run of `make endurance`."""

import pathlib
import threading

import pytest

from launching import load_program

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tools" / "endurance"


def test_interrupted_operations_are_complete_or_undone():
    if threading.current_thread() is not threading.main_thread() or not hasattr(__import__("signal"), "setitimer"):
        pytest.skip("only the main thread is interrupted, by a timer that not every system has")
    interrupts = load_program(FOLDER / "interrupts.py")
    counts = interrupts.run(3.0, seed=1, least=20)
    assert counts["undone"] + counts["done"] == counts["interrupted"]


def test_files_survive_damage_interrupted_saves_and_killed_writers():
    counts = load_program(FOLDER / "files.py").run(2.0)
    assert min(counts[name] for name in ("interrupts", "mutated", "kills")) > 0, counts


def test_the_endurance_command_finds_its_checks():
    assert {"files", "interrupts", "threads"} <= load_program(FOLDER / "__main__.py").find_checks().keys()
