"""The start of the command: torch is imported only where it is needed, and the stored catalogue is up to date."""

import os
import subprocess
import sys

import pytest

from moduli import io
from moduli.cli import _catalogue, _complete
from moduli.cli._links import _search

PROGRAM = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr))
"""


@pytest.fixture(scope="module", autouse=True)
def _stored():
    """Store the list once; other processes then read it."""
    _catalogue.read_catalogue()


@pytest.mark.parametrize(
    "words",
    [
        "moduli_command --version",
        "moduli_command --help",
        "moduli_command links",
        "moduli_command links Adma",
        "moduli_command race --list",
        "moduli_command merge --help",
        "moduli --version",
        "moduli links Adam",
    ],
)
def test_commands_that_do_not_need_torch_do_not_import_it(words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    process = subprocess.run(
        [sys.executable, "-m", *words.split()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert process.returncode == (2 if "Adma" in words else 0), process.stderr
    assert process.stderr.splitlines()[-1] == "False False"


def test_another_package_started_with_m_imports_all_of_moduli(tmp_path):
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "__init__.py").write_text("import sys, moduli\nprint('torch' in sys.modules)\n")
    (tmp_path / "another" / "__main__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    words = [sys.executable, "-m", "another", "-m", "moduli.py"]
    assert (
        subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=True).stdout
        == "True\n"
    )


def complete(line, monkeypatch):
    """Return the completions of the last word of a line, as a shell gets them."""
    from typer.testing import CliRunner

    from moduli.cli import app

    monkeypatch.setenv("_TYPER_COMPLETE_TESTING", "1")
    environment = {"_MODULI_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment["_TYPER_COMPLETE_ARGS"] = line
    output = CliRunner().invoke(app, [], prog_name="moduli", env=environment).output
    return [entry.partition("\t")[0] for entry in output.splitlines() if entry]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("moduli links ClipN", ["ClipNorm", "ClipNormByEMA", "ClipNormGrowth"]),
        ("moduli race rosen", ["rosenbrock", "rosenbrock-20"]),
        ("moduli race --with lbf", ["lbfgs"]),
        ("moduli fit beale --with 'Adam | ClipNormB", ["Adam | ClipNormByEMA"]),
        ("moduli fit beale --with 'Adam(be", []),
        ("moduli fit rosenbrock-", ["rosenbrock-20"]),
        ("moduli merge mult", ["multislerp"]),
    ],
)
def test_names_are_completed(line, names, monkeypatch):
    assert complete(line, monkeypatch) == names


def test_completion_imports_no_torch(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environment |= {"_MODULI_COMPLETE": "complete_bash", "COMP_WORDS": "moduli links ClipNormB", "COMP_CWORD": "2"}
    words = [sys.executable, "-c", "from moduli_command import main; main()"]
    process = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert process.stdout.split() == ["ClipNormByEMA"], process.stderr
    assert process.stderr.splitlines()[-1] == "False False"


def test_the_stored_catalogue_equals_a_new_one():
    assert _catalogue.entries() == _catalogue.describe()["entries"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use a temporary cache and package; return a list with one entry for each time the catalogue was computed."""
    calls = []
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("first")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_catalogue, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(_catalogue, "describe", lambda: calls.append(1) or {"entries": {}, "problems": {}})
    return calls


def test_a_stored_catalogue_is_read_until_a_source_changes(cache, tmp_path):
    for expected, text in ((1, "first"), (1, "first"), (2, "another"), (2, "another")):
        source = tmp_path / "package" / "part.py"
        if source.read_text() != text:
            source.write_text(text)
        _catalogue.read_catalogue()
        assert len(cache) == expected
    (tmp_path / "package" / "new.py").touch()
    assert _catalogue.read_names()["entries"] == {}  # completion uses the last stored list, even if it is outdated
    assert len(cache) == 2
    _catalogue.read_catalogue()
    assert len(cache) == 3
    assert len(list((tmp_path / "cache" / "moduli").iterdir())) == 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"key": 1}', "\udc80"])
def test_a_damaged_catalogue_is_computed_again(cache, damage):
    _catalogue.read_catalogue()
    _catalogue.locate_cache().write_bytes(damage.encode(errors="surrogateescape"))
    assert _catalogue.read_catalogue()["entries"] == {}
    assert len(cache) == 2


def test_the_catalogue_is_computed_if_it_cannot_be_stored(cache, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _catalogue.read_catalogue()["entries"] == {}
    assert _catalogue.read_names()["entries"] == {}
    assert len(cache) == 2


def test_a_search_prefers_a_family_to_a_preset_of_the_same_name():
    entries = _catalogue.entries()
    families = {entry["family"] for entry in entries.values()}
    assert "momentum" in families
    result = _search(entries, "momentum", families)
    assert {entry["name"] for entry in result} >= {e["name"] for e in entries.values() if e["family"] == "momentum"}
    assert len(result) > 5


def test_recipes_in_the_help_are_those_of_io():
    assert sorted(io.RECIPES) == sorted(_complete.RECIPES)


def run(words, redirection="", stdout=subprocess.DEVNULL):
    """Run the command in a shell that redirects its streams, and return the finished process.

    Args:
        words: The arguments of the command.
        redirection: The redirection in the syntax of the shell.
        stdout: The standard output of the shell.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "moduli_command", *words.split()]
    return subprocess.run(
        line, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=600, check=False
    )


@pytest.mark.parametrize("words", ["links", "links --json", "links Adam", "--help"])
def test_a_closed_pipe_ends_the_command_without_a_message(words):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = run(words, stdout=writing)
    finally:
        os.close(writing)
    assert process.stderr == ""
    assert process.returncode == (1 if words == "--help" else 141)  # Click prints the help and exits with 1


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
def test_closed_or_full_streams_cause_no_traceback(words, redirection, code):
    process = run(words, redirection)
    assert process.returncode == code
    assert "Traceback" not in process.stderr
    assert len(process.stderr.splitlines()) == (code > 0)
