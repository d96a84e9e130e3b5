"""The lines that `make mutants` changes exist in the source."""

import pathlib

from launching import load_program


def test_mutants_change_lines_that_exist():
    mutants = load_program(pathlib.Path(__file__).parents[2] / "tools" / "mutants.py")
    assert mutants.find_stale(mutants.LINKS) == []
    assert mutants.find_stale([mutants.LINKS[0]._replace(mutants=(("no such line", ""),))])
