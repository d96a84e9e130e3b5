"""Entry points of other packages in chains, races, merges, laws and the catalogue, and the pytest plugin."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import moduli as mo
from moduli import _plugins, lab, merge, testing
from moduli.cli import _catalogue, _complete

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "link_package"


def install(folder, project, site):
    """Copy a package to a folder on the path, with the metadata that an installer would write.

    Args:
        folder: The source of the package; None for one with entry points only.
        project: The text of its pyproject.toml.
        site: The folder on the path.
    """
    about = tomllib.loads(project)["project"]
    if folder is not None:
        shutil.copytree(folder, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in e.items()) for group, e in about["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


def forget():
    _plugins.forget_plugins()
    lab.catalogue.entries.cache_clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Install the example package until the end of the test."""
    recipes = dict(merge.RECIPES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield install(EXAMPLE / "src", (EXAMPLE / "pyproject.toml").read_text(), tmp_path / "site")
    for name in [name for name in sys.modules if name.partition(".")[0] == "softsign"]:
        del sys.modules[name]
    merge.RECIPES.clear()
    merge.RECIPES.update(recipes)
    monkeypatch.undo()
    forget()


@pytest.fixture
def installed(site):
    forget()
    return site


def declare(site, name, group, **points):
    """Install a package with entry points only.

    Args:
        site: The folder on the path.
        name: The name of the package.
        group: The group of the entry points.
        **points: The entry points.
    """
    listed = "\n".join(f'{key} = "{value}"' for key, value in points.items())
    install(None, f'[project]\nname = "{name}"\nversion = "1"\n[project.entry-points."{group}"]\n{listed}\n', site)
    forget()


def test_names_are_listed_without_importing_the_package(installed):
    assert list(_plugins.list_plugins("links")) == ["SoftSign", "soft_descent"]
    assert lab.problems.names()[-1] == "ripples"
    assert merge.list_recipes()[-1] == "median"
    assert _complete.complete_recipe("med") == ["median"]
    assert "softsign" not in sys.modules


def test_names_of_plugins_are_used_as_those_of_moduli(installed, tmp_path):
    results = lab.race(["ripples"], ["SoftSign | LR(0.1)", "soft_descent(lr=0.02)"], seeds=1, budget=150, workers=0)
    assert all(run["value"] < 0.1 for run in results.runs)
    report = testing.check_link("SoftSign(2.0) | LR(0.05)", laws=["pieces", "errors"])
    assert report.held == ("pieces", "errors")
    models = [{"w": torch.tensor([value])} for value in (1.0, 2.0, 100.0)]
    for number, model in enumerate(models):
        mo.save(tmp_path / str(number), model)
    mo.io.merge_files("median", [tmp_path / str(number) for number in range(3)], tmp_path / "out")
    assert mo.io.read(tmp_path / "out").module["w"].item() == merge.find_recipe("median")(models)["w"].item() == 2.0


def test_the_stored_catalogue_has_plugins_and_follows_their_sources(installed, monkeypatch):
    described = _catalogue.describe()
    assert described["entries"]["SoftSign"]["family"] == "softsign"
    assert described["entries"]["soft_descent"]["kind"] == "preset"
    assert described["problems"]["ripples"]["summary"].startswith("A bowl with small ripples")
    before = _catalogue.compute_key()
    assert _catalogue.compute_key() == before
    with (installed / "softsign" / "_link.py").open("a") as file:
        file.write("\n")
    assert _catalogue.compute_key() != before


def test_entry_points_that_cannot_be_loaded_are_listed_with_the_reason(installed):
    declare(installed, "broken", "moduli.links", Torn="no_such_module:Torn", Number="math:pi")
    with pytest.warns(RuntimeWarning) as warned:
        described = _catalogue.describe()["entries"]
    assert sorted(str(each.message).split()[0].strip("'") for each in warned) == ["Number", "Torn"]
    assert "no_such_module" in described["Torn"]["summary"]
    with pytest.raises(
        lab.ChainSyntaxError, match="'Torn' of the package broken can't be loaded from no_such_module:Torn"
    ):
        lab.contender("Torn | LR(0.1)")
    with pytest.raises(lab.ChainSyntaxError, match="Number of broken is 3.14"):
        lab.contender("Number")


def test_plugins_cannot_replace_names(installed):
    declare(installed, "another", "moduli.links", Adam="softsign:SoftSign", SoftSign="softsign:SoftSign")
    with pytest.warns(RuntimeWarning) as warned:
        make = lab.catalogue.entries()["Adam"].make
    assert make is mo.m.Adam
    assert {"'Adam'", "'SoftSign'"} == {re.search(r"'\w+'", str(each.message))[0] for each in warned}
    with pytest.raises(merge.MergeError, match="can't add the recipe 'lerp': moduli.merge._averages has it"):
        merge.recipe(
            type(test_names_are_listed_without_importing_the_package)(
                (lambda a, b: None).__code__, {"__name__": "another"}, "lerp"
            )
        )


def test_an_entry_point_that_is_no_recipe_is_an_error(installed):
    declare(installed, "bare", "moduli.recipes", plain="softsign:ripples", lost="softsign:nothing")
    with pytest.raises(merge.MergeError, match="no function decorated with moduli.merge.recipe"):
        merge.find_recipe("plain")
    with pytest.raises(ImportError, match="'lost' of the package bare can't be loaded"):
        merge.find_recipe("lost")


def test_the_example_passes_its_tests_and_the_laws(site):
    """Run them as the author of the package would: with the pytest plugin in a new process."""
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    options = ["-p", "moduli_pytest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "-o", "pythonpath=", "-v"]
    laws = ["--moduli-links", "softsign", "--moduli-laws", "reference,pieces,half"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *laws, str(EXAMPLE / "tests")],
        cwd=EXAMPLE, env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for law in ("reference", "pieces", "half"):
        assert f"moduli-links::SoftSign::{law} PASSED" in done.stdout
    assert "6 passed" in done.stdout


PACKAGE = """
from moduli import optim

class Slope(optim.UpdateTransform):
    def transform(self, tensor, state, setting):
        return tensor / max(tensor.shape[0], 1) if tensor.dim() else tensor

class Bounded(Slope):
    limit: float

class _Private(Slope):
    pass
"""


def run_laws(*arguments):
    """Run pytest with the plugin in this process; return the exit code and the outcome of each test."""
    outcomes = {}

    class Recorder:
        def pytest_runtest_logreport(self, report):
            if report.when == "call":
                outcomes[report.nodeid] = (report.outcome, str(report.longrepr))

    options = ["-p", "moduli_pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-q", *map(str, arguments)]
    return pytest.main(options, plugins=[Recorder()]), outcomes


def test_the_plugin_reports_broken_and_skipped_laws(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sloped.py").write_text(PACKAGE)
    (tmp_path / "empty").mkdir()
    folder = ["--rootdir", tmp_path, tmp_path / "empty"]
    code, outcomes = run_laws("--moduli-links", "sloped", "--moduli-laws", "pieces,reference", *folder)
    assert code == pytest.ExitCode.TESTS_FAILED
    kinds = {name: outcome for name, (outcome, _) in outcomes.items()}
    assert kinds.pop("moduli-links::Bounded::reference") in ("failed", "skipped")
    assert kinds == {
        "moduli-links::Slope::pieces": "failed",
        "moduli-links::Slope::reference": "skipped",
        "moduli-links::Bounded::pieces": "failed",
    }
    assert "Slope breaks the law 'pieces'" in outcomes["moduli-links::Slope::pieces"][1]
    assert "it has no reference" in outcomes["moduli-links::Slope::reference"][1]
    assert "pytest_moduli_case in conftest.py" in outcomes["moduli-links::Bounded::pieces"][1]
    for wrong in (["--moduli-links", "no_such_package"], ["--moduli-links", "math"],
                  ["--moduli-links", "sloped", "--moduli-laws", "gravity"]):  # fmt: skip
        assert run_laws(*wrong, *folder)[0] == pytest.ExitCode.USAGE_ERROR
    assert "defines no links" in capsys.readouterr().err
    del sys.modules["sloped"]


def test_the_plugin_is_declared_and_needs_no_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"moduli_pytest": "moduli_pytest"}
    assert "src/moduli_pytest.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    program = "import sys, moduli_pytest; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout == "False\n"
