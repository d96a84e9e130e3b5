"""Missing values and groups: comparison with loops, finite gradients, one graph, vmap, half precision, and errors."""

import math
import pickle

import numpy as np
import pytest
import torch

import moduli as mo

NAN = math.nan
GROUPS = ["n", "s", "n", "t", "s"]
# One group is all NaN in the first row, and one entry is alone in its group.
DATA = torch.tensor([[1.0, NAN, 3.0, 4.0, NAN], [2.0, 7.0, NAN, NAN, 5.0]], dtype=torch.float64)
T = mo.tensor(DATA, row=["a", "b"], site=[1, 2, 4, 8, 16])

REDUCTIONS = {
    "sum": lambda t, **o: t.sum(**o),
    "mean": lambda t, **o: t.mean(**o),
    "var": lambda t, **o: t.var(correction=0, **o),
    "std": lambda t, **o: t.std(correction=0, **o),
    "unbiased": lambda t, **o: t.std(**o),
    "quantile": lambda t, **o: t.quantile(0.4, **o),
    "quantiles": lambda t, **o: t.quantile([0.1, 0.8], **o),
}
ALONG = REDUCTIONS | {"amin": lambda t, **o: t.amin(**o), "amax": lambda t, **o: t.amax(**o)}
ALONG |= {"min": lambda t, **o: t.min(**o).values, "max": lambda t, **o: t.max(**o).values}
BY_GROUP = REDUCTIONS | {
    "min": lambda t, **o: t.min(**o),
    "max": lambda t, **o: t.max(**o),
    "first": lambda t, **o: t.first(**o),
    "last": lambda t, **o: t.last(**o),
}
FORMS = {f"{name} along": lambda t, f=f: f(t, dim="site", skipna=True) for name, f in ALONG.items()}
FORMS |= {f"{name} of groups": lambda t, f=f: f(t.groupby(site=GROUPS), skipna=True) for name, f in BY_GROUP.items()}
FORMS |= {
    "count": lambda t: t.count("site") * t.sum("site", skipna=True),
    "anomaly": lambda t: t.groupby(site=GROUPS) - t.groupby(site=GROUPS).mean(skipna=True),
    "bins": lambda t: t.groupby("site", bins=[1, 4, 10], bin_labels=["low", "high"]).mean(skipna=True),
    "fillna": lambda t: t.fillna(mo.tensor([1.0, 2.0], site=[2, 16], dtype=torch.float64)),
    "where": lambda t: t.where(t > 2.5, t * 2),
    "interpolate": lambda t: t.interpolate_na("site"),
    "nearest": lambda t: t.interpolate_na("site", "nearest"),
    "ffill": lambda t: t.ffill("site", limit=1),
    "bfill": lambda t: t.bfill("site"),
}


def iterate_groups(skipna):
    """Iterate over the entries of each group in each row."""
    for row in range(2):
        for name in dict.fromkeys(GROUPS):
            part = DATA[row, [at for at, group in enumerate(GROUPS) if group == name]]
            yield part[~part.isnan()] if skipna else part


@pytest.mark.parametrize("skipna", [True, False])
def test_reductions_of_groups_equal_a_loop(skipna):
    groups = T.groupby(site=GROUPS)
    plain = {
        "sum": torch.sum, "mean": torch.mean, "var": lambda p: torch.var(p, correction=0) if len(p) else p.sum() * NAN,
        "unbiased": lambda p: p.std() if len(p) > 1 else p.sum() * NAN, "quantile": lambda p: p.quantile(0.4) if len(p) else NAN,
        "min": lambda p: p.amin() if len(p) else NAN, "max": lambda p: p.amax() if len(p) else NAN,
        "first": lambda p: p[0] if len(p) else NAN, "last": lambda p: p[-1] if len(p) else NAN,
    }  # fmt: skip
    for name, function in plain.items():
        expected = torch.tensor(
            [float(function(part)) for part in iterate_groups(skipna)], dtype=torch.float64
        ).reshape(2, 3)
        result = BY_GROUP[name](groups, skipna=skipna)
        assert result.dims == (T.dims[0], mo.Space(["n", "s", "t"], "site")), name
        torch.testing.assert_close(result.data, expected, equal_nan=True, msg=name)
    assert groups.count().tolist() == [[2, 0, 1], [1, 2, 0]]
    assert groups.sizes == {"n": 2, "s": 2, "t": 1}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_finite_and_zero_at_missing_values(name):
    leaf = DATA.clone().requires_grad_()
    result = FORMS[name](mo.Tensor(leaf, T.dims))
    result.data[~result.data.isnan()].sum().backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[DATA.isnan()] == 0).all()
    # Compare with central differences; no two entries are equal.
    step = 1e-6
    for at in (~DATA.isnan()).nonzero().tolist():
        moved = [DATA.clone(), DATA.clone()]
        for sign, data in zip((1, -1), moved, strict=True):
            data[tuple(at)] += sign * step
        up, down = (FORMS[name](mo.Tensor(data, T.dims)).data.nansum() for data in moved)
        torch.testing.assert_close(leaf.grad[tuple(at)], (up - down) / (2 * step), rtol=1e-4, atol=1e-6)


