"""Every operation on dates, gaps, groups and labels: compiled, under vmap, differentiated, and in every dtype."""

import numpy as np
import pytest
import torch

import moduli as mo

NAN = float("nan")
DAYS = np.arange("1990-01-27", "1990-02-06", dtype="datetime64[D]")
DIMS = (mo.Space(DAYS, "time"), mo.Space(list("abc"), "site"))


def draw() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(len(DAYS), 3, dtype=torch.float64, generator=generator)
    # Neighbouring values differ and none is 0, because extremes, masks and deviations have no derivative there.
    return data.where(torch.rand(data.shape, generator=generator) > 0.15, NAN)


DATA = draw()


def label(data: torch.Tensor) -> mo.Tensor:
    t = mo.Tensor(data, DIMS).assign_coords(region=("site", ["n", "z", "n"]))
    return t.assign_coords(height=("time", np.arange(10.0)))


def write(t):
    t = t.clone()
    t.loc["1990-02", "b"] = 1.0
    t.loc[{"site": ["c", "a"], "time": "1990-01-28"}] = t.isel(time=0, site=[0, 2]) * 2
    t[{"time": 3}] = t.isel(time=1)
    return t


REDUCTIONS = ("mean", "sum", "min", "max", "var", "std", "first", "last")
OPERATIONS = {
    "sel": lambda t: t.sel(time="1990-02-01"),
    "sel a period": lambda t: t.sel(time="1990-02"),
    "sel a slice": lambda t: t.sel(time=slice("1990-01-29", "1990-02")),
    "nearest": lambda t: t.sel(time="1990-01-30T13:00", method="nearest"),
    "interp": lambda t: t.interp(time=["1990-01-30T13:00", "1990-02-03T01:00"]),
    "groupby month": lambda t: t.groupby("time.month").mean(skipna=True),
    **{f"groups {how}": lambda t, how=how: getattr(t.groupby("region"), how)(skipna=True) for how in REDUCTIONS},
    "groups quantile": lambda t: t.groupby("region").quantile([0.3, 0.5], skipna=True),
    "groups count": lambda t: t.groupby("region").count(),
    "bins": lambda t: t.groupby("height", bins=[0, 4, 6, 100]).mean(skipna=True),
    "function": lambda t: t.groupby(site=lambda name: name < "b").sum(skipna=True),
    "mapping": lambda t: t.groupby(site={"a": 1, "b": 2, "c": 1}).var(skipna=True),
    "map": lambda t: t.groupby("region").map(lambda part: part.sum("site", skipna=True)),
    "map entries": lambda t: t.groupby("time.month").apply(lambda part: part - part.mean("time", skipna=True)),
    "minus groups": lambda t: t.groupby("time.month") - t.groupby("time.month").mean(skipna=True),
    "resample": lambda t: t.resample(time="W-WED").std(skipna=True),
    "diff": lambda t: t.diff("time"),
    "shift": lambda t: t.shift(time=2),
    **{
        f"rolling {how}": lambda t, how=how: getattr(t.rolling(time=3, min_periods=1), how)()
        for how in ("mean", "sum", "min", "max", "var", "count")
    },
    **{how: lambda t, how=how: getattr(t, how)("time", skipna=True) for how in ("mean", "sum", "var", "amin", "amax")},
    "max": lambda t: t.max("time", skipna=True).values,
    "quantile": lambda t: t.quantile([0.3, 0.4], "time", skipna=True),
    "count": lambda t: t.count("time"),
    "fillna": lambda t: t.fillna(0.0),
    "isnull": lambda t: t.isnull(),
    "where": lambda t: t.where(t.real > 0),
    "mask": lambda t: t.where(t.coordinate("time.month") > 1),
    "weights": lambda t: t * t.coordinate("height"),
    "interpolate_na": lambda t: t.interpolate_na("time"),
    "ffill": lambda t: t.ffill("time"),
    "bfill": lambda t: t.bfill("time", limit=1),
    "reindex": lambda t: t.reindex(time=["1990-02-01", "1991-02-01"]),
    "reindex near": lambda t: t.reindex(time=["1990-02-01T07:00"], method="nearest"),
    "align": lambda t: mo.align(t, t.isel(time=[1, 2]), join="outer")[1],
    "join": lambda t: mo.add(t.isel(site=[0, 1]), t.isel(site=[1, 2]), join="outer"),
    "stack": lambda t: t.stack(all="time site"),
    "unstack": lambda t: t.stack(all="time site").unstack("all"),
    "assign_coords": lambda t: t.assign_coords(site=list("xyz")),
    "rename": lambda t: t.rename(site="place", region="part"),
    "loc": lambda t: t.loc["1990-02", "b"],
    "write": write,
}
NO_ORDER = ("min", "max", "quantile", "amin", "amax")


def weigh(t):
    """Return a weighted sum of all entries that are not NaN."""
    weights = torch.linspace(1, 2, t.numel(), dtype=torch.float64).reshape(t.shape)
    return (t.data.where(t.data == t.data, 0.0) * weights).sum()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.compiles_labels
def test_operations_compile_map_and_differentiate(name):
    function, t = OPERATIONS[name], label(DATA)
    expected = function(t)
    compiled = torch.compile(function, fullgraph=True, backend="eager")(t)
    assert compiled._axes is expected._axes
    torch.testing.assert_close(compiled.data, expected.data, equal_nan=True)

    several = [t, t * 2, t * 3]
    mapped = mo.vmap(function, over="run")(mo.stack(several, "run"))
    one_by_one = mo.stack([function(each) for each in several], "run")
    assert mapped.dims == one_by_one.dims
    torch.testing.assert_close(mapped.data, one_by_one.data, equal_nan=True)

    if expected.dtype.is_floating_point:
        present = DATA == DATA

        def of_entries(entries):
            return weigh(function(label(DATA.masked_scatter(present, entries))))

        entries = DATA[present].requires_grad_()
        assert torch.autograd.gradcheck(of_entries, entries)
        gradient = torch.func.grad(lambda data: weigh(function(label(data))))(DATA)
        assert (gradient[~present] == 0).all()  # never NaN


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_work_in_half_precision_and_complex(name):
    function, expected = OPERATIONS[name], OPERATIONS[name](label(DATA))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rounded = function(label(DATA.to(dtype).double()))  # selections by value depend on the rounded numbers
        result = function(label(DATA.to(dtype)))
        if name == "weights":  # coordinates are read in single precision
            result = result.to(dtype)
        assert result.dtype in ((torch.bool, torch.int64) if not expected.dtype.is_floating_point else (dtype,)), name
        tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(
            result.data.double(), rounded.data.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if any(word in name.split() for word in NO_ORDER):
        with pytest.raises((TypeError, RuntimeError), match=r"no order|not implemented|complex"):
            function(label(DATA.to(torch.complex128)))
        return
    result = function(label(DATA.to(torch.complex128)))
    torch.testing.assert_close(result.data.real.double(), expected.data.double(), equal_nan=True)
