"""Statistics of many runs, compared with NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moduli import lab
from moduli.lab._statistics import costs

values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=1, max_size=9), st.floats(0, 1))
def test_quantiles_equal_those_of_numpy(sample, q):
    assert lab.quantile(sample, q) == pytest.approx(float(np.quantile(sample, q)), rel=1e-9, abs=1e-9)


def make_race(*histories, optimum=0.0, exact=True):
    """Return a race of one problem; each argument is the list of histories of one contender."""
    header = {
        "problems": [{"name": "p", "optimum": optimum, "exact": exact}],
        "contenders": [{"label": f"c{i}", "source": f"c{i}"} for i in range(len(histories))],
        "seeds": list(range(len(histories[0]))),
    }
    runs = [
        {"problem": "p", "source": f"c{i}", "contender": f"c{i}", "seed": seed, "history": history,
         "seconds": history[-1][1] if history else None,
         "reason": "budget spent" if history else "crashed", "value": history[-1][2] if history else None,
         "evaluations": history[-1][0] if history else 0}
        for i, group in enumerate(histories) for seed, history in enumerate(group)
    ]  # fmt: skip
    return lab.Results(header, runs)


def line(*points):
    return [[e, e / 100, v] for e, v in points]


def test_curves_are_quantiles_of_step_functions():
    group = [
        line((0, 8.0), (1, 8.0), (10, 4.0)),
        line((0, 8.0), (1, 6.0), (5, 2.0), (20, 1.0)),
        line((0, 8.0), (1, 8.0), (3, 7.0), (20, 6.0)),
    ]
    (curve,) = lab.curves(make_race(group), "p")
    grid = curve["evaluations"]["x"]
    assert grid[0] == 1
    assert grid[-1] == 20

    def at(history, x):
        return [v for e, _, v in history if e <= x][-1]

    for key, q in (("lower", 0.25), ("median", 0.5), ("upper", 0.75)):
        expected = [np.quantile([at(history, x) for history in group], q) for x in grid]
        assert curve["evaluations"][key] == pytest.approx(expected)
    assert curve["seconds"]["median"][-1] == 4.0


def test_performance_profiles_equal_those_of_the_definition():
    fast = [line((0, 100.0), (10, 0.01)), line((0, 100.0), (10, 50.0))]
    slow = [line((0, 100.0), (40, 0.01)), line((0, 100.0), (30, 0.05))]
    results = make_race(fast, slow)
    table = costs(results, 1e-3)
    assert table == {"c0": [10, math.inf], "c1": [40, 30]}
    first, second = lab.profiles(results, 1e-3)
    assert (first["x"], first["y"]) == ([1.0], [0.5])
    assert (second["x"], second["y"]) == ([1.0, 4.0], [0.5, 1.0])


@given(st.lists(st.lists(st.integers(1, 50), min_size=2, max_size=2), min_size=1, max_size=4))
def test_a_profile_is_monotone_and_ends_at_the_share_of_solved_runs(ends):
    results = make_race(*[[line((0, 1.0), (end, 0.0)) for end in group] for group in ends])
    for series in lab.profiles(results, 1e-3):
        assert series["x"] == sorted(set(series["x"]))
        assert series["y"] == sorted(series["y"])
        assert series["y"][-1] == 1.0


def test_summaries_count_failures_as_infinite():
    results = make_race([line((0, 1.0), (10, 0.5)), [], []])
    (row,) = lab.summary(results)
    assert row["median"] is None
    assert row["best"] == 0.5
    assert row["failed"] == 2
    assert row["reasons"] == {"crashed": 2, "budget spent": 1}
    assert results.to_json()["complete"]
