"""The mutants of `make mutants` are changes of lines that are there."""

import importlib.util
import pathlib


def test_mutants_change_what_is_there():
    path = pathlib.Path(__file__).parents[2] / "tools" / "mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    assert mutants.find_stale(mutants.LINKS) == []
    assert mutants.find_stale([mutants.LINKS[0]._replace(mutants=(("no such line", ""),))])
