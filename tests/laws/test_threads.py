"""Threads that share fused functions compute what each computes alone, in the cases of `make endurance`."""

from pathlib import Path

import pytest
import torch

from launching import load_program
from moduli import kernels
from moduli.kernels import _lists

threads = load_program(Path(__file__).resolve().parents[2] / "tools" / "endurance" / "threads.py")

CASES = {**threads.list_functions(), **threads.list_presets(), **threads.list_programs()}


@pytest.mark.parametrize("name", CASES)
def test_four_threads_compute_what_each_computes_alone(name):
    threads.check_case(name, CASES[name])


@pytest.mark.parametrize("name", threads.list_functions())
def test_four_threads_without_a_compiler(name, monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "foreach")
    threads.check_case(name, CASES[name])


def test_the_lists_that_were_compared_are_used(monkeypatch):
    """A call of another thread between the comparison of lists and the use of their addresses has no effect."""
    add = kernels.fuse(lambda p, g: p + g, inplace="p")

    def make_lists():
        return [torch.zeros(8)], [torch.ones(8)]

    mine, others = make_lists(), make_lists()
    add(*mine)
    find = _lists.ListLayout.find
    intruding = []

    def find_and_be_interrupted(self, *args, **kwargs):
        layout = find(self, *args, **kwargs)
        if not intruding:
            intruding.append(True)
            add(*others)  # as another thread might at this point
        return layout

    monkeypatch.setattr(_lists.ListLayout, "find", find_and_be_interrupted)
    add(*mine)
    assert mine[0][0].tolist() == [2.0] * 8
    assert others[0][0].tolist() == [1.0] * 8
