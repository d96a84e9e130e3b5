"""The tour: its programs run, draw and print correct results; its page, as a file and in a browser."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from moduli import lab
from moduli.cli import app

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def stops():
    pytest.importorskip("scipy", reason="the last program aligns networks, which needs scipy")
    before = torch.random.get_rng_state(), torch.get_num_threads()
    stops = [lab.run_program(name) for name in lab.TOUR]
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    return {stop.name: stop for stop in stops}


def numbers(text):
    return [float(each) for each in re.findall(r"-?\d+\.\d+(?:e[+-]?\d+)?", text)]


def test_programs_print_the_results_that_their_titles_announce(stops):
    assert all(stop.output and stop.picture.series for stop in stops.values())
    for line in stops["fit"].output.splitlines()[:3]:
        estimate, error, truth = numbers(line)
        assert 0 < error < 0.2
        assert abs(estimate - truth) < 4 * error
    rotated, truth, _, determinant, free = numbers(stops["derive"].output)
    assert abs(rotated - truth) < 0.1
    assert determinant == 1.0 != free
    errors = [numbers(line)[0] for line in stops["arithmetic"].output.splitlines()[:4]]
    assert errors[3] < 0.6 * min(errors[:3])
    assert "3 outputs in the relative" in stops["arithmetic"].output
    _, *rows = [numbers(line) for line in stops["population"].output.splitlines()]
    assert rows[2][2] > 2 * rows[0][2]
    small, middle, large = numbers(stops["grow"].output.splitlines()[2])
    assert small > 2 * middle > 4 * large
    assert "teacher: 24 units" in stops["grow"].output
    naive, aligned = numbers(stops["merge"].output.splitlines()[-1])
    assert naive > 5 * aligned


def test_the_fit_equals_that_of_numpy(stops):
    """The heights of the drawn bands are the least-squares solution for their centers."""
    import numpy as np

    measured, _, bands = stops["fit"].picture.series
    heights = (np.array(bands.low) + np.array(bands.high)) / 2
    basis = np.exp(-((np.array(measured.x)[:, None] - np.array(bands.x)) ** 2))
    assert np.allclose(np.linalg.lstsq(basis, np.array(measured.low), rcond=None)[0], heights, atol=1e-5)


def test_the_page_is_complete_escaped_and_loads_nothing(stops, tmp_path):
    odd = lab.TourStop("odd", "<b>", "`a<b` {{stops}}", "x = '</pre>' # {{css}}", "<script>", None, 0.1)
    path = lab.write_tour([*stops.values(), odd], tmp_path / "tour.html", race="a&b.html")
    page = path.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<code>a&lt;b</code> {{stops}}" in page
    assert page.count("<svg") == 6
    targets = set(re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']*)", page))
    assert targets == {"data:,", "a&amp;b.html", *(f"#{name}" for name in (*lab.TOUR, "odd"))}
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert all(ast.parse(stop.code) for stop in stops.values())
    assert len(page) < 200_000


def test_a_program_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    stop = lab.run_program("merge")
    assert stop.picture is None
    assert "moduli[merge]" in stop.output
    assert "<svg" not in lab.tour_page([stop])


def test_the_command_writes_the_page(stops, monkeypatch, tmp_path):
    monkeypatch.setattr(lab, "run_program", stops.get)
    run = CliRunner().invoke(app, ["tour", "--out", str(tmp_path / "page.html")])
    assert run.exit_code == 0
    assert "barrier:" in run.output
    assert (tmp_path / "page.html").read_text() == lab.tour_page(list(stops.values()))


def test_the_command_prints_a_program_that_runs_alone(tmp_path):
    printed = CliRunner().invoke(app, ["tour", "derive"]).output
    assert printed == lab.read_program("derive")
    (tmp_path / "derive.py").write_text(printed)
    source = str(Path(lab.__file__).parents[2])
    command = [sys.executable, "-W", "error", "derive.py"]
    process = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert "determinant 1.000000" in process.stdout
    assert ElementTree.parse(tmp_path / "derive.svg").getroot().tag == f"{SVG}svg"
    wrong = CliRunner().invoke(app, ["tour", "fti"])
    assert wrong.exit_code == 2
    assert "it has fit, derive" in wrong.output


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_the_page_is_readable_in_a_browser(browser, stops, tmp_path, width, scheme):
    address = lab.write_tour(list(stops.values()), tmp_path / "tour.html").as_uri()
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") == width  # no horizontal scrolling
    assert page.locator("section.stop").count() == 6
    for name, stop in stops.items():
        part = page.locator(f"#{name}")
        picture = part.locator("svg.plot").bounding_box()
        assert picture["width"] > 250
        assert picture["height"] > 150
        assert part.locator("pre.output").inner_text().split() == stop.output.split()
        assert part.locator("pre.code").inner_text().split() == stop.code.split()
    colours = page.evaluate("""() => {
        const light = text => text.match(/[0-9.]+/g).slice(0, 3).reduce((sum, each) => sum + Number(each), 0) / 765;
        const card = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
        return [...document.querySelectorAll('pre, p, h2, svg text')].map(each => {
            const style = getComputedStyle(each);
            return Math.abs(light(each.tagName === 'text' ? style.fill : style.color) - card);
        });
    }""")
    assert min(colours) > 0.35
    page.close()
    assert messages == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
