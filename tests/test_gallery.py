"""Every notebook of the gallery has its page and figures, written from its current cells; nothing is executed here."""

import json
import re
import types
from pathlib import Path

import pytest

from launching import load_program

HERE = Path(__file__).resolve().parent.parent / "docs" / "gallery"


build = load_program(HERE / "build.py")
each = pytest.mark.parametrize("name", build.NAMES)


def test_every_file_belongs_to_a_notebook():
    figures = {path.name for path in HERE.glob("*.svg")}
    linked = {figure for name in build.NAMES for figure in re.findall(rf"\(({name}-\d+\.svg)\)", page_of(name))}
    assert figures == linked
    assert {path.stem for path in HERE.glob("*.ipynb")} == set(build.NAMES)
    assert {path.stem for path in HERE.glob("*.md")} == {*build.NAMES, "index"}
    assert list(build.read_record()) == list(build.NAMES)


def page_of(name):
    return (HERE / f"{name}.md").read_text(encoding="utf-8")


@each
def test_notebooks_have_no_outputs_or_metadata(name):
    notebook = build.read(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[a-z][a-z-]+", cell["id"]), "an id names the subject of the cell"
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@each
def test_notebooks_are_short_and_begin_with_title_sentence_and_cost(name):
    cells = build.cells(name)
    assert 4 <= sum(kind == "code" for kind, _ in cells) <= 8
    kind, story = cells[0]
    assert kind == "markdown"
    assert re.match(r"# .+\n\n.+\.\n\n", story), "a title, one sentence, and why"
    assert "What it costs: " in story


@each
def test_pages_are_fresh(name):
    assert build.is_fresh(name, versions=False), f"run: python docs/gallery/build.py {name}"
    assert build.read_record()[name]["seconds"] <= build.SECONDS


@each
def test_pages_show_the_cells_and_the_figures(name):
    page = page_of(name)
    for kind, text in build.cells(name):
        assert (text if kind == "markdown" else build.write_code(text)) in page
    assert f'({name}.ipynb){{ download="{name}.ipynb" }}' in page
    assert f"({name}-1.svg)" in page


@each
def test_pages_load_nothing_from_elsewhere(name):
    figures = [path.read_text(encoding="utf-8") for path in HERE.glob(f"{name}-*.svg")]
    outputs = re.findall(r'<div class="output".*?\n</div>', page_of(name), re.DOTALL)
    for text in [*figures, *outputs]:
        assert "<script" not in text
        assert not re.search(r'(?:src|href)="(?!#|data:image/)', text)
        assert not re.search(r"url\((?!#)|@import|<!DOCTYPE|<metadata|\bon\w+=", text)
    assert all(len(figure.encode()) <= build.LARGEST for figure in figures)


def test_the_index_is_written_from_the_notebooks():
    assert (HERE / "index.md").read_text(encoding="utf-8") == build.write_index()


# -- docs/gallery/build.py --------------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Make a gallery of one executed notebook; return its cells."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "RECORD", tmp_path / "executed.json")
    monkeypatch.setattr(build, "NAMES", ("one",))
    write_notebook(tmp_path, "import os, torch\nfrom moduli import m\nimport numpy.linalg")
    executed = [types.SimpleNamespace(**cell) for cell in build.read("one")["cells"]]
    for cell in executed:
        cell.source = "".join(cell.source)
        cell.get = lambda key, default, cell=cell: getattr(cell, key, default)
    picture = {
        "image/svg+xml": '<?xml?><svg><!-- Matplotlib --><g id="a"><path d="M 1.26 2.04"/></g></svg>',
        "text/plain": "",
    }
    outputs = [
        {"output_type": "stream", "text": "printed"},
        {"output_type": "display_data", "data": picture},
        {"output_type": "execute_result", "data": {"text/html": "<b>x</b>\n\n<i>y</i>", "text/plain": "x"}},
    ]
    executed[1].outputs = [Output(output) for output in outputs]
    build.write("one", executed, 1.0)
    return executed


class Output(dict):
    __getattr__ = dict.__getitem__


def write_notebook(folder, code):
    cells = [
        {"cell_type": "markdown", "source": ["# One\n", "\n", "A sentence.\n", "\n", "More."]},
        {"cell_type": "code", "source": [code]},
    ]
    (folder / "one.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")


def test_a_page_has_words_code_and_outputs(other):
    page = (build.HERE / "one.md").read_text(encoding="utf-8")
    assert page.index("# One") < page.index("```python\nimport os") < page.index("```text\nprinted\n```")
    assert "![One, figure 1](one-1.svg)" in page
    assert '<div class="output" markdown="0">\n<b>x</b>\n<i>y</i>\n</div>' in page
    assert (build.HERE / "one-1.svg").read_text(encoding="utf-8") == '<svg><g><path d="M 1.3 2"/></g></svg>\n'
    assert "**[One](one.md)**<br>A sentence." in build.write_index()


def test_a_notebook_is_fresh_until_its_code_or_versions_change(other, monkeypatch):
    assert set(build.find_versions("one")) == {"moduli", "numpy", "torch"}
    assert build.is_fresh("one")
    monkeypatch.setattr(build, "find_versions", lambda name: {"torch": "1.0"})
    assert not build.is_fresh("one")
    assert build.is_fresh("one", versions=False)
    write_notebook(build.HERE, "print(2)")
    assert not build.is_fresh("one", versions=False)


def test_slow_notebooks_and_those_without_a_figure_are_refused(other):
    with pytest.raises(build.GalleryError, match="took 31 s"):
        build.write("one", other, 31.0)
    other[1].outputs[0]["text"] = "<Legend at 0x7f5c5a82ccc0>"
    with pytest.raises(build.GalleryError, match="an address"):
        build.write("one", other, 1.0)
    other[1].outputs = []
    with pytest.raises(build.GalleryError, match="no figure"):
        build.write("one", other, 1.0)


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        ("loss 0.03, 12 units", "loss 0.04, 12 units", True),  # one unit of the last digit
        ("loss 0.03, 12 units", "loss 0.06, 12 units", False),
        ("1,000 runs", "1,050 runs", True),
        ("rate 3e-02", "rate 4e-02", True),
        ("rate 3e-02", "rate 3e-01", False),
        ("solved: True", "solved: False", False),
        ("one\ntwo", "one", False),
        ("(6, 2) -> (12, 2)", "(6, 2) -> (24, 2)", False),
    ],
)
def test_printed_numbers_may_differ_in_the_last_digit(said, printed, same):
    assert build.agree(said, printed) is same
