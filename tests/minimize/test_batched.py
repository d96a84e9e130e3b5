"""`minimize` with batched starts takes the steps of separate runs."""

import sys
from pathlib import Path

import pytest
import torch

from moduli import m, minimize
from moduli._minimize._loop import BatchedRuns
from moduli._minimize._methods import CHAINS
from moduli._minimize._names import BATCHED
from moduli._minimize._point import StartPoint
from moduli._minimize._variables import Variables
from moduli.m.quasi_newton._dense import Pair, bfgs, dfp
from moduli.optim import Closure

sys.path.insert(0, str(Path(__file__).parent))
from problems import PROBLEMS

D = torch.float64
BEALE = PROBLEMS["Beale"][0]
STARTS = torch.tensor([[1.0, 1.0], [2.0, 0.2], [0.0, 0.0], [3.0, 0.5], [-0.5, 1.5]], dtype=D)


def _alone(fun, starts, method, **more):
    return [minimize(fun, start, method, **more) for start in starts]


@pytest.mark.parametrize("method", BATCHED)
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_steps_are_those_of_single_runs(method, steps):
    together = minimize(BEALE, STARTS, method, batched=True, max_steps=steps)
    apart = _alone(BEALE, STARTS, method, max_steps=steps)
    assert together.method == method
    for i, alone in enumerate(apart):
        torch.testing.assert_close(together.x[i], alone.x, rtol=1e-7, atol=1e-9)
        assert float(together.value[i]) == pytest.approx(alone.value, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize("method", ["bfgs", "lbfgs", "cg", "gd"])
def test_results_are_those_of_single_runs(method):
    fun, starts = (
        lambda x: ((x - 1) ** 2 * torch.arange(1, 4, dtype=D)).sum() + (x**4).sum(),
        torch.randn(6, 3, dtype=D),
    )
    together = minimize(fun, starts, method, batched=True)
    apart = _alone(fun, starts, method)
    assert together.success == all(alone.success for alone in apart)
    for i, alone in enumerate(apart):
        torch.testing.assert_close(together.x[i], alone.x, rtol=1e-6, atol=1e-6)
    # One vectorised evaluation serves all starts.
    assert together.evaluations <= sum(alone.evaluations for alone in apart)


@pytest.mark.parametrize("name", ["Rosenbrock 2", "Wood", "Helical valley", "Dixon-Price", "Broyden tridiagonal"])
@pytest.mark.parametrize("method", ["bfgs", "lbfgs"])
def test_standard_problems_from_several_starts(name, method):
    fun, x0, minima = PROBLEMS[name]
    noise = torch.randn(4, len(x0), generator=torch.Generator().manual_seed(0), dtype=D)
    result = minimize(fun, x0 + 0.05 * noise, method, batched=True)
    assert result.success, result
    assert all(min(abs(float(value) - best) for best in minima) < 1e-8 for value in result.value), result


@pytest.mark.parametrize("method", ["bfgs", "lbfgs", "gd", "cg"])
def test_bounds_are_those_of_single_runs_by_transform(method):
    starts = torch.tensor([[0.5, 0.5], [0.1, 4.0], [0.9, 1.0]], dtype=D)
    bounds = {"lower": 0.0, "upper": torch.tensor([1.0, 5.0], dtype=D)}

    def fun(x):
        return ((x - 3) ** 2).sum() + x[0] * x[1]

    together = minimize(fun, starts, method, batched=True, **bounds, max_steps=6)
    apart = _alone(fun, starts, method, **bounds, bounds_by="transform", max_steps=6)
    for i, alone in enumerate(apart):
        torch.testing.assert_close(together.x[i], alone.x, rtol=1e-6, atol=1e-8)
    assert bool(((together.x >= 0) & (together.x <= torch.tensor([1.0, 5.0], dtype=D))).all())


def test_nested_starts_with_one_sided_bounds():
    start = {"a": torch.zeros(3, 2, dtype=D), "b": [torch.full((3,), 2.0, dtype=D)]}
    result = minimize(
        lambda p: ((p["a"] - 3) ** 2).sum() + p["b"][0] ** 2,
        start,
        batched=True,
        upper={"a": torch.full((3, 2), 1.0, dtype=D), "b": [None]},
    )
    torch.testing.assert_close(result.x["a"], torch.ones(3, 2, dtype=D), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.x["b"][0], torch.zeros(3, dtype=D), atol=1e-5, rtol=0)


def test_a_start_that_fails_does_not_affect_the_others():
    starts = torch.tensor([[-1.0], [5.0], [3.0]], dtype=D)
    result = minimize(lambda x: (x - torch.log(x)).sum(), starts, batched=True)
    assert not result.success
    assert "1 of 3" in result.reason
    assert [start.success for start in result.starts] == [False, True, True]
    assert "not finite" in result.starts[0].reason
    assert result.starts[1].value == float(result.value[1])
    torch.testing.assert_close(result.starts[1].hessian(), torch.ones(1, 1, dtype=D))
    torch.testing.assert_close(result.x[1:], torch.ones(2, 1, dtype=D), atol=1e-7, rtol=0)
    assert float(result.x[0]) == -1.0


def test_limits_callbacks_and_progress():
    fun = PROBLEMS["Rosenbrock 2"][0]
    starts = torch.tensor([[-1.2, 1.0], [0.5, 2.0]], dtype=D)
    short = minimize(fun, starts, batched=True, max_evals=7)
    assert not short.success
    assert "7 evaluations" in short.reason
    assert 7 <= short.evaluations < 14  # at most 7 per start; starts share evaluations in which both search
    seen = []
    stopped = minimize(fun, starts, batched=True, callback=lambda now: seen.append(now.value) or len(seen) == 4)
    assert stopped.steps == 4
    assert "callback" in stopped.reason
    assert [float(value.sum()) for _, value in stopped.history] == [float(value.sum()) for value in seen]
    printing = minimize(fun, starts, batched=True, progress=True)
    assert torch.equal(printing.value, minimize(fun, starts, batched=True).value)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: minimize(BEALE, STARTS, "newton", batched=True),
            ValueError,
            "for newton call minimize for each start",
        ),
        (lambda: minimize(BEALE, STARTS, [m.LBFGS(), m.StrongWolfe()], batched=True), ValueError, "for links call"),
        (
            lambda: minimize(BEALE, STARTS, batched=True, bounds=(-9.0, 9.0), bounds_by="projection"),
            ValueError,
            "by transform",
        ),
        (lambda: minimize(BEALE, torch.zeros((), dtype=D), batched=True), ValueError, "first axis"),
        (lambda: minimize(lambda x: x, STARTS, batched=True), ValueError, "0-d tensor"),
        (lambda: minimize(BEALE, STARTS.to(torch.complex128), batched=True), TypeError, "real"),
    ],
)
def test_methods_and_points_that_cannot_be_batched_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("method", ["bfgs", "lbfgs", "cg", "gd"])
def test_restarting_some_runs_does_not_change_the_others(method):
    point = StartPoint(STARTS)
    runs = BatchedRuns(Variables(point, [None], [None], True), BEALE, None, method)
    closure = Closure(runs.evaluate, fixed=True)
    runs.begin(CHAINS[method]())
    for _ in range(4):
        runs.advance(closure)
    again, there = torch.tensor([True, False, True, False, False]), runs.x.detach().clone()
    runs.begin_again(again)
    for _ in range(3):
        runs.advance(closure)
    for i, restarted in enumerate(again.tolist()):
        alone = minimize(BEALE, there[i] if restarted else STARTS[i], method, max_steps=3 if restarted else 7)
        torch.testing.assert_close(runs.x[i].detach(), alone.x, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # vmap warns about in-place products, which links avoid
@pytest.mark.parametrize("rule", [bfgs, dfp])
def test_pairs_without_curvature_are_skipped_for_their_member_only(rule):
    g = torch.Generator().manual_seed(0)
    s, y = torch.randn(4, 3, generator=g, dtype=D), torch.randn(4, 3, generator=g, dtype=D)
    y[0], y[1], s[2], y[2] = s[0] + 0.1 * y[0], -s[1], 0.0, 0.0
    H = torch.eye(3, dtype=D).repeat(4, 1, 1)

    def one(H, s, y):
        H = H.clone()
        used = rule(H, Pair(s, y, y, y, 1e-32, {}))
        return H, used

    together, used = torch.vmap(one)(H, s, y)
    assert used[:3].tolist() == [True, False, False]
    for i in range(4):
        matrix, alone = one(H[i], s[i], y[i])
        assert bool(alone) == bool(used[i])
        torch.testing.assert_close(together[i], matrix)
