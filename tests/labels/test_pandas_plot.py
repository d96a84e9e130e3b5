"""Conversion to and from pandas, and figures with names and labels on their axes."""

import math

import numpy as np
import pytest
import torch

import moduli as mo

pd = pytest.importorskip("pandas")

DATES = np.array(["2000-01-01", "2000-02-01", "2000-03-01"], "datetime64[D]")
TENSORS = {
    "labels": mo.tensor([1.0, 2.0, 3.0], x=["a", "b", "c"]),
    "range": mo.tensor([1, 2, 3], x=range(3)),
    "positions": mo.tensor([True, False], "x"),
    "dates": mo.tensor([1.0, math.nan, 3.0], time=DATES),
    "tuples": mo.tensor([1.0, 2.0], x=[(0, 1), (1, 2)]),
    "matrix": mo.tensor(torch.arange(6.0).reshape(2, 3), row=["a", "b"], time=DATES),
    "nameless": mo.tensor([[1.0, 2.0]]),
}


@pytest.mark.parametrize("name", sorted(set(TENSORS) - {"tuples"}))
def test_the_round_trip_through_pandas_is_exact(name):
    t = TENSORS[name]
    again = mo.from_pandas(t.to_pandas())
    assert again.dims == t.dims
    assert again.dtype == t.dtype
    assert torch.equal(again.data.nan_to_num(7.0), t.data.nan_to_num(7.0))


def test_tuples_stay_labels():
    assert list(TENSORS["tuples"].to_pandas().index) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("name", TENSORS)
def test_dataframes_equal_those_of_xarray(name):
    pytest.importorskip("xarray")
    t = TENSORS[name]
    if name == "nameless":
        t = t.rename("row column")
    theirs = t.to_xarray(name="height").to_dataframe()
    assert t.to_dataframe("height").reset_index(drop=True).equals(theirs.reset_index(drop=True))
    ours = t.to_dataframe("height").index
    assert [tuple(np.atleast_1d(np.array(row, object))) for row in ours] == [
        tuple(np.atleast_1d(np.array(row, object))) for row in theirs.index
    ]


def test_levels_become_axes_and_missing_entries_become_nan():
    t = TENSORS["matrix"]
    table = t.to_dataframe("height")["height"]
    assert mo.equal(mo.from_pandas(table).float(), t)
    ragged = mo.from_pandas(table.drop(("a", pd.Timestamp("2000-02-01"))))
    assert ragged.sel(row="a").isnan().tolist() == [False, False, True]  # labels are in order of occurrence
    with pytest.raises(TypeError, match=r"has no NaN for them; give fill=0"):
        mo.from_pandas(table.astype(int).iloc[1:])
    assert mo.from_pandas(table.astype(int).iloc[1:], fill=-1).sel(row="a", time="2000-01-01").item() == -1


def test_coordinates_are_columns():
    xr = pytest.importorskip("xarray")
    coords = {"x": [1, 2], "region": ("x", ["p", "q"])}
    array = xr.DataArray(np.eye(2), dims=("x", "y"), coords=coords, name="height")
    assert (
        mo.from_xarray(array).to_dataframe().reset_index(drop=True).equals(array.to_dataframe().reset_index(drop=True))
    )


def test_invalid_conversions_are_refused():
    for wrong, error, match in (
        (lambda: mo.from_pandas([1.0]), TypeError, "Series or a DataFrame"),
        (lambda: mo.from_pandas(pd.DataFrame({"p": [1.0], "q": ["x"]})), TypeError, "column 'q' holds"),
        (lambda: mo.from_pandas(pd.Series([1.0, 2.0], index=["a", "a"])), ValueError, "the index can't label an axis"),
        (lambda: mo.zeros(1, 1, 1).to_pandas(), ValueError, "to_dataframe"),
        (lambda: mo.zeros(2).attach().to_pandas(), RuntimeError, r"t.detach\(\).to_pandas"),
        (lambda: mo.tensor(1.0).to_dataframe(), ValueError, "no rows"),
    ):
        with pytest.raises(error, match=match):
            wrong()
    zoned = pd.Series([1.0], index=pd.date_range("2000", periods=1, tz="UTC"))
    with pytest.raises(TypeError, match="zone"):
        mo.from_pandas(zoned)
    assert mo.from_pandas(pd.Series([1, None], dtype="Int64")).isnull().tolist() == [False, True]
    assert mo.from_pandas(pd.DataFrame({"p": [1.5], "q": [True]})).tolist() == [[1.5, 1.0]]
    assert mo.tensor(2.0).to_pandas() == 2.0


# -- figures -----------------------------------------------------------------------------------------------------------


def test_lines_images_and_histograms():
    pytest.importorskip("matplotlib")
    line = TENSORS["labels"].plot(color="red").axes[0]
    assert (line.get_xlabel(), [tick.get_text() for tick in line.get_xticklabels()]) == ("x", ["a", "b", "c"])
    assert line.lines[0].get_ydata().tolist() == [1.0, 2.0, 3.0]
    assert TENSORS["dates"].plot().axes[0].lines[0].get_xdata().tolist() == DATES.tolist()
    image = TENSORS["matrix"].plot()
    assert [image.axes[0].get_xlabel(), image.axes[0].get_ylabel()] == ["time", "row"]
    assert image.axes[0].collections[0].get_array().shape == (2, 3)
    transposed = TENSORS["matrix"].plot(x="row").axes[0]
    assert transposed.get_xlabel() == "row"
    assert transposed.collections[0].get_array().tolist() == TENSORS["matrix"].data.T.tolist()
    lines = TENSORS["matrix"].plot("line", x="time").axes[0]
    assert [text.get_text() for text in lines.get_legend().get_texts()] == ["a", "b"]
    assert [each.get_ydata().tolist() for each in lines.lines] == TENSORS["matrix"].tolist()
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
    TENSORS["labels"].plot()
    assert plt.get_fignums() == before
    for wrong, error, match in (
        (lambda: TENSORS["labels"].plot("pie"), ValueError, "one of line, image, hist"),
        (lambda: TENSORS["labels"].plot("image"), ValueError, "has two axes"),
        (lambda: mo.zeros(1, 1, 1).plot("line"), ValueError, "select or reduce"),
        (lambda: mo.tensor([1j]).plot(), TypeError, "complex"),
    ):
        with pytest.raises(error, match=match):
            wrong()
