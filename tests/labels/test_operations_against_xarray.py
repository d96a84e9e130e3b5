"""Random operations on arrays with dates, numbers and names, compared with xarray."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moduli as mo

xr = pytest.importorskip("xarray")
pd = pytest.importorskip("pandas")

Array = Any
UNITS = ("D", "h", "s", "us", "ns")
SITES = np.array(["oslo", "rome", "cairo", "lima", "perth", "quito", "turin"])


def draw_times(rng: np.random.Generator, size: int) -> Array:
    """Draw distinct dates of one resolution, descending in one of seven cases."""
    unit = UNITS[rng.integers(len(UNITS))]
    step = rng.choice([1, 5, 11])
    start = np.datetime64("1989-11-20", "D") + rng.integers(400)
    picks = np.sort(rng.choice(size * 4, size, replace=False)) * step
    times = start.astype("M8[ns]") + (picks * np.timedelta64(1, "D" if unit == "D" else "h")).astype("m8[ns]")
    if unit in ("us", "ns"):
        times = times + rng.integers(10**6) * np.timedelta64(1000, "ns")
    return times[::-1] if rng.random() < 0.15 else times


def draw_array(rng: np.random.Generator) -> Array:
    size = int(rng.integers(2, 14))
    coords: dict[str, Array] = {"time": draw_times(rng, size)}
    if rng.random() < 0.5:
        coords["x"] = np.sort(rng.choice(40, 4, replace=False)) * rng.choice([1, 0.25])
    if rng.random() < 0.5:
        coords["site"] = rng.permutation(SITES)[:3]
    names = list(rng.permutation(list(coords)))
    values = rng.standard_normal([len(coords[name]) for name in names])
    values[rng.random(values.shape) < 0.15] = np.nan
    return xr.DataArray(values, dims=names, coords={name: coords[name] for name in names})


def text_of(rng: np.random.Generator, date: np.datetime64) -> Array:
    """Return a date in one of the types that `sel` accepts."""
    forms: list[Callable[[], Any]] = [
        lambda: date,
        lambda: date.astype("M8[us]") if date == date.astype("M8[us]") else date,
        lambda: pd.Timestamp(date),
        lambda: pd.Timestamp(date).to_pydatetime(warn=False) if pd.Timestamp(date).nanosecond == 0 else date,
        lambda: str(date),
    ]
    return forms[rng.integers(len(forms))]()


def pick(rng: np.random.Generator, array: Array, name: str, count: int) -> Array:
    return rng.choice(array[name].values, min(count, array.sizes[name]), replace=False)


def numbers_axis(rng: np.random.Generator, array: Array) -> str:
    return str(rng.choice([name for name in array.dims if name != "site"]))


def any_axis(rng: np.random.Generator, array: Array) -> str:
    return str(rng.choice(list(array.dims)))


def select_one(rng: np.random.Generator, array: Array) -> Array:
    wanted = {name: pick(rng, array, name, 1)[0] for name in array.dims if rng.random() < 0.7}
    ours = {name: text_of(rng, label) if name == "time" else label for name, label in wanted.items()}
    return lambda t: t.sel(ours), lambda a: a.sel(wanted)


def select_several(rng: np.random.Generator, array: Array) -> Array:
    name = any_axis(rng, array)
    labels = pick(rng, array, name, 3)
    key = labels if rng.random() < 0.5 else [text_of(rng, label) if name == "time" else label for label in labels]
    return lambda t: t.sel({name: key}), lambda a: a.sel({name: labels})


def select_period(rng: np.random.Generator, array: Array) -> Array:
    text = str(pick(rng, array, "time", 1)[0])[: rng.choice([4, 7, 10, 13])]
    return lambda t: t.sel(time=text), lambda a: a.sel(time=text)


def select_slice(rng: np.random.Generator, array: Array) -> Array:
    first, last = sorted(pick(rng, array, "time", 2))[0], sorted(pick(rng, array, "time", 2))[-1]
    ends = [str(each)[: rng.choice([4, 7, 10, 29])] if rng.random() < 0.6 else each for each in (first, last)]
    part = slice(*(None if rng.random() < 0.1 else end for end in ends))
    if array.time.values[0] < array.time.values[-1]:
        return lambda t: t.sel(time=part), lambda a: a.sel(time=part)
    # xarray does not slice descending dates by text.
    down = slice(part.stop, part.start)
    return lambda t: t.sel(time=down), lambda a: a.sortby("time").sel(time=part).isel(time=slice(None, None, -1))


def select_near(rng: np.random.Generator, array: Array) -> Array:
    name = numbers_axis(rng, array)
    array = array.sortby(name)
    method = str(rng.choice(["nearest", "pad", "backfill"]))
    inside = np.sort(pick(rng, array, name, 2))
    middle = inside[0] + (inside[-1] - inside[0]) // 3 + (np.timedelta64(7, "m") if name == "time" else 0.1)
    if method == "backfill" and middle > array[name].values[-1]:
        middle = inside[0]
    return lambda t: t.sel({name: middle}, method=method), lambda a: a.sortby(name).sel({name: middle}, method=method)


def interpolate(rng: np.random.Generator, array: Array) -> Array:
    name = numbers_axis(rng, array)
    low, high = array[name].values.min(), array[name].values.max()
    points = low + (high - low) * np.array([0, 2, 3, 5]) // 5 if name == "time" else np.linspace(low, high, 4)
    if len(set(points.tolist())) < 4:
        points = points[:1]
    # At a label itself moduli ignores missing neighbours, and xarray does not.
    return lambda t: t.fillna(0.0).interp({name: points}), lambda a: a.fillna(0.0).interp({name: points})


def reindex(rng: np.random.Generator, array: Array) -> Array:
    name = numbers_axis(rng, array)
    labels = array[name].values
    new = np.unique(np.concatenate([pick(rng, array, name, 3), labels[:2] + (labels[-1] - labels[0]) // 7]))
    method = [None, "nearest", "pad", "backfill"][rng.integers(4)]
    limit = [None, (np.timedelta64(3, "h") if name == "time" else 0.5)][rng.integers(2)] if method else None
    new = rng.permutation(new)
    ours = lambda t: t.reindex({name: new}, method=method, tolerance=limit)  # noqa: E731
    return ours, lambda a: a.sortby(name).reindex({name: new}, method=method, tolerance=limit)


def align_two(rng: np.random.Generator, array: Array) -> Array:
    other = array.isel({name: slice(1, None) for name in array.dims if rng.random() < 0.6})
    how = str(rng.choice(["inner", "outer", "left", "right"]))
    number = int(rng.integers(2))

    def ours(t: mo.Tensor) -> mo.Tensor:
        result = mo.align(t, mo.from_xarray(other), join=how)[number]
        theirs = xr.align(array, other, join=how)[number]
        assert all(set(space.labels) == set(mo.from_xarray(theirs).sel({}).coords[space.name]) for space in result.dims)
        return result.reindex_like(mo.from_xarray(theirs))  # xarray sorts the labels of an outer join

    return ours, lambda a: xr.align(a, other, join=how)[number]


def take_differences(rng: np.random.Generator, array: Array) -> Array:
    name, n = any_axis(rng, array), int(rng.integers(3))
    label = str(rng.choice(["upper", "lower"])) if n < 2 else "upper"  # xarray applies it only to the first difference
    return lambda t: t.diff(name, n, label=label), lambda a: a.diff(name, n, label=label) if n else a


def shift(rng: np.random.Generator, array: Array) -> Array:
    shifts = {name: int(rng.integers(-4, 5)) for name in array.dims if rng.random() < 0.7}
    fill = [None, 0.5][rng.integers(2)]
    return lambda t: t.shift(shifts, fill=fill), lambda a: a.shift(shifts, fill_value=np.nan if fill is None else fill)


def roll(rng: np.random.Generator, array: Array) -> Array:
    name = any_axis(rng, array)
    size = int(rng.integers(1, array.sizes[name] + 1))
    options = {"center": bool(rng.integers(2)), "min_periods": [None, 1, size][rng.integers(3)]}
    how = str(rng.choice(["mean", "sum", "min", "max", "std", "var", "count"]))
    spread = {"correction": 0} if how in ("std", "var") else {}
    ours = lambda t: getattr(t.rolling({name: size}, **options), how)(**spread)  # noqa: E731
    if how == "count":  # moduli also counts where there are too few entries
        return ours, lambda a: a.rolling({name: size}, **{**options, "min_periods": 1}).count().fillna(0)
    return ours, lambda a: getattr(a.rolling({name: size}, **options), how)()


def resample(rng: np.random.Generator, array: Array) -> Array:
    rule = str(
        rng.choice(
            ["ME", "MS", "QE", "QS", "YE", "YS", "W", "D", "3D", "12h", "2MS", "2ME", "3h", "2W", "90min"]
            + ["QS-DEC", "QE-NOV", "YE-JUN", "YS-JUL", "W-MON", "W-THU", "2QS-FEB", "2W-SAT"]
        )
    )
    how = str(rng.choice(["mean", "sum", "min", "max", "count"]))
    skip = {} if how == "count" else {"skipna": True}
    ours = lambda t: getattr(t.resample(time=rule), how)(**skip)  # noqa: E731
    # Empty sums and counts are 0 in moduli and pandas, and NaN in xarray.
    fill = {"sum": lambda a: a.fillna(0), "count": lambda a: a.fillna(0)}.get(how, lambda a: a)
    return ours, lambda a: fill(getattr(a.sortby("time").resample(time=rule), how)())


def group_by_component(rng: np.random.Generator, array: Array) -> Array:
    key = "time." + str(rng.choice(["month", "year", "season", "dayofyear", "hour", "quarter", "day", "dayofweek"]))
    return lambda t: t.groupby(key).mean(skipna=True), lambda a: a.groupby(key).mean()


def stack_and_unstack(rng: np.random.Generator, array: Array) -> Array:
    if array.ndim == 1:
        return lambda t: t, lambda a: a
    names = [str(name) for name in array.dims]
    mask = rng.random(int(np.prod(list(array.sizes.values())))) < 0.7
    mask[0] = True

    def ours(t: mo.Tensor) -> mo.Tensor:
        stacked = t.stack(all=" ".join(names))
        part = stacked.isel(all=np.flatnonzero(mask).tolist()).unstack("all")
        return part.reindex({name: np.sort(part.coords[name]) for name in names})

    def theirs(a: Array) -> Array:
        whole = a.stack(all=names).isel(all=mask).unstack("all")
        return whole.sortby(names).transpose(*names)

    return ours, theirs


OPERATIONS = {
    function.__name__: function
    for function in (
        *(select_one, select_several, select_period, select_slice, select_near, interpolate, reindex, align_two),
        *(take_differences, shift, roll, resample, group_by_component, stack_and_unstack),
    )
}


def compare(ours: Array, theirs: Array) -> None:
    assert ours.names == theirs.dims
    for space, name in zip(ours.dims, theirs.dims, strict=True):
        if name in theirs.indexes:
            assert space == mo.Space(theirs[name].values, name), (space, theirs[name].values)
    np.testing.assert_allclose(ours.data.numpy(), theirs.values, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # NumPy warns of empty means, pandas of deprecated names
@pytest.mark.parametrize("operation", OPERATIONS)
def test_random_operations_equal_those_of_xarray(operation: str, pytestconfig: pytest.Config) -> None:
    rng = np.random.default_rng(list(operation.encode()))
    rounds = 250 if pytestconfig.getoption("--all") else 40
    outcomes = [run(operation, rng) for _ in range(rounds)]
    assert sum(outcomes) > 0.6 * rounds


def run(operation: str, rng: np.random.Generator) -> bool:
    """Compare one random operation; return False if both libraries refuse it."""
    array = draw_array(rng)
    ours, theirs = OPERATIONS[operation](rng, array)
    try:
        expected = theirs(array)
    except (KeyError, ValueError):
        if operation not in ("select_period", "select_near", "reindex"):
            raise
        expected = None
    if expected is None or (operation == "select_period" and not expected.sizes.get("time", 1)):
        with pytest.raises((KeyError, ValueError)):
            ours(mo.from_xarray(array))
        return False
    compare(ours(mo.from_xarray(array)), expected)
    return True