@pytest.mark.compiles_labels
def test_operations_on_gaps_compile_and_vmap():
    def run(t):
        return [form(t) for form in FORMS.values()]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")(T)
    mapped = mo.vmap(run, over="row")(T)
    for name, expected, one, many in zip(FORMS, run(T), compiled, mapped, strict=True):
        assert one._axes is expected._axes, name
        torch.testing.assert_close(one.data, expected.data, equal_nan=True, msg=name)
        torch.testing.assert_close(many.align_to(expected.dims).data, expected.data, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single_precision(dtype):
    many = mo.ones(x=4096, dtype=dtype)
    assert many.groupby("x", [0] * 4096).sum().item() == many.sum(skipna=True).item() == 4096
    assert many.groupby("x", [0] * 4096).mean().dtype is many.mean(skipna=True).dtype is dtype
    assert many.quantile(0.5).dtype is many.groupby("x", [0] * 4096).quantile(0.5).dtype is dtype


def test_groups_of_integers_and_complex_numbers():
    t = mo.tensor([3, 1, 2], "x")
    groups = t.groupby("x", ["a", "a", "b"])
    assert groups.sum().tolist() == [4, 2]
    assert groups.max().tolist() == [3, 2]
    assert t.quantile(0.5).item() == 2.0
    assert t.isnull().tolist() == [False] * 3
    assert mo.tensor([1, 100], "x").to(torch.int8).groupby("x", [0, 0]).sum().item() == 101
    empty = t.groupby("x", bins=[0, 2, 5, 9])
    assert empty.sum().tolist() == [3, 0, 0]  # positions 1 and 2 are in the first bin
    with pytest.raises(ValueError, match=r"groups \[\(2, 5\), \(5, 9\)\] have no entries"):
        empty.min()
    z = mo.tensor([1 + 1j, complex(NAN, 0), 3 - 1j], "x")
    assert z.mean("x", skipna=True).item() == 2
    assert z.var("x", skipna=True, correction=0).item() == pytest.approx(2.0)
    with pytest.raises(TypeError, match="no order"):
        z.quantile(0.5)


def test_groups_may_be_mappings_functions_arrays_or_labelled_tensors():
    t = mo.tensor([1.0, 2.0, 4.0, 8.0], x=["a1", "b1", "a2", "c9"])
    expected = t.groupby(x=["a", "b", "a", "c"]).sum()
    for rule in (
        {"a1": "a", "a2": "a", "b1": "b", "c9": "c"},
        lambda label: label[0],
        np.array(["a", "b", "a", "c"]),
    ):
        assert mo.equal(t.groupby(x=rule).sum(), expected)
    flags = mo.tensor([True, False, True], x=["c9", "a1", "b1"])
    with pytest.raises(ValueError, match="labels of axis 'x' differ"):
        t.groupby(x=flags)
    flags = mo.tensor([1, 0, 1, 0], x=["c9", "a1", "b1", "a2"])  # paired by label
    assert t.groupby(x=flags).sum().sel(x=1).item() == 10.0
    assert t.groupby(x=[0.0, NAN, 0.0, 1.0]).sum().tolist() == [5.0, 8.0]
    assert t.groupby("x").sum().dims[0].labels == ("a1", "a2", "b1", "c9")
    numbers = t.relabel(x=[0.0, 1.0, 2.0, 4.0])
    assert numbers.groupby("x", bins=2).sizes == {(0.0, 2.0): 3, (2.0, 4.0): 1}
    assert numbers.groupby("x", bins=2, right=False).sizes == {(0.0, 2.0): 2, (2.0, 4.0): 2}
    assert numbers.groupby("x", bins=[0, 2, 4], right=False).sizes == {(0, 2): 2, (2, 4): 1}
    assert [(label, part.tolist()) for label, part in numbers.groupby("x", bins=[0, 2, 4])] == [
        ((0, 2), [2.0, 4.0]),
        ((2, 4), [8.0]),
    ]


def test_invalid_groups_are_refused_with_an_explanation():
    t = mo.tensor([1.0, 2.0], x=["a", "b"])
    for wrong, error, match in (
        (
            lambda: t.groupby("region"),
            KeyError,
            "no axis or coordinate named 'region'; the axes are 'x'; there are no further",
        ),
        (
            lambda: t.groupby(x="region"),
            KeyError,
            "axis 'x' has no coordinate 'region': the labels of axis 'x' are not dates",
        ),
        (lambda: t.groupby("x", bins=[1]), ValueError, "edges of bins are two or more"),
        (lambda: t.groupby("x", bins=[2, 1]), ValueError, "ascending order"),
        (lambda: t.groupby("x", ["p", "q"], bins=[0, 1]), TypeError, "groups or bins"),
        (lambda: t.groupby("x", bin_labels=["p"]), TypeError, "bin_labels are of bins"),
        (lambda: t.relabel(x=[1, 2]).groupby("x", bins=[0, 1, 2], bin_labels=["p"]), ValueError, "make 2 intervals"),
        (lambda: t.groupby(x=[0, 1]).quantile(2.0), ValueError, "between 0 and 1"),
        (lambda: t.groupby(x=[0, 1]) - mo.zeros(x=[0, 5]), KeyError, "no value for the group 1"),
        (lambda: t.dropna("x", "some"), ValueError, "'any' or 'all'"),
        (lambda: t.interpolate_na("x"), TypeError, "use_coordinate=False goes by position"),
        (lambda: t.interpolate_na("x", "cubic"), ValueError, "'linear' or 'nearest'"),
        (lambda: (t > 1).where(t, 0.0), TypeError, r"mo.where\(cond, a, b\)"),
        (lambda: t.long().where(t > 1), TypeError, "has no NaN; say what else"),
    ):
        with pytest.raises(error, match=match):
            wrong()


def test_map_applies_a_function_to_each_group_and_restores_the_order():
    t = mo.tensor(torch.arange(10.0).reshape(2, 5), row=["a", "b"], site=[1, 2, 4, 8, 16])
    groups = t.groupby(site=GROUPS)
    assert mo.equal(groups.map(lambda part: part - part.mean("site")), groups - groups.mean())
    assert groups.map(lambda part: part - part.mean("site")).dims == t.dims
    assert mo.equal(groups.apply(lambda part, k: part.sum("site") * k, 2.0), 2 * groups.sum())
    assert groups.map(lambda part: part[:, :1]).dims[1].labels == (1, 2, 8)
    plain = mo.tensor(torch.arange(4.0)).groupby(0, [0, 1, 0, 1])
    assert plain.map(lambda part: part.flip(0)).tolist() == [2.0, 3.0, 0.0, 1.0]


def test_coordinates_follow_their_axes():
    xr = pytest.importorskip("xarray")
    array = xr.DataArray(
        np.arange(24.0).reshape(2, 3, 4),
        dims=("time", "lat", "n"),
        coords={"lat": [10, 20, 30], "region": ("lat", ["p", "q", "p"]), "depth": ("n", [1.0, 2.0, 3.0, NAN])},
    )
    t = mo.from_xarray(array)
    for same in (
        t.mean("time"),
        t.isel(time=0),
        t - t.mean("time"),
        t.permute("n", "lat", "time"),
        t.mean("time") * t,
        2 * t,
    ):
        assert same.groupby("region").sizes == {"p": 2, "q": 1}
    assert t.sel(lat=[30, 20]).groupby("region").sizes == {"p": 1, "q": 1}
    assert t[:, torch.tensor([True, False, True])].groupby("region").sizes == {"p": 2}
    assert t[:, 1:].groupby(lat="region").sum().names == ("time", "region", "n")
    # Coordinates of positional axes follow masks and slices; NaN is in no group.
    assert t[..., ::3].groupby("depth").sizes == {1.0: 1}
    assert t[..., torch.tensor([False, True, True, False])].groupby("depth").sizes == {2.0: 1, 3.0: 1}
    assert t.relabel(lat=[1, 2, 3]).groupby("region").sizes == {"p": 2, "q": 1}
    # Coordinates that are no longer valid are dropped: after sorting, and where operands differ.
    other = mo.from_xarray(array.assign_coords(region=("lat", ["q", "q", "q"])))
    for changed in (t.sort("lat").values, t + other, t.sum("lat"), t.groupby("region").sum()):
        with pytest.raises(KeyError, match="no axis or coordinate"):
            changed.mean("time").groupby("region" if "region" not in changed.names else "lat")
    assert (t + other).groupby("depth").sizes == t.groupby("depth").sizes
    again = pickle.loads(pickle.dumps(t.mean("time")))
    assert again._axes is t.mean("time")._axes
    assert t.mean("time").to_xarray().identical(array.mean("time", keep_attrs=False))


def test_minimize_explains_how_to_mask_missing_residuals():
    x = mo.tensor([0.0, 1.0, 2.0, 3.0], site=list("abcd"), dtype=torch.float64)
    y = mo.tensor([1.0, NAN, 5.0, 7.0], site=list("abcd"), dtype=torch.float64)

    def residuals(p):
        return p["slope"] * x + p["start"] - y

    start = {"slope": torch.zeros((), dtype=torch.float64), "start": torch.zeros((), dtype=torch.float64)}
    for options in ({}, {"method": "gauss-newton"}):
        assert "1 of 4 residuals are NaN. nan='mask' leaves them out" in mo.minimize(residuals, start, **options).reason
    fit = mo.minimize(residuals, start, nan="mask")
    assert float(fit.x["slope"]) == pytest.approx(2.0)
    dropped = y.dropna("site")
    short = mo.minimize(lambda p: p["slope"] * x.sel(site=dropped.dims[0]) + p["start"] - dropped, start)
    assert float(short.x["start"]) == pytest.approx(float(fit.x["start"]))


def test_groups_with_labels_are_paired_by_label():
    pd, xr = pytest.importorskip("pandas"), pytest.importorskip("xarray")
    t = mo.tensor([1.0, 2.0, 4.0], site=["a", "b", "c"])
    series = pd.Series(["y", "x", "x"], index=["c", "b", "a"])
    array = xr.DataArray(["y", "x", "x"], dims="site", coords={"site": ["c", "b", "a"]})
    for groups in (series, array):
        assert t.groupby(site=groups).sum().sel(site="x").item() == 3.0
    for groups in (series.reset_index(drop=True), array.drop_vars("site")):  # by position
        assert t.groupby(site=groups).sum().sel(site="y").item() == 1.0
    days = mo.tensor([1.0, 2.0], time=np.array(["2000-01-01", "2000-01-02"], "M8[ns]"))
    assert days.groupby(time={pd.Timestamp("2000-01-01"): "p", pd.Timestamp("2000-01-02"): "q"}).sizes == {
        "p": 1,
        "q": 1,
    }


def test_keys_that_are_not_one_coordinate_of_one_axis_are_refused_with_a_remedy():
    t = mo.zeros(x=["a", "b"], y=["c", "d"]).assign_coords(cell=(("x", "y"), [[0, 1], [1, 0]]))
    with pytest.raises(TypeError, match="takes one key"):
        t.groupby(["x", "y"])
    with pytest.raises(KeyError, match=r"along 2 axes.*t\.stack"):
        t.groupby("cell")
    assert t.stack(all="x y").groupby("cell").count().tolist() == [2, 2]
    with pytest.raises(TypeError, match=r"amax\(\['x', 'y'\]\)"):
        t.max(["x", "y"])
    with pytest.raises(TypeError, match="no order"):
        t.to(torch.complex64).groupby(x=[1, 2]).max()


def test_coordinates_are_used_as_masks_and_weights():
    t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], lat=[-30.0, 60.0], lon=None).assign_coords(
        area=(("lon", "lat"), np.array([[1, 2], [3, 4]])), name=("lat", ["s", "n"])
    )
    assert t.where(t.coordinate("lat") > 0, drop=True).tolist() == [[3.0, 4.0]]
    assert (t * t.coordinate("area")).tolist() == [[1.0, 6.0], [6.0, 16.0]]
    assert t.coordinate("lat").dtype == torch.float32
    assert t.double().coordinate("lat").dtype == torch.float64
    assert t.coordinate("area").dtype == torch.int64
    assert t.coordinate("lon").tolist() == [0, 1]
    with pytest.raises(TypeError, match="no numbers"):
        t.coordinate("name")


def test_components_of_date_coordinates_are_groups():
    days = np.arange("2000-01-30", "2000-02-03", dtype="M8[D]")
    t = mo.tensor([1.0, 2.0, 3.0, 4.0], time=days).assign_coords(valid=("time", days + np.timedelta64(30, "D")))
    assert t.groupby("valid.month").sum().tolist() == [1.0, 9.0]
    assert t.coordinate("valid.month").tolist() == [2, 3, 3, 3]
    with pytest.raises(KeyError, match=r"values of 'valid'.*components are year"):
        t.groupby("valid.moon")
    with pytest.raises(KeyError, match="further coordinate"):
        t.sel(valid=days[0])
    nothing = t.isel(time=[])
    assert nothing.groupby("time.month").mean().shape == nothing.resample(time="ME").mean().shape == (0,)


def test_combining_an_array_of_xarray_with_a_tensor_raises():
    array = pytest.importorskip("xarray").DataArray([1.0, 2.0], dims="x", coords={"x": ["a", "b"]})
    t = mo.from_xarray(array)
    for combine in (lambda: array + t, lambda: t + array, lambda: array * t):
        with pytest.raises(TypeError, match="mo.from_xarray"):
            combine()
