"""What needs no torch does not import it, and the kept catalogue is the catalogue."""

import os
import subprocess
import sys

import pytest

from moduli import io
from moduli.cli import _catalogue, _files
from moduli.cli._catalogue import _search

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
    assert done.stderr.splitlines()[-1] == "False False"


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


def test_the_kept_catalogue_is_the_catalogue():
    told = ("name", "kind", "family", "summary", "arguments", "signature")
    # What torch says of its own optimizers is another thing with each of its versions.
    kept, live = (
        {name: {key: entry[key] for key in told} for name, entry in found.items() if entry["kind"] != "torch"}
        for found in (_catalogue.entries(), _catalogue.describe())
    )
    changed = sorted(name for name in kept.keys() | live.keys() if kept.get(name) != live.get(name))
    assert not changed, f"{changed[:5]} have changed: run make catalogue, and commit the file"


def test_a_family_is_an_answer_before_a_preset_of_its_name():
    known = _catalogue.entries()
    families = {entry["family"] for entry in known.values()}
    assert "momentum" in families
    found = _search(known, "momentum", families)
    assert {entry["name"] for entry in found} >= {e["name"] for e in known.values() if e["family"] == "momentum"}
    assert len(found) > 5


def test_recipes_in_the_help_are_those_there_are():
    assert sorted(io.RECIPES) == sorted(_files.RECIPES)


def run(words, redirection="", stdout=subprocess.DEVNULL):
    """Run the command in a shell that redirects its streams."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "moduli_command", *words.split()]
    return subprocess.run(
        line, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=600, check=False
    )


@pytest.mark.parametrize("words", ["links", "links --json", "links Adam", "--help"])
def test_output_that_nobody_reads_any_more_ends_the_command_in_silence(words):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(words, stdout=writing)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == (1 if words == "--help" else 141)  # which Click says itself


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        ("links", ">&-", 0),
        ("links --json", ">&- <&-", 0),
        ("links nothing-of-this-name", ">&-", 2),
        ("links", "2>&- <&- >&-", 0),
        ("links", ">/dev/full", 1),
    ],
)
def test_streams_that_are_closed_or_full_are_no_traceback(words, redirection, code):
    done = run(words, redirection)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (code > 0)
