"""What needs no torch does not import it, and the kept catalogue is the catalogue."""

import json
import os
import subprocess
import sys

import pytest

from moduli import io, lab
from moduli.cli import _catalogue, _files
from moduli.cli._links import _search

PROGRAM = """
import sys
from moduli_command import main
try:
    main()
finally:
    print("torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["links"], ["links", "Adam"], ["merge", "--help"], ["links", "Adma"]]
)
def test_torch_is_imported_by_commands_that_need_it(arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == (2 if arguments[-1] == "Adma" else 0), done.stderr
    kept = json.loads(_catalogue.FILE.read_text(encoding="utf-8"))
    stale = arguments[0] == "links" and kept["made_of"] != _catalogue.fingerprint()  # another test says so
    assert done.stderr.splitlines()[-1] == ("True True" if stale else "False False")


def test_the_kept_catalogue_is_the_catalogue():
    kept = json.loads(_catalogue.FILE.read_text(encoding="utf-8"))
    assert kept["made_of"] == _catalogue.fingerprint(), "links have changed: run make catalogue, and commit the file"
    assert kept["entries"] == _catalogue.describe(), "links have changed: run make catalogue, and commit the file"
    assert _catalogue.entries() == kept["entries"]


def test_a_catalogue_of_other_links_is_not_believed(monkeypatch, tmp_path):
    file = tmp_path / "catalogue.json"
    monkeypatch.setattr(_catalogue, "FILE", file)
    for text in ('{"made_of": "something else", "entries": {}}', "damaged", None):
        file.write_text(text) if text is not None else file.unlink()
        assert _catalogue.entries().keys() == lab.catalogue.entries().keys()


def test_a_family_is_an_answer_before_a_preset_of_its_name():
    known = _catalogue.entries()
    families = {entry["family"] for entry in known.values()}
    assert "momentum" in families
    found = _search(known, "momentum", families)
    assert {entry["name"] for entry in found} >= {e["name"] for e in known.values() if e["family"] == "momentum"}
    assert len(found) > 5


def test_recipes_in_the_help_are_those_there_are():
    assert tuple(io.RECIPES) == _files.RECIPES
