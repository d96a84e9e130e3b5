"""Conversion to and from xarray: exact round trips, metadata, and errors for ambiguous arrays."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moduli as mo
from moduli.labels import BROADCAST, Space, Tensor
from moduli.labels._factories import tensor, zeros
from moduli.labels._xarray import from_xarray, open_dataset, to_xarray

xr = pytest.importorskip("xarray")

labels = st.one_of(
    st.text(max_size=4),
    st.integers(-(10**20), 10**20),
    st.booleans(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
    st.none(),
    st.datetimes(),
    st.dates(),
)


@st.composite
def spaces(draw: st.DrawFn, name: str) -> Space:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Space(draw(st.integers(0, 4)), name)
    if kind == 1:
        return BROADCAST.rename(name)
    one = draw(st.sampled_from([labels, st.text(max_size=4), st.integers(), st.datetimes(), st.tuples(st.integers())]))
    return Space(draw(st.lists(one, unique=True, max_size=4)), name)


@given(st.data(), st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]))
def test_a_named_tensor_survives_the_round_trip(data: st.DataObject, dtype: torch.dtype) -> None:
    dims = tuple(data.draw(spaces(name)) for name in data.draw(st.sampled_from(["", "x", "xy", "xyz"])))
    t = Tensor(torch.ones([len(space) for space in dims], dtype=dtype), dims)
    back = from_xarray(to_xarray(t))
    assert back.dims == t.dims
    assert [type(label) for space in back.dims for label in space] == [type(label) for space in dims for label in space]
    assert back.dtype == dtype
    assert back.data.equal(t.data)


def test_only_labelled_axes_have_coordinates() -> None:
    array = tensor([[1.0, 2.0]], time=None, channel=["r", "g"]).to_xarray(name="light")
    assert array.name == "light"
    assert array.dims == ("time", "channel")
    assert list(array.coords) == ["channel"]
    assert float(array.sel(channel="g")[0]) == 2.0


def test_unnamed_axes_get_names() -> None:
    assert to_xarray(zeros(2, 3)).dims == ("axis_0", "axis_1")
    assert to_xarray(zeros(2, axis_0=3)).dims == ("axis_0_", "axis_0")


def test_memory_is_not_shared() -> None:
    t = zeros(x=2)
    array = to_xarray(t)
    array[0] = 1.0
    back = from_xarray(array)
    array[1] = 1.0
    assert t.data.tolist() == [0.0, 0.0]
    assert back.data.tolist() == [1.0, 0.0]


def test_conjugates_are_resolved_and_gradients_refused() -> None:
    t = Tensor(torch.tensor([1j]).conj(), Space(1, "x"))
    assert complex(to_xarray(t)[0]) == -1j
    with pytest.raises(RuntimeError, match="detach"):
        to_xarray(zeros(x=2, requires_grad=True))


def test_invalid_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"coordinate 'x'.*'a' occurs more than once"):
        from_xarray(xr.DataArray([1.0, 2.0], dims="x", coords={"x": ["a", "a"]}))
    with pytest.raises(ValueError, match="coordinate 'x'"):
        from_xarray(xr.DataArray([1.0], dims="x", coords={"x": [np.nan]}))
    with pytest.raises(TypeError, match="list"):
        from_xarray([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a string"):
        from_xarray(xr.DataArray([1.0], dims=[3]))
    with pytest.raises(ValueError, match="can't name an axis"):
        from_xarray(xr.DataArray([1.0], dims="a b"))


def test_arrays_of_times_and_scalars_are_converted() -> None:
    when = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[ns]")
    t = from_xarray(xr.DataArray([1.0, 2.0], dims="time", coords={"time": when}))
    assert t.dims[0].labels == (np.datetime64("2024-01-01"), np.datetime64("2024-01-02"))
    fine = np.array([1, 2], dtype="datetime64[ns]")
    assert len(from_xarray(xr.DataArray([1.0, 2.0], dims="time", coords={"time": fine})).dims[0]) == 2
    assert from_xarray(xr.DataArray(2.5)).dims == ()
    beside = xr.DataArray([1.0, 2.0], dims="x", coords={"other": ("x", ["a", "b"])})
    assert from_xarray(beside).dims == (Space(2, "x"),)


def test_a_concatenated_broadcast_axis_is_positional() -> None:
    array = to_xarray(tensor([1.0], y=BROADCAST))
    assert from_xarray(array).dims == (BROADCAST.rename("y"),)
    wide = xr.concat([array, array], dim="y")
    wide.attrs = array.attrs
    assert from_xarray(wide).dims == (Space(2, "y"),)
    array.attrs["moduli_broadcast"] = "y"  # as files store a list of one
    assert from_xarray(array).dims == (BROADCAST.rename("y"),)


def test_conversions_without_xarray_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"pip install moduli\[xarray\]"):
        to_xarray(zeros(2))
    with pytest.raises(ImportError, match=r"pip install moduli\[xarray\]"):
        from_xarray(None)  # type: ignore[arg-type]


def rich() -> xr.DataArray:
    return xr.DataArray(
        np.arange(6.0).reshape(2, 3),
        dims=("time", "site"),
        coords={
            "time": ("time", np.array(["2024-01-01", "2024-01-02"], "datetime64[ns]"), {"calendar": "plain"}),
            "site": ["a", "b", "c"],
            "altitude": ("site", [1.0, 2.0, 3.0], {"unit": "m"}),
            "grid": (("time", "site"), np.ones((2, 3))),
            "run": 7,
        },
        name="rain",
        attrs={"unit": "mm", "nested": {"a": [1, 2]}},
    )


def test_the_round_trip_of_an_array_is_identical() -> None:
    array = rich()
    assert from_xarray(array).to_xarray().identical(array)
    assert from_xarray(array.isel(time=0)).to_xarray().identical(array.isel(time=0))
    assert from_xarray(array.isel(time=0, site=0)).to_xarray().identical(array.isel(time=0, site=0))
    stacked = array.stack(place=("time", "site"))
    assert from_xarray(stacked).to_xarray().identical(stacked)
    assert from_xarray(array).to_xarray(name="snow").name == "snow"


def test_metadata_are_kept_where_operands_agree() -> None:
    array, other = rich(), rich().assign_attrs(unit="cm")
    t, bare = from_xarray(array), Tensor(torch.ones(2, 3, dtype=torch.float64), from_xarray(rich()).dims)
    for same in (t * 2.0, torch.sin(t), -t, t + t, t + from_xarray(rich()), t + bare, bare * t, t.double(), t.clone()):
        assert same.to_xarray().attrs == array.attrs
        assert set(same.to_xarray().coords) == set(array.coords)
        assert same.to_xarray().name == "rain"
    different = (t + from_xarray(other)).to_xarray()
    assert different.attrs == {"nested": {"a": [1, 2]}}  # equal attributes of both
    assert (t + from_xarray(array.rename("snow"))).to_xarray().name is None
    assert t.sum().to_xarray().attrs == {}  # a number
    # Labels pair all the same.
    assert torch.equal((t + from_xarray(other)).data, 2 * t.data)
    assert torch.equal((t + t.sel(site=["c", "a", "b"])).data, 2 * t.data)


@pytest.mark.compiles_labels
def test_metadata_are_copies_and_survive_copy_pickle_and_compilation() -> None:
    import copy
    import pickle

    array = rich()
    t = from_xarray(array)
    array.attrs["nested"]["a"].append(3)
    for twin in (t, copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert twin.to_xarray().identical(rich())
        assert twin._axes is t._axes
    compiled = torch.compile(lambda t: t * 1.0, backend="eager", fullgraph=True)
    assert compiled(t).to_xarray().identical(rich())


def test_datasets_become_dicts_and_survive_the_round_trip() -> None:
    rain = rich()
    dataset = xr.Dataset({"rain": rain, "wind": rain.rename("wind").isel(time=0, drop=True) * 2}, attrs={"source": "x"})
    tensors = from_xarray(dataset)
    assert list(tensors) == ["rain", "wind"]
    assert tensors["wind"].names == ("site",)
    assert to_xarray(tensors).identical(dataset)
    tensors["total"] = Tensor(torch.tensor(1.0), ())
    assert to_xarray(tensors).attrs == {}
    with pytest.raises(ValueError, match=r"exact.* not equal .*'x'"):
        to_xarray({"p": zeros(x=["a", "b"]), "q": zeros(x=["b", "a"])})
    with pytest.raises(TypeError, match="'p' is a int"):
        to_xarray({"p": 3})


def test_exports_of_a_module_become_a_dataset() -> None:
    from moduli.nn import Module

    net, net.inner = Module(), Module()
    net.w = tensor([1.0, 2.0], channel=["r", "g"])
    net.inner.b = Tensor(torch.ones(3), (Space(3),))
    net.inner.c = Tensor(torch.ones(2), (Space(2),))
    dataset = to_xarray(net.export_all())
    assert set(dataset.data_vars) == {"w", "inner.b", "inner.c"}
    assert dataset["w"].sel(channel="g") == 2.0
    net.w = from_xarray(xr.DataArray([1.0], dims="x", name="x"))
    assert net.w._axes.coordinates is None


@pytest.mark.parametrize("order", ["moduli, xarray", "xarray, moduli"])
def test_the_accessor_is_registered_in_either_order_of_imports(order: str) -> None:
    program = f"""
