"""`Sketch`: valid SVG for any numbers, with points at the right places."""

import math
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moduli import lab

SVG = "{http://www.w3.org/2000/svg}"

reals = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.tuples(reals, reals), max_size=12), st.booleans(), st.booleans())
def test_sketches_are_valid_svg_for_any_numbers(rows, log, equal):
    x, y = [row[0] for row in rows], [row[1] for row in rows]
    picture = (
        lab.Sketch("<x>", "y & z", log=log, equal=equal and not log).add_line(x, y, '"l"').add_points(x, y, errors=y)
    )
    root = ElementTree.fromstring(picture.add_band(x, y, [2 * each for each in y]).svg())
    text = " ".join(root.itertext())
    assert "<x>" in text
    assert "y & z" in text
    drawn = [each.get("points", "") for each in root.iter() if each.tag in (f"{SVG}polyline", f"{SVG}polygon")]
    assert "nan" not in " ".join(drawn)
    assert "inf" not in " ".join(drawn)


def test_points_of_sketches_are_placed_to_scale():
    line = ElementTree.fromstring(lab.Sketch().add_line([0, 1, 3], torch.tensor([1.0, 2.0, 4.0])).svg())
    points = [tuple(map(float, pair.split(","))) for pair in line.find(f"{SVG}polyline").get("points").split()]
    assert math.isclose((points[2][0] - points[0][0]) / (points[1][0] - points[0][0]), 3, rel_tol=1e-2)
    assert math.isclose((points[2][1] - points[0][1]) / (points[1][1] - points[0][1]), 3, rel_tol=1e-2)
    assert points[0][1] > points[2][1]  # larger values are higher, and pixels count from the top
    log = ElementTree.fromstring(lab.Sketch(log=True).add_line([0, 1, 2, 3], [1, 10, 100, 0]).svg())
    heights = [float(pair.split(",")[1]) for pair in log.find(f"{SVG}polyline").get("points").split()]
    assert len(heights) == 3
    assert math.isclose(heights[0] - heights[1], heights[1] - heights[2], abs_tol=0.2)
    with pytest.raises(ValueError, match=r"x and y have \[2, 3\] numbers"):
        lab.Sketch().add_line([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="log or equal"):
        lab.Sketch(log=True, equal=True)
    with pytest.raises(ValueError, match="2 points and 1 errors"):
        lab.Sketch().add_points([1, 2], [1, 2], errors=[1])
