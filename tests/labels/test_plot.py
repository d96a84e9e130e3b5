"""Figures of labelled tensors: names, labels and units on their axes."""

import math

import numpy as np
import pytest
import torch

import moduli as mo

DATES = np.array(["2000-01-01", "2000-02-01", "2000-03-01"], "datetime64[D]")
LABELS = mo.tensor([1.0, 2.0, 3.0], x=["a", "b", "c"])
SERIES = mo.tensor([1.0, math.nan, 3.0], time=DATES)
TABLE = mo.tensor(torch.arange(6.0).reshape(2, 3), row=["a", "b"], time=DATES)


def test_lines_images_and_histograms():
    pytest.importorskip("matplotlib")
    line = LABELS.plot(color="red").axes[0]
    assert (line.get_xlabel(), [tick.get_text() for tick in line.get_xticklabels()]) == ("x", ["a", "b", "c"])
    assert line.lines[0].get_ydata().tolist() == [1.0, 2.0, 3.0]
    assert SERIES.plot().axes[0].lines[0].get_xdata().tolist() == DATES.tolist()
    image = TABLE.plot()
    assert [image.axes[0].get_xlabel(), image.axes[0].get_ylabel()] == ["time", "row"]
    assert image.axes[0].collections[0].get_array().shape == (2, 3)
    transposed = TABLE.plot(x="row").axes[0]
    assert transposed.get_xlabel() == "row"
    assert transposed.collections[0].get_array().tolist() == TABLE.data.T.tolist()
    lines = TABLE.plot("line", x="time").axes[0]
    assert [text.get_text() for text in lines.get_legend().get_texts()] == ["a", "b"]
    assert [each.get_ydata().tolist() for each in lines.lines] == TABLE.tolist()
    counted = mo.tensor([[1.0, math.nan], [1.0, 2.0]], "x y").attach().plot("hist", bins=2)
    assert [patch.get_height() for patch in counted.axes[0].patches] == [2.0, 1.0]
    assert mo.zeros(2, 2, 2).plot(ax=counted.add_subplot()) is counted
    bins = mo.tensor([1.0, 2.0], x=[1, 7]).groupby("x", bins=[0, 5, 9]).sum().plot().axes[0]
    assert [tick.get_text() for tick in bins.get_xticklabels()] == ["0 to 5", "5 to 9"]


def test_units_are_on_the_axes():
    xr = pytest.importorskip("xarray")
    pytest.importorskip("matplotlib")
    array = xr.DataArray(
        [1.0, 2.0], dims="x", coords={"x": ("x", [0, 1], {"units": "km"})}, name="height", attrs={"units": "m"}
    )
    axes = mo.from_xarray(array).plot().axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x [km]", "height [m]")


def test_figures_are_neither_shown_nor_registered():
    plt = pytest.importorskip("matplotlib.pyplot")
    before = plt.get_fignums()
    LABELS.plot()
    assert plt.get_fignums() == before
    for wrong, error, match in (
        (lambda: LABELS.plot("pie"), ValueError, "one of line, image, hist"),
        (lambda: LABELS.plot("image"), ValueError, "has two axes"),
        (lambda: mo.zeros(1, 1, 1).plot("line"), ValueError, "select or reduce"),
        (lambda: mo.tensor([1j]).plot(), TypeError, "complex"),
    ):
        with pytest.raises(error, match=match):
            wrong()
