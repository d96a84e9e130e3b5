"""Limits on the README's length, and its picture; its code is run by tests/test_docs.py."""

import json
import re
from pathlib import Path

from launching import load_program

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_and_its_blocks_are_short():
    assert len(README.splitlines()) <= 160
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.S | re.M)
    assert len(blocks) >= 5
    assert all(len([line for line in block.splitlines() if line]) <= 12 for block in blocks)


def test_the_picture_is_drawn_from_the_numbers_beside_it():
    assert "docs/img/house.svg" in README
    folder = ROOT / "docs" / "img"
    drawer = load_program(folder / "draw_house.py")
    picture = (folder / "house.svg").read_text(encoding="utf-8")
    assert picture == drawer.draw(json.loads((folder / "house.json").read_text()))
    assert picture.count("<svg ") == 5  # the picture and its four panels


def test_growth_in_the_picture_does_not_change_the_loss():
    for _, before, after, _ in json.loads((ROOT / "docs" / "img" / "house.json").read_text())["growth"]["jumps"]:
        assert abs(after - before) <= 1e-5 * before