import subprocess
import sys
import {order}
array = xarray.DataArray([1.0, 2.0], dims="x", coords={{"x": ["a", "b"]}}, name="y")
assert array.moduli.tensor.dims == (moduli.Space(["a", "b"], "x"),)
assert list(array.to_dataset().moduli.tensor) == ["y"]
assert sum(type(finder).__module__ == "moduli._accessor" for finder in sys.meta_path) == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def test_open_dataset_refers_to_xarray() -> None:
    with pytest.raises(TypeError, match="use xarray, then from_xarray"):
        open_dataset("rain.nc", engine="netcdf4")


def test_coordinates_and_units_follow_selections() -> None:
    t = from_xarray(rich()).assign_coords(region=("site", ["n", "s", "n"]))
    part = t.sel(site=["c", "a"]).sel(time="2024-01-02").to_xarray()
    assert part.altitude.values.tolist() == [3.0, 1.0]
    assert part.altitude.attrs == {"unit": "m"}
    assert part.region.values.tolist() == ["n", "n"]
    assert t.coords["region"].tolist() == ["n", "s", "n"]
    for wrong in ({"region": ("site", ["n"])}, {"region": ("moon", ["n"])}):
        with pytest.raises(ValueError):
            t.assign_coords(wrong)
    with pytest.raises(TypeError, match="needs an axis"):
        t.assign_coords(region=["n", "s", "n"])


