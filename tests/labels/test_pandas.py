"""Conversion to and from pandas: values, labels and dates in both directions."""

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
