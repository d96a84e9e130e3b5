"""What needs no torch does not import it, and the kept catalogue is the catalogue."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from moduli import io
from moduli.cli import _catalogue, _files
from moduli.cli._links import _search

PROGRAM = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr))
"""


@pytest.mark.parametrize(
    "words",
    [
        "moduli_command --version",
        "moduli_command --help",
        "moduli_command links",
        "moduli_command links Adma",
        "moduli_command merge --help",
        "moduli --version",
        "moduli links Adam",
    ],
)
def test_torch_is_imported_by_commands_that_need_it(words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == (2 if "Adma" in words else 0), done.stderr
    stale = "links" in words and _catalogue.find_changes(_kept()["sources"])  # another test says so
    assert done.stderr.splitlines()[-1] == ("True True" if stale else "False False")


def test_a_package_that_imports_moduli_while_it_is_started_has_all_of_it(tmp_path):
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "__init__.py").write_text("import sys, moduli\nprint('torch' in sys.modules)\n")
    (tmp_path / "another" / "__main__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    words = [sys.executable, "-m", "another", "-m", "moduli.py"]
    assert (
        subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=True).stdout
        == "True\n"
    )


def _kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_catalogue.FILE.read_text(encoding="utf-8"))
    return found


def test_the_kept_catalogue_is_the_catalogue():
    told = ("name", "kind", "family", "summary", "arguments", "signature")
    # What torch says of its own optimizers is another thing with each of its versions.
    kept, live = (
        {name: {key: entry[key] for key in told} for name, entry in found.items() if entry["kind"] != "torch"}
        for found in (_kept()["entries"], _catalogue.describe())
    )
    changed = sorted(name for name in kept.keys() | live.keys() if kept.get(name) != live.get(name))
    assert not changed, f"{changed[:5]} have changed: run make catalogue, and commit the file"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one link and its catalogue, for links that are edited."""
    package = tmp_path / "src" / "moduli"
    (package / "m").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    link = package / "m" / "steps.py"
    link.write_text(
        'import math\nclass Step:\n    """Goes on."""\n    def __init__(self, size=1):\n        self.a = 1\n'
    )
    monkeypatch.setattr(_catalogue, "PACKAGE", package)
    monkeypatch.setattr(_catalogue, "FILE", tmp_path / "catalogue.json")
    answers = iter([{"Step": {"name": "Step"}}, {"Step": {"name": "live"}}])
    monkeypatch.setattr(_catalogue, "describe", lambda: next(answers))
    _catalogue.write()
    return link


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.a = 1", "self.a = 2  # another"),
        ("import math", "import math, cmath"),
        ("size=1):", "size = 1):"),
    ],
)
def test_edits_that_the_catalogue_does_not_tell_leave_it_as_it_is(checkout, capsys, old, new):
    checkout.write_text(checkout.read_text().replace(old, new))
    assert _catalogue.entries() == {"Step": {"name": "Step"}}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("old", "new"), [("size=1", "size=2"), ("Goes on", "Goes back"), ("class Step", "class Stride"), (None, None)]
)
def test_a_checkout_with_other_links_answers_with_them_and_says_how_to_renew(checkout, capsys, old, new):
    checkout.write_text(checkout.read_text().replace(old, new)) if old else checkout.unlink()
    assert _catalogue.entries() == {"Step": {"name": "live"}}
    told = capsys.readouterr().err
    assert "m/steps.py changed" in told
    assert "make catalogue" in told


def test_an_installed_package_does_not_look_at_its_sources(checkout, monkeypatch):
    (checkout.parents[3] / "pyproject.toml").unlink()
    checkout.write_text("another = 1\n")
    monkeypatch.setattr(_catalogue, "find_changes", None)
    assert _catalogue.entries() == {"Step": {"name": "Step"}}


@pytest.mark.parametrize("text", ['{"entries": {}}', "damaged", None])
def test_a_file_that_is_no_catalogue_is_not_believed(checkout, text):
    _catalogue.FILE.write_text(text) if text is not None else _catalogue.FILE.unlink()
    assert _catalogue.entries() == {"Step": {"name": "live"}}


def test_a_family_is_an_answer_before_a_preset_of_its_name():
    known = _catalogue.entries()
    families = {entry["family"] for entry in known.values()}
    assert "momentum" in families
    found = _search(known, "momentum", families)
    assert {entry["name"] for entry in found} >= {e["name"] for e in known.values() if e["family"] == "momentum"}
    assert len(found) > 5


def test_recipes_in_the_help_are_those_there_are():
    assert tuple(io.RECIPES) == _files.RECIPES