def test_results_have_the_metadata_that_xarray_gives_them() -> None:
    array = rich().assign_coords(site=["a", "b", "c"])
    array.site.attrs["long_name"] = "station"
    t, when = from_xarray(array), np.array(["2024-01-02"], "datetime64[ns]")
    pairs = {
        "isel": (t.isel(site=[2, 0]), array.isel(site=[2, 0])),
        "mean": (t.mean("time"), array.mean("time")),
        "diff": (t.diff("time"), array.diff("time")),
        "rename": (t.rename(site="place"), array.rename(site="place")),
        "rename a coordinate": (t.rename(altitude="height"), array.rename(altitude="height")),
        "new labels": (t.assign_coords(site=[1, 2, 3]), array.assign_coords(site=[1, 2, 3])),
        "coordinate": (t.assign_coords(k=("time", [0, 1])), array.assign_coords(k=("time", [0, 1]))),
        "nearest": (
            t.reindex(time=when, method="nearest"),
            array.reindex(time=when, method="nearest"),
        ),
        "groupby": (t.groupby("altitude").mean(), array.groupby("altitude").mean()),
        "rolling": (t.rolling(time=2).mean(), array.rolling(time=2).mean()),
        "where": (t.where(t > 1, drop=True), array.where(array > 1, drop=True)),
        "cat": (
            mo.cat([t.isel(site=[0]), t.isel(site=[1, 2])], "site"),
            xr.concat([array.isel(site=[0]), array.isel(site=[1, 2])], "site"),
        ),
        "split": (t.split(2, "site")[0], array.isel(site=[0, 1])),
    }
    for name, (ours, theirs) in pairs.items():
        xr.testing.assert_identical(ours.to_xarray(), theirs)
        assert from_xarray(theirs).dims == ours.dims, name
    stacked = t.stack(place="time site")
    for name in ("altitude", "grid"):
        np.testing.assert_array_equal(stacked.coords[name], array.stack(place=("time", "site")).coords[name].values)
    outer = mo.align(t, t.isel(site=[0]).relabel(site=["z"]), join="outer")[0].to_xarray()
    assert outer.site.attrs == {"long_name": "station"}
    assert "altitude" not in outer.coords  # no value for z
    assert outer.attrs == array.attrs
