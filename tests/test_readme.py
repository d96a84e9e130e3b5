"""What the README and its picture promise about themselves; that its code runs is tested with the pages of docs."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_fits_and_its_blocks_are_short():
    assert len(README.splitlines()) <= 160
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.S | re.M)
    assert len(blocks) >= 5
    assert all(len([line for line in block.splitlines() if line]) <= 12 for block in blocks)


def test_the_picture_is_drawn_from_the_numbers_beside_it():
    assert "docs/img/house.svg" in README
    folder = ROOT / "docs" / "img"
    spec = importlib.util.spec_from_file_location("draw_house", folder / "draw_house.py")
    drawer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawer)
    picture = (folder / "house.svg").read_text(encoding="utf-8")
    assert picture == drawer.draw(json.loads((folder / "house.json").read_text()))
    assert picture.count("<svg ") == 5  # the picture and its four panels


def test_a_growth_in_the_picture_leaves_the_loss_as_it_was():
    for _, before, after, _ in json.loads((ROOT / "docs" / "img" / "house.json").read_text())["growth"]["jumps"]:
        assert abs(after - before) <= 1e-5 * before
