"""Missing values and groups compared with xarray: chains of random operations, compared in axes, labels and values."""

import itertools
import warnings

import numpy as np
import pytest
import torch

import moduli as mo

xr = pytest.importorskip("xarray")

OPERATIONS = 450  # 2,500 with --all
LONGEST = 6
MONTHS = np.arange("1999-06", "2001-06", dtype="datetime64[M]").astype("datetime64[ns]")


class Pair:
    """An equal tensor and xarray array, and the random generator that chooses operations."""

    def __init__(self, rng, array):
        self.rng, self.array, self.tensor = rng, array, mo.from_xarray(array)

    def pick(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def dim(self):
        return self.pick(self.array.dims)

    def some_dims(self):
        return [dim for dim in self.array.dims if self.rng.random() < 0.5] or [self.dim()]


def draw_array(rng):
    spaces = {
        "time": np.sort(rng.choice(MONTHS, int(rng.integers(2, 9)), replace=False)),
        "lat": np.sort(rng.choice(np.arange(-60.0, 90.0, 15.0), int(rng.integers(1, 6)), replace=False)),
        "site": rng.permutation(list("abcdef"))[: int(rng.integers(1, 5))],
    }
    dims = [dim for dim in rng.permutation(list(spaces)) if rng.random() < 0.75] or ["time"]
    values = rng.normal(size=[len(spaces[dim]) for dim in dims]).round(3)
    values[rng.random(values.shape) < rng.choice([0.0, 0.2, 0.7])] = np.nan
    along = str(rng.choice(dims))
    coords = {dim: spaces[dim] for dim in dims}
    coords["region"] = (along, rng.choice(["n", "s", "t"], len(spaces[along])))
    return xr.DataArray(values, dims=[str(dim) for dim in dims], coords=coords)


# -- operations: each returns the results of both libraries ------------------------------------------------------------


def reduce_axes(pair):
    name, dims = pair.pick(["mean", "sum", "min", "max", "var", "std", "count"]), pair.some_dims()
    skip, ddof = bool(pair.rng.random() < 0.7), int(pair.rng.integers(2))
    theirs = {} if name == "count" else {"skipna": skip}
    ours = dict(theirs)
    if name in ("var", "std"):
        theirs["ddof"] = ours["correction"] = ddof
    called = {"min": "amin", "max": "amax"}.get(name, name)
    return getattr(pair.tensor, called)(dims, **ours), getattr(pair.array, name)(dims, **theirs)


def take_quantiles(pair):
    q, dims, skip = pair.pick([0.3, [0.0, 0.5, 0.9]]), pair.some_dims(), bool(pair.rng.random() < 0.7)
    how = pair.pick(["linear", "lower", "higher", "midpoint", "nearest"])
    if "quantile" in pair.array.coords or "quantile" in pair.array.dims:
        return None
    return (
        pair.tensor.quantile(q, dims, interpolation=how, skipna=skip),
        pair.array.quantile(q, dims, method=how, skipna=skip).drop_vars("quantile" if isinstance(q, float) else []),
    )


def drop_gaps(pair):
    dim, how = pair.dim(), pair.pick(["any", "all"])
    if pair.rng.random() < 0.3:
        return pair.tensor.dropna(dim, thresh=2), pair.array.dropna(dim, thresh=2)
    return pair.tensor.dropna(dim, how), pair.array.dropna(dim, how=how)


def fill_gaps(pair):
    value = pair.pick([0.0, pair.array.mean(pair.dim()), pair.array * 0 + 3])
    return pair.tensor.fillna(mo.from_xarray(value) if isinstance(value, xr.DataArray) else value), pair.array.fillna(
        value
    )


def keep_some(pair):
    cond = pair.array.isel({pair.dim(): 0}, drop=True) > 0 if pair.rng.random() < 0.4 else pair.array > 0
    drop, other = bool(pair.rng.random() < 0.5), pair.pick([None, 7.0])
    if drop:
        return pair.tensor.where(mo.from_xarray(cond), drop=True), pair.array.where(cond, drop=True)
    theirs = pair.array.where(cond) if other is None else pair.array.where(cond, other)
    return pair.tensor.where(mo.from_xarray(cond), other), theirs


def bridge_gaps(pair):
    numeric = [dim for dim in pair.array.dims if dim in ("time", "lat", "quantile", "month")]
    if not numeric:
        return None
    dim, limit, labels = pair.pick(numeric), pair.pick([None, 1, 2]), bool(pair.rng.random() < 0.6)
    if not pair.array.indexes[dim].is_monotonic_increasing:
        return None
    method = pair.pick(["linear", "nearest"])
    return (
        pair.tensor.interpolate_na(dim, method, limit=limit, use_coordinate=labels),
        pair.array.interpolate_na(dim, method, limit=limit, use_coordinate=labels),
    )


def select(pair):
    dim = pair.dim()
    size = pair.array.sizes[dim]
    key = pair.pick([slice(1, None), slice(None, None, 2), pair.rng.permutation(size)[: size // 2 + 1]])
    ours = {dim: key.tolist() if isinstance(key, np.ndarray) else key}
    return pair.tensor.isel(ours), pair.array.isel({dim: key})


def join_shifted(pair):
    dim, how = pair.dim(), pair.pick(["outer", "inner", "left"])
    other = pair.array.isel({dim: slice(int(pair.rng.integers(2)), None)}).isel({dim: slice(None, None, -1)}) * 2
    one = pair.array.isel({dim: slice(0, max(1, pair.array.sizes[dim] - 1))})
    function = pair.pick([lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b])
    with mo.join(how), xr.set_options(arithmetic_join=how):
        return function(mo.from_xarray(one), mo.from_xarray(other)), function(one, other)


def find_groups(pair):
    """Return equal groups in both libraries and their name, or None."""
    choices = []
    if "region" in pair.array.coords and pair.array.coords["region"].ndim == 1:
        choices.append(lambda: (pair.tensor.groupby("region"), pair.array.groupby("region"), "region"))
    if "time" in pair.array.dims and pair.array.sizes["time"]:
        for part in ("month", "season", "year"):
            choices.append(lambda p=part: (pair.tensor.groupby(f"time.{p}"), pair.array.groupby(f"time.{p}"), p))
    edges = [-90.0, -30.0, 15.0, 45.0]
    if "lat" in pair.array.dims and (pair.array.lat <= edges[-1]).any():
        choices.append(
            lambda: (pair.tensor.groupby("lat", bins=edges), pair.array.groupby_bins("lat", edges), "lat_bins"),
        )
    return pair.pick(choices)() if choices and all(pair.array.shape) else None


def reduce_groups(pair):
    groups = find_groups(pair)
    if groups is None:
        return None
    ours, theirs, name = groups
    how = pair.pick(["mean", "sum", "min", "max", "var", "std", "count", "first", "last", "quantile"])
    options = {} if how == "count" else {"skipna": True}
    more = {"correction": 0} if how in ("var", "std") else {}
    arguments = (0.4,) if how == "quantile" else ()
    if 0 in ours.sizes.values() or not len(ours):
        return None  # xarray returns NaN for an empty sum
    if how == "quantile" and "quantile" in pair.array.dims:
        return None  # xarray refuses it
    result = getattr(theirs, how)(*arguments, **options)
    if name == "lat_bins":
        result = result.assign_coords(lat_bins=np.arange(result.sizes["lat_bins"])).rename(lat_bins="lat")
    grouped = getattr(ours, how)(*arguments, **options, **more)
    if name == "lat_bins":
        grouped = grouped.relabel(lat=range(len(ours)))
    return grouped, result.drop_vars("quantile") if how == "quantile" else result


def subtract_groups(pair):
    groups = find_groups(pair)
    if groups is None or groups[2] == "lat_bins":
        return None
    ours, theirs, name = groups
    return ours - ours.mean(skipna=True), (theirs - theirs.mean()).drop_vars(name if name != "region" else [])


def write(pair):
    dim = pair.dim()
    chosen = pair.array.coords[dim].values[: pair.array.sizes[dim] // 2 + 1][::-1]
    ours, theirs = pair.tensor.clone(), pair.array.copy()
    value = theirs.loc[{dim: chosen}] * 10
    ours.loc[{dim: list(chosen)}] = mo.from_xarray(value.isel({dim: slice(None, None, -1)}))
    theirs.loc[{dim: chosen}] = value
    return ours, theirs


STEPS = [
    *(reduce_axes, take_quantiles, drop_gaps, fill_gaps, keep_some, bridge_gaps, select, join_shifted, reduce_groups),
    *(reduce_groups, reduce_groups, subtract_groups, write),
]


def compare(ours, theirs):
    assert isinstance(ours, mo.Tensor)
    assert set(ours.names) == set(theirs.dims)
    expected = mo.from_xarray(theirs)
    torch.testing.assert_close(ours.align_to(expected.dims).data.double(), expected.data.double(), equal_nan=True)
    if ours._axes.find_coordinate("region") is not None and "region" in theirs.coords:
        region = ours.to_xarray().coords["region"]
        assert region.variable.identical(theirs.coords["region"].variable)


def test_random_operations_equal_those_of_xarray(request):
    wanted = 2500 if request.config.getoption("--all") else OPERATIONS
    done = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of empty means
        for seed in itertools.count():
            rng = np.random.default_rng(seed)
            pair = Pair(rng, draw_array(rng))
            for _ in range(LONGEST):
                step = pair.pick(STEPS)
                result = step(pair)
                if result is None:
                    continue
                ours, theirs = result
                try:
                    compare(ours, theirs)
                except AssertionError as error:
                    raise AssertionError(
                        f"{step.__name__} after seed {seed} of {pair.array}: {ours} is not {theirs}"
                    ) from error
                done += 1
                if not theirs.ndim or not theirs.size:
                    break
                pair = Pair(rng, theirs.astype(float).transpose(*ours.names))
            if done >= wanted:
                return
