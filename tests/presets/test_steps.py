"""Presets take the steps of their reference implementations, with the settings of the validation page."""

import sys
from pathlib import Path

import pytest

from launching import load_program

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools" / "validate"))
steps = load_program(ROOT / "tools" / "validate" / "steps.py")
references = load_program(ROOT / "tools" / "preset_defaults.py").REFERENCES


def test_rows_are_for_presets_with_a_reference_and_name_tests():
    assert set(steps.ROWS) <= set(references)
    for row in steps.ROWS.values():
        assert not row.paper or (ROOT / row.paper.split("`")[1]).exists()


@pytest.mark.parametrize("preset", references)
def test_steps_are_those_of_the_reference_or_of_the_paper(preset):
    row = steps.ROWS.get(preset, steps.Row())
    pytest.importorskip((row.path or references[preset].path).partition(".")[0])
    difference = steps.compare_steps(preset, row, references[preset])
    assert (difference > steps.CLOSE) == bool(row.paper)
