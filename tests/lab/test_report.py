"""The report of a race, as a file and in a browser."""

import importlib.util
import json
import re
from datetime import datetime
from pathlib import Path

import pytest

from moduli import lab


def read_data(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])


def test_the_page_is_complete_and_loads_nothing(finished):
    page = lab.report(finished)
    content = read_data(page)
    assert content["rows"] == json.loads(json.dumps(content["rows"], allow_nan=False))
    assert len(content["rows"]) == 12
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", page)
    outside = set(re.findall(r"https?://[^\"'\s<]+", page))
    assert outside <= {"http://www.w3.org/2000/svg"}
    assert "{{" not in page
    assert page.count("</script>") == 2
    assert len(page) < 1_000_000


def test_every_curve_has_its_command(finished):
    for row in read_data(lab.report(finished))["rows"]:
        assert row["command"].startswith(f"moduli race {row['problem']} --with ")
        assert "--seeds 3 --budget 160" in row["command"]


def test_the_same_results_make_the_same_page(finished, tmp_path):
    assert lab.report(finished) == lab.report(finished)
    path = lab.write_report(finished, tmp_path / "deeper" / "race.html")
    assert path.read_text() == lab.report(finished)
    assert [file.name for file in path.parent.iterdir()] == ["race.html"]


def test_an_unfinished_race_is_reported(finished):
    part = lab.Results(finished.header, finished.runs[:3])
    content = read_data(lab.report(part))
    assert not content["complete"]
    assert content["finished"] == 3
    assert lab.report(lab.Results(finished.header, []))


