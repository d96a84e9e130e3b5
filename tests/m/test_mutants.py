"""The lines that `make mutants` changes exist in the source."""

import importlib.util
import pathlib


def test_mutants_change_lines_that_exist():
    path = pathlib.Path(__file__).parents[2] / "tools" / "mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    assert mutants.find_stale(mutants.LINKS) == []
    assert mutants.find_stale([mutants.LINKS[0]._replace(mutants=(("no such line", ""),))])
