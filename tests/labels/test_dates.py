"""Dates as labels: one label for each instant of any type and unit, and selection, windows and bins with gradients."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import moduli as mo
from moduli.labels import Space, Tensor
from moduli.labels._dates import datetime_component
from moduli.labels._instants import canonical_dates, rescale

UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps")
DAYS = np.arange("2000-01-01", "2000-03-01", dtype="datetime64[D]")


def daily() -> Tensor:
    return mo.tensor(torch.arange(60.0, dtype=torch.float64), time=DAYS)


# -- labels ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-400, 400), min_size=1, max_size=6, unique=True), st.sampled_from(UNITS), st.data())
def test_dates_are_equal_in_every_unit(counts: list[int], unit: str, data: st.DataObject) -> None:
    dates = np.array(counts, f"M8[{unit}]")
    finer = UNITS[data.draw(st.integers(UNITS.index(unit), len(UNITS) - 1))]
    try:
        other = dates.astype(f"M8[{finer}]")
    except OverflowError:
        return
    # Years and months begin within weeks, so weeks are not finer.
    assume(finer != "W" or unit == "W")
    space, other_space = Space(dates, "t"), Space(other, "t")
    assert space == other_space
    assert hash(space) == hash(other_space)
    assert space.labels == other_space.labels
    assert all(isinstance(label, np.datetime64) for label in space)
    assert [other_space.index(date) for date in dates] == list(range(len(counts)))
    assert other_space.locate(Space(dates[::-1])).tolist() == list(range(len(counts)))[::-1]
    assert space[::2] == Space(dates[::2], "t")
    assert pickle.loads(pickle.dumps(space)) == space


@given(st.lists(st.integers(-(2**62), 2**62), max_size=5), st.sampled_from(UNITS[3:]), st.sampled_from(UNITS[3:]))
def test_rescaling_is_exact_or_marked_as_inexact(counts: list[int], unit: str, to: str) -> None:
    seconds = {"D": 86400, "h": 3600, "m": 60, "s": 1}
    length = {each: seconds[each] * 10**12 if each in seconds else 10 ** (12 - 3 * at) for at, each in _small()}
    try:
        dates = canonical_dates(np.array(counts, f"m8[{unit}]"))
    except ValueError:  # too large for a number of seconds
        assert any(abs(count) * length[unit] >= 2**63 * length["s"] for count in counts)
        return
    target = canonical_dates(np.array([1], f"m8[{to}]")).dtype
    base = np.datetime_data(target)[0]
    converted, exact = rescale(dates, target)
    for count, number, fits in zip(counts, converted.view(np.int64).tolist(), exact.tolist(), strict=True):
        whole, rest = divmod(count * length[unit], length[base])
        assert fits == (not rest and abs(whole) < 2**63)
        assert not fits or number == whole


def _small() -> list[tuple[int, str]]:
    return [*((0, unit) for unit in ("D", "h", "m", "s")), *enumerate(("ms", "us", "ns", "ps"), 1)]


def test_dates_of_all_types_are_one_label() -> None:
    pandas = pytest.importorskip("pandas")
    day = datetime.date(2000, 1, 2)
    forms = [
        day,
        datetime.datetime(2000, 1, 2),
        np.datetime64("2000-01-02"),
        np.datetime64("2000-01-02", "ns"),
        pandas.Timestamp("2000-01-02"),
    ]
    assert len({Space([form]) for form in forms}) == 1
    assert [daily().sel(time=form).item() for form in [*forms, "2000-01-02", np.array(forms[3])]] == [1.0] * 7
    index = pandas.date_range("2000-01-01", periods=60)
    assert Space(index) == Space(DAYS) == Space(list(index)) == Space(DAYS.tolist())
    assert Space(["a", day, ("b", day)]).index(("b", forms[4])) == 2
    fine = pandas.Timestamp("2000-01-02 00:00:00.000000001")
    assert fine not in Space(DAYS)
    assert Space([forms[0], fine]).labels == (forms[2], fine.to_datetime64())


@pytest.mark.parametrize("kind", ["datetime64", "timedelta64"])
@pytest.mark.parametrize("unit", ["D", "s", "ns"])
def test_dates_are_not_equal_to_integers(kind: str, unit: str) -> None:
    space = Space(np.array([1, 2, 5], f"{kind}[{unit}]"), "x")
    numbers = Space([1, 2, 5], "x")
    assert space != numbers
    assert not space.has_labels_of(numbers)
    assert not numbers.has_labels_of(space)
    assert 1 not in space
    assert space[0] not in numbers
    assert space[0] not in Space(range(10))
    assert space[0] not in Space([1, "a"])
    with pytest.raises(ValueError, match="labels of axis 'x' differ"):
        mo.zeros(space) + mo.zeros(numbers)
    for refused in (lambda: mo.zeros(9)[space[0]], lambda: mo.zeros(space[0]), lambda: Space(space[0])):
        with pytest.raises(TypeError):
            refused()


@pytest.mark.filterwarnings("ignore:The .generic. unit:DeprecationWarning")  # NumPy 2.5
def test_durations_of_exact_length_are_equal_and_months_are_not() -> None:
    space = Space([datetime.timedelta(hours=36), np.timedelta64(1, "D")], "lead")
    assert space.labels == (np.timedelta64(36, "h"), np.timedelta64(1, "D"))
    assert mo.tensor([1.0, 2.0], space).sel(lead=datetime.timedelta(1)).item() == 2.0
    assert Space([np.timedelta64(12, "M")]) == Space([np.timedelta64(1, "Y")])
    assert np.timedelta64(1, "M") not in space
    assert np.timedelta64(30, "D") not in Space([np.timedelta64(1, "M")])
    assert mo.tensor([0.0, 6.0], space).interp(lead=np.timedelta64(30, "h")).item() == 3.0
    with pytest.raises(TypeError, match="unit"):
        Space(np.array([1, 2], "timedelta64"))


@pytest.mark.parametrize(
    "labels",
    [
        [datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)],
        [datetime.date(2000, 1, 1), datetime.datetime(2000, 1, 1, 5, tzinfo=datetime.UTC)],
    ],
)
def test_dates_with_time_zones_are_refused(labels: list[Any]) -> None:
    with pytest.raises(TypeError, match="time zone"):
        Space(labels)
    with pytest.raises(TypeError, match="time zone"):
        daily().sel(time=labels[-1])
    for text in ("2000-01-01T00:00Z", "2000-01-01T00:00+01:00"):
        with pytest.raises(TypeError, match="time zone"):
            daily().sel(time=text)


@pytest.mark.filterwarnings("ignore:The .generic. unit:DeprecationWarning")  # NumPy 2.5
def test_nat_and_dates_out_of_range_are_refused() -> None:
    for labels in (
        np.array(["2000", "NaT"], "M8[D]"),
        [np.datetime64("NaT")],
        [datetime.date(2000, 1, 1), np.datetime64("NaT")],
    ):
        with pytest.raises(ValueError, match="NaT"):
            Space(labels)
    with pytest.raises(ValueError, match="2000-01-01 occurs more than once"):
        Space([datetime.date(2000, 1, 1), np.datetime64("2000-01-01", "ns")])
    with pytest.raises(ValueError, match="too far"):
        Space(np.array([2**62], "M8[Y]"))
    assert len(Space([np.datetime64("-9999-01-01"), np.datetime64("9999-01-01")])) == 2


# -- selection -------------------------------------------------------------------------------------------------------------


def test_text_selects_periods() -> None:
    t = daily()
    assert t.sel(time="2000-02").data.tolist() == list(range(31, 60))
    assert len(t.sel(time="2000")) == 60
    assert t.sel(time="2000-02-03").ndim == 0
    assert t.sel(time=slice("2000-01-30", "2000-02-01")).data.tolist() == [29, 30, 31]
    assert t.flip("time").sel(time=slice("2000-02-01", "2000-01")).data.tolist() == list(range(31, -1, -1))
    shuffled = t.isel(time=[40, 2, 35, 3])
    assert shuffled.sel(time="2000-02").data.tolist() == [40, 35]
    hours = mo.tensor(torch.arange(48.0), time=np.datetime64("2000-01-01") + np.arange(48).astype("m8[h]"))
    assert len(hours.sel(time="2000-01-02")) == 24
    assert hours.sel(time="2000-01-02 05").item() == 29.0
    assert hours.sel(time=["2000-01-02", "2000-01-01T03:00"]).data.tolist() == [24, 3]


@pytest.mark.parametrize("text", ["1950", "2000-13", "soon", "2000-01-01T05:00", ""])
def test_text_that_selects_nothing_raises(text: str) -> None:
    with pytest.raises(KeyError, match="'time'"):
        daily().sel(time=text)


def test_neighbours_are_measured_exactly() -> None:
    t = mo.tensor([1.0, 2.0], time=np.array(["-20000-01-01", "2000-01-01"], "M8[D]"))
    near = np.datetime64("2000-01-01T00:00:00.000000001")
    assert t.sel(time=near, method="nearest").item() == 2.0
    assert t.sel(time=near, method="pad", tolerance=np.timedelta64(1, "ns")).item() == 2.0
    with pytest.raises(KeyError, match="within"):
        t.sel(time=near, method="nearest", tolerance=np.timedelta64(999, "ps"))
    with pytest.raises(KeyError):
        t.sel(time=near, method="backfill")
    with pytest.raises(TypeError, match="can't be compared"):
        t.sel(time=3, method="nearest")


def test_components_of_dates_equal_those_of_the_calendar() -> None:
    space = Space(np.array(["2000-12-31T23:59:58.000001002", "1969-02-28"], "M8[ns]"), "time")
    expected = {
        "year": [2000, 1969],
        "month": [12, 2],
        "season": ["DJF", "DJF"],
        "day": [31, 28],
        "dayofyear": [366, 59],
        "dayofweek": [6, 4],
        "week": [52, 9],
        "hour": [23, 0],
        "second": [58, 0],
        "microsecond": [1, 0],
        "nanosecond": [2, 0],
        "days_in_month": [31, 28],
        "quarter": [4, 1],
    }
    assert {name: datetime_component(space, name) for name in expected} == expected
    with pytest.raises(ValueError, match="moon"):
        datetime_component(space, "moon")
    with pytest.raises(TypeError, match="not dates"):
        datetime_component(Space([1, 2]), "year")


@pytest.mark.parametrize(
    ("rule", "hint"), [("M", "'ME'"), ("0D", "no period"), ("fortnight", "there are YE"), ("-1D", "no period")]
)
def test_invalid_periods_are_refused(rule: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        daily().resample(time=rule)


def test_resampling_to_too_many_bins_is_refused() -> None:
    with pytest.raises(ValueError, match="longer period"):
        daily().resample(time="ms")
    with pytest.raises(TypeError, match="no dates"):
        mo.zeros(x=[1, 2]).resample(x="D")


# -- gradients, transforms, compiled code ----------------------------------------------------------------------------------

FUNCTIONS = {
    "sel": lambda t: t.sel(time="2000-01-01"),
    "period": lambda t: t.sel(time=slice("2000-01-02", "2000-01-04")),
    "nearest": lambda t: t.sel(time="2000-01-03T07", method="nearest"),
    "interp": lambda t: t.interp(time=["2000-01-02T06:00", "2000-01-05"]),
    "diff": lambda t: t.diff("time", 2),
    "shift": lambda t: t.shift(time=2, fill=0.0),
    "mean": lambda t: t.rolling(time=3, min_periods=1).mean(),
    "sum": lambda t: t.rolling(time=3, center=True, min_periods=1).sum(),
    "min": lambda t: t.rolling(time=2, min_periods=1).min(),
    "max": lambda t: t.rolling(time=2, min_periods=1).max(),
    "std": lambda t: t.rolling(time=3, min_periods=2, center=True).std(),
    "reindex": lambda t: t.reindex(time=["2000-01-03", "1999-12-31", "2000-01-01"], fill=0.0),
    "resample": lambda t: t.resample(time="2D").mean(),
    "month": lambda t: t.groupby("time.dayofweek").sum(),
    "stack": lambda t: t.stack(all="time x").unstack("all"),
}


def small() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return mo.tensor(torch.randn(6, 2, generator=generator, dtype=torch.float64), time=DAYS[:6], x=["a", "b"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_on_dates_have_gradients_and_vmap(name: str) -> None:
    function, t = FUNCTIONS[name], small()
    assert torch.autograd.gradcheck(lambda data: function(Tensor(data, t.dims)).data.sum(0), t.data.requires_grad_())
    batch = torch.stack([t.data.detach(), t.data.detach() * 2])
    results = torch.vmap(lambda data: function(Tensor(data, t.dims)).data)(batch)
    for data, result in zip(batch, results, strict=True):
        torch.testing.assert_close(result, function(Tensor(data, t.dims)).data, equal_nan=True)


@pytest.mark.compiles_labels
def test_operations_on_dates_compile_to_one_graph() -> None:
    def chain(t: Tensor, other: Tensor) -> Tensor:
        t = t.sel(time=slice("2000-01-02", None)).diff("time")
        t = t.rolling(time=2, min_periods=1).mean() - t.shift(time=1, fill=0.0)
        return (
            mo.dot(t, other, over="x")
            + t.reindex(time=["2000-01-03", "2000-01-05"], fill=0.0).resample(time="ME").mean().sum()
        )

    t = small()
    other = mo.tensor([2.0, 1.0], x=["b", "a"], dtype=torch.float64)
    result = torch.compile(chain, fullgraph=True, backend="eager")(t, other)
    expected = chain(t, other)
    assert result.dims == expected.dims
    torch.testing.assert_close(result.data, expected.data)


def test_rolling_windows_equal_a_loop() -> None:
    t = small()
    t.data[2, 0] = float("nan")
    result = t.rolling(time=3, x=2, min_periods=3).mean()
    for row in range(6):
        for column in range(2):
            window = t.data[max(row - 2, 0) : row + 1, max(column - 1, 0) : column + 1]
            present = window[~window.isnan()]
            expected = present.mean() if len(present) >= 3 else torch.tensor(torch.nan, dtype=torch.float64)
            torch.testing.assert_close(result.data[row, column], expected, equal_nan=True)
    assert t[:0].rolling(time=3).mean().shape == (0, 2)
    assert t.half().rolling(time=2).mean().dtype == torch.float16
    assert t.rolling(time=2).construct("lag").names == ("time", "x", "lag")


def test_invalid_windows_shifts_and_reindexing_are_refused() -> None:
    numbers = mo.tensor([1, 2, 3], "time")
    with pytest.raises(TypeError, match="fill=0"):
        numbers.shift(time=1)
    assert numbers.shift(time=-5, fill=0).data.tolist() == [0, 0, 0]
    assert numbers.shift(time=1, fill=0.5).data.tolist() == [0.5, 1.0, 2.0]
    for wrong in (lambda: numbers.rolling(time=0), lambda: numbers.rolling(), lambda: numbers.diff("time", -1)):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError, match="fill=0"):
        mo.tensor([1, 2], x=["a", "b"]).reindex(x=["c"])
    with pytest.raises(TypeError, match="positional"):
        numbers.reindex(time=[1])
    with pytest.raises(ValueError, match="only on the left"):
        mo.align(mo.zeros(x=["a"]), mo.zeros(x=["b"]), join="exact")


# -- saved and loaded ------------------------------------------------------------------------------------------------------


class Seasonal(mo.Module):
    def __init__(self, times: Any) -> None:
        super().__init__()
        self.weight = mo.tensor(torch.arange(float(len(times))), time=times, requires_grad=True)


def test_dates_are_saved_and_loaded(tmp_path: Path) -> None:
    months = np.arange("2000-01", "2000-04", dtype="M8[M]")
    net, other = Seasonal(months), Seasonal(months[[2, 0, 1]].astype("M8[ns]"))
    mo.save(tmp_path / "net", net)
    mo.load(tmp_path / "net", other)
    assert other.weight.data.tolist() == [2.0, 0.0, 1.0]
    torch.save(net.state_dict(), tmp_path / "state")
    other = Seasonal(list(map(datetime.date.fromisoformat, ("2000-02-01", "2000-03-01", "2000-01-01"))))
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.weight.data.tolist() == [1.0, 2.0, 0.0]
    torch.save(net.weight.detach(), tmp_path / "tensor")
    assert torch.load(tmp_path / "tensor", weights_only=True).dims == net.weight.dims
    population = mo.Population.of(net, 2)
    assert population[1].weight.dims == net.weight.dims


def test_dates_of_older_files_are_read() -> None:
    days = [datetime.date(2000, 1, 2), datetime.date(2000, 1, 1)]
    net = Seasonal(days)
    state = net.state_dict()
    # The format of version 0.2.
    state._metadata[""]["labels"]["weight"][0]["labels"] = [["datetime.date", repr(day)] for day in days[::-1]]
    net.load_state_dict(state)
    assert net.weight.data.tolist() == [1.0, 0.0]


# -- other libraries -------------------------------------------------------------------------------------------------------


def test_arrays_share_memory_where_autograd_allows() -> None:
    t = mo.tensor([1.0, 2.0], "x")
    assert np.shares_memory(np.asarray(t), t.data.numpy())
    assert np.shares_memory(np.from_dlpack(t), t.data.numpy())
    assert torch.from_dlpack(t).data_ptr() == t.data.data_ptr()
    assert np.asarray(mo.tensor([1j], "x").conj()).tolist() == [-1j]
    for convert in (np.asarray, np.from_dlpack):
        with pytest.raises((RuntimeError, BufferError)):
            convert(t.attach())


def test_tensor_accepts_spaces_as_axes() -> None:
    dims = mo.zeros(2, x=["a", "b"]).dims
    assert mo.tensor([[1.0, 2.0], [3.0, 4.0]], dims).dims == dims
    assert mo.tensor([1.0, 2.0], dims[1]).dims == dims[1:]
    assert mo.tensor([[1.0, 2.0]], ["row", dims[1]], row=["r"]).names == ("row", "x")
    with pytest.raises(ValueError, match="size 1"):
        mo.tensor([1.0], dims[1])
    with pytest.raises(ValueError, match="given twice"):
        mo.tensor([1.0, 2.0], [dims[1]], x=["p", "q"])


@pytest.mark.parametrize(
    "rule", ["YE", "2YS", "QE", "2QE", "3QS", "ME", "2ME", "5MS", "W", "3W", "D", "5D", "7h", "90min"]
)
def test_resampled_bins_equal_those_of_pandas(rule: str) -> None:
    pandas = pytest.importorskip("pandas")
    days = np.array([0, 1, 6, 7, 30, 31, 59, 60, 181, 400, 731]).astype("m8[D]")
    for times in (np.datetime64("1999-11-30") + days, np.datetime64("1969-02-01T05:07") + days):
        series = pandas.Series(np.arange(11.0), pandas.DatetimeIndex(times.astype("M8[ns]")))
        expected = series.resample(rule).sum()
        result = mo.tensor(series.values, time=times).resample(time=rule).sum()
        assert result.dims == (Space(expected.index, "time"),)
        assert result.data.tolist() == expected.tolist()


def test_durations_of_months_are_never_integers():
    """NumPy calls them equal, so a cached selection of the integer must not be returned for the duration."""
    months, whole = np.timedelta64(1, "M"), mo.tensor(torch.tensor([1.0, 2.0]), t=[1, 2])
    mixed = mo.tensor(torch.tensor([1.0, 2.0]), t=["a", 1])
    for t in (whole, mixed):
        assert t.sel(t=1) is not None
        with pytest.raises(KeyError, match="1 months"):
            t.sel(t=months)
        with pytest.raises(KeyError):
            t.sel(t=[months])
    dated = mo.tensor(torch.tensor([1.0, 2.0]), t=np.array([1, 2], "timedelta64[M]"))
    assert dated.sel(t=months).item() == 1.0
    with pytest.raises(KeyError):
        dated.sel(t=1)


def test_text_selects_durations() -> None:
    t = mo.tensor([0.0, 1.0, 2.0, 3.0], lag=np.arange(4).astype("m8[h]"))
    for text in ("2h", "2 hours", "120min", "7200 s"):
        assert t.sel(lag=text).item() == 2.0
    assert t.sel(lag=["3h", "1h"]).tolist() == [3.0, 1.0]
    assert t.sel(lag=slice("1h", "150min")).tolist() == [1.0, 2.0]
    assert t.interp(lag="90min").item() == 1.5
    assert t.sel(lag="100min", method="nearest").item() == 2.0
    for wrong in ("2000-01-01", "two hours", "2 months"):
        with pytest.raises(KeyError, match="no duration such as"):
            t.sel(lag=wrong)


def test_components_of_dates_are_available_as_tensors() -> None:
    t = daily()
    assert t.coordinate("time.month").tolist() == [1] * 31 + [2] * 29
    assert t.where(t.coordinate("time.dayofweek") >= 5, drop=True).sizes == {"time": 18}
    with pytest.raises(TypeError, match="no numbers"):
        t.coordinate("time")
    with pytest.raises(KeyError, match="no axis or coordinate"):
        t.coordinate("height")