def test_the_picture_is_a_valid_svg_with_all_labels(finished, tmp_path):
    from xml.etree import ElementTree

    odd = ["$x_1$", "_hidden", "<b>{{js}}</b>"]
    field = [lab.contender(f"torch.SGD(lr=0.{at + 1})", label=label) for at, label in enumerate(odd)]
    for results in (finished, lab.race(["sphere-10"], field, seeds=1, budget=30, workers=0)):
        path = lab.write_picture(results, tmp_path / "race.svg")
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("svg")
        words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert all(entry["label"][:29] in " ".join(words) for entry in results.header["contenders"])
    assert lab.write_picture(results, tmp_path / "race.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="xyz"):
        lab.write_picture(results, tmp_path / "race.xyz")


@pytest.fixture
def draw():
    """The module that draws the picture of the README."""
    path = Path(__file__).parents[2] / "docs" / "img" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_readme_is_up_to_date_and_reproducible(draw, monkeypatch, tmp_path):
    assert draw.is_fresh(), "what draws docs/img/race.svg has changed: run make docs, and commit the picture"
    before = draw.PICTURE.read_bytes()
    assert not draw.draw()
    assert draw.PICTURE.read_bytes() == before
    monkeypatch.setattr(draw, "PICTURE", tmp_path / "race.svg")
    assert draw.draw()
    assert not draw.draw()
    assert draw.drawn() == draw.PICTURE.read_text()


def test_the_reduced_file_of_a_race_draws_the_same_picture(draw, finished, monkeypatch, tmp_path):
    lines = [finished.header, *finished.runs]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(draw, "KEPT", tmp_path / "reduced.jsonl")
    draw.keep(tmp_path / "all.jsonl")
    reduced, picture = lab.Results.read(draw.KEPT), tmp_path / "whole.svg"
    assert (
        lab.write_picture(reduced, tmp_path / "reduced.svg").read_bytes()
        == lab.write_picture(finished, picture).read_bytes()
    )
    assert draw.KEPT.stat().st_size < (tmp_path / "all.jsonl").stat().st_size / 2


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(finished, tmp_path_factory):
    return lab.write_report(finished, tmp_path_factory.mktemp("report") / "race.html").as_uri()


@pytest.fixture
def visit(browser, file):
    """A function that opens the report; at the end, the console must be empty and no request sent to the network."""
    messages, requests, pages = [], [], []

    def visit(width=1200, clock=False, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        if clock:
            page.clock.install(time=datetime(2020, 1, 1))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file)
        page.wait_for_selector("html[data-ready]", timeout=600_000)
        if clock:
            page.clock.pause_at(datetime(2020, 1, 2))  # from here on, only `run_for` advances the clock
        pages.append(page)
        return page

    yield visit
    for page in pages:
        page.close()
    assert messages == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def test_the_page_shows_curves_maps_and_labels(visit, finished):
    page = visit()
    for problem in finished.header["problems"]:
        for kind in ("evaluations", "seconds"):
            lines = page.locator(f"#problem-{problem['name']} .{kind} svg g.series path.line")
            assert lines.count() == 4
            assert all(len(lines.nth(i).get_attribute("d")) > 20 for i in range(3))
    assert page.locator("#profile svg g.series path.line").count() == 4
    assert page.locator("#problem-rosenbrock .map g.path path.line").count() == 3
    assert page.locator("#problem-rosenbrock .map g.cloud circle").count() == 8
    labels = page.locator("#legend button").all_inner_texts()
    assert labels == [contender["label"] for contender in finished.header["contenders"]]
    # Counted in the page, because sending the pixels to Python takes seconds.
    image = "document.querySelector('.map canvas').getContext('2d').getImageData(0, 0, 448, 448)"
    bands = page.evaluate(f"new Set(new Uint32Array({image}.data.buffer)).size")
    assert bands == 14
    assert "a 'quoted' <name>" in page.inner_text("#command").replace("'\"'\"'", "'")
    assert "torch 2" in page.inner_text("#about")


def test_the_legend_hides_and_shows(visit):
    page = visit()
    button = page.locator("#legend button").nth(1)
    count = lambda: page.locator("main g.series[data-series='1']").count()  # noqa: E731
    assert (count(), button.get_attribute("aria-pressed")) == (8, "true")
    button.click()
    assert (count(), button.get_attribute("aria-pressed")) == (0, "false")
    button.press("Enter")
    assert (count(), button.get_attribute("aria-pressed")) == (8, "true")
    for place in range(4):
        page.locator("#legend button").nth(place).click()
    assert page.locator("main g.series").count() == 0
    assert "nothing to show" in page.inner_text("#problem-noisy-20")


def test_the_slider_moves_the_population(visit):
    page = visit(clock=True)

    def read_points():
        return page.evaluate(
            "[...document.querySelectorAll('.cloud circle')].map((c) => [c.getAttribute('cx'), c.getAttribute('cy')])"
        )

    def read_generation():
        return page.inner_text("#problem-rosenbrock output")

    slider, play = (
        page.locator(f"#problem-rosenbrock {selector}") for selector in ("input[type=range]", ".slide button")
    )
    slider.fill("0")
    start = read_points()
    assert read_generation() == "generation 0"
    slider.fill(slider.get_attribute("max"))
    assert read_generation() == "generation 20"
    assert read_points() != start
    play.click()  # at the end, it restarts
    assert (read_generation(), play.inner_text(), read_points()) == ("generation 0", "❚❚", start)
    page.clock.run_for(400)
    assert read_generation() == "generation 4"
    play.click()
    paused = read_generation()
    page.clock.run_for(400)
    assert read_generation() == paused
    play.click()
    page.clock.run_for(3000)
    assert (read_generation(), play.inner_text()) == ("generation 20", "▶")


def test_the_table_is_sorted_and_shows_details(visit):
    page = visit()

    def column(place):
        return [text.strip() for text in page.locator(f"#results tr.row td:nth-child({place})").all_inner_texts()]

    first = column(3)
    page.locator("#results th[data-key=median]").click()
    rising = column(3)
    numbers = [float(text) for text in rising if text != "–"]
    assert numbers == sorted(numbers)
    assert sorted(rising) == sorted(first)
    page.locator("#results th[data-key=median]").click()
    falling = [float(text) for text in column(3) if text != "–"]
    assert falling == sorted(numbers, reverse=True)
    page.locator("#results th[data-key=contender]").press("Enter")
    assert column(2) == sorted(column(2))
    page.locator("#results tr.row.failed").first.click()
    detail = page.inner_text("#results tr.detail")
    assert "moduli race rosenbrock --with 'torch.SGD(lr=1000000000.0)'" in detail
    assert "diverged" in detail
    page.locator("#results tr.row.failed").first.click()
    assert page.locator("#results tr.detail").count() == 0


def test_a_curve_has_a_tooltip(visit):
    page = visit()
    end = page.locator("#problem-ground-state .evaluations svg g.series circle").first
    end.scroll_into_view_if_needed()
    box = end.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    page.wait_for_selector("#tip:not([hidden])")
    assert "evaluations: 160" in page.inner_text("#tip")


def test_profiles_change_with_the_tolerance(visit):
    page = visit()
    before = page.locator("#profile svg").inner_html()
    page.locator("#overview .choice button").first.click()
    assert page.locator("#overview .choice button").first.get_attribute("aria-pressed") == "true"
    assert page.locator("#profile svg").inner_html() != before


@pytest.mark.parametrize("width", [380, 768, 1400])
def test_the_page_fits_the_width_of_the_window(visit, width):
    page = visit(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for svg in page.locator("svg.plot").all():
        box = svg.bounding_box()
        assert box["width"] > 230
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_the_theme_follows_the_system_and_the_button(visit):
    back = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit(color_scheme="light"), visit(color_scheme="dark")
    white, black = light.evaluate(back), dark.evaluate(back)
    assert white != black
    light.locator("#theme").click()
    dark.locator("#theme").click()
    assert (light.evaluate(back), dark.evaluate(back)) == (black, white)


def test_the_page_is_printed_in_light_colours_without_controls(visit):
    page = visit()
    assert len(page.pdf(format="A4", print_background=True)) > 20_000
    page.emulate_media(media="print")
    assert page.locator("#theme").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
