"""Fixtures shared by the tests of reports: a finished race, and a browser."""

import shutil

import pytest

from moduli import lab

LABELS = {
    "SGD <b>&amp;</b> \"quotes\" '</script>'": "torch.SGD(lr=0.001)",
    "Adam": "Adam | LR(0.05)",
    "swarm": "Population(8, spread=0.4) | Adam | LR(0.1)",
    "diverges": "torch.SGD(lr=1e9)",
}


@pytest.fixture(scope="session")
def finished():
    """A small race with maps, populations, noise, labels that look like HTML, and failures."""
    field = [lab.contender(chain, label=label) for label, chain in LABELS.items()]
    courses = ["rosenbrock", "ground-state", "noisy-20"]
    return lab.race(courses, field, seeds=3, budget=160, workers=0, command=["moduli", "race", "a 'quoted' <name>"])


@pytest.fixture(scope="session")
def browser():
    """Debian's chromium, driven by Playwright."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="the report is tested in a browser by playwright, which is not installed"
    )
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("the report is tested in chromium, which is not installed: apt-get install chromium")
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()
