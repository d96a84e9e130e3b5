"""Proximal operators are minimisers, and proximal methods end where the optimality conditions hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moduli as mo
from moduli import m

D = torch.float64
OPERATORS = {
    "l1": m.prox.L1Penalty(0.7),
    "group": m.prox.GroupPenalty(0.7),
    "group of columns": m.prox.GroupPenalty(0.7, dim=0),
    "nuclear": m.prox.NuclearPenalty(0.7),
    "box": m.prox.BoxSet(-0.5, torch.tensor([0.25, 1.0, 2.0])),
    "simplex": m.prox.SimplexSet(2.0),
}


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), step=st.floats(0.01, 3.0))
def test_the_proximal_point_is_lower_than_its_neighbours(name, seed, step):
    prox, v = OPERATORS[name], 2 * numbers(4, 3, seed=seed)
    x = prox(v, step)

    def total(y):
        return float(prox.value(y) + ((y - v) ** 2).sum() / (2 * step))

    assert total(x) < float("inf")
    for size in (1e-4, 1e-2, 1.0):
        for i in range(4):
            other = x + size * numbers(4, 3, seed=seed + i)
            # For sets, neighbours are projected into the set first.
            other = prox(other, step) if name in ("box", "simplex") else other
            assert total(x) <= total(other) + 1e-12
    assert total(x) <= total(0 * x) + 1e-12 or name == "simplex"


@pytest.mark.parametrize("name", ["l1", "group", "nuclear"])
def test_proximal_points_are_firmly_nonexpansive(name):
    prox, a, b = OPERATORS[name], numbers(4, 3), numbers(4, 3, seed=1)
    p, q = prox(a, 1.0), prox(b, 1.0)
    assert ((p - q) ** 2).sum() <= ((p - q) * (a - b)).sum() + 1e-12


A, B = numbers(40, 20), numbers(40, seed=1)


def squares(x):
    return 0.5 * ((A @ x - B) ** 2).sum()


@pytest.mark.parametrize("method", ["fista", "proximal-gradient", "auto"])
def test_the_lasso_meets_its_optimality_conditions(method):
    result = mo.minimize(squares, torch.zeros(20, dtype=D), method, prox=m.prox.L1Penalty(8.0))
    gradient, zero = A.T @ (A @ result.x - B), result.x == 0
    assert result.success
    assert 0 < int(zero.sum()) < 20
    assert float(gradient[zero].abs().max()) <= 8.0
    torch.testing.assert_close(gradient[~zero], -8.0 * result.x[~zero].sign(), rtol=0, atol=1e-6)
    assert result.value == pytest.approx(float(squares(result.x) + 8.0 * result.x.abs().sum()))


def test_sets_and_dictionaries_equal_other_methods():
    box = mo.minimize(squares, torch.zeros(20, dtype=D), prox=m.prox.BoxSet(0.0, 0.1))
    bounded = mo.minimize(squares, torch.zeros(20, dtype=D), lower=0.0, upper=0.1)
    torch.testing.assert_close(box.x, bounded.x, rtol=0, atol=1e-6)
    start = {"w": torch.zeros(20, dtype=D), "c": torch.zeros((), dtype=D)}
    prox = {"w": m.prox.SimplexSet(), "c": None}
    result = mo.minimize(lambda p: A @ p["w"] + p["c"] - B, start, prox=prox)
    sums = {"type": "eq", "fun": lambda p: p["w"].sum() - 1}
    expected = mo.minimize(
        lambda p: A @ p["w"] + p["c"] - B, start, constraints=sums, bounds={"w": (0, None), "c": (None, None)}, tol=1e-9
    )
    torch.testing.assert_close(result.x["w"], expected.x["w"], rtol=0, atol=1e-5)
    torch.testing.assert_close(result.x["c"], expected.x["c"], rtol=0, atol=1e-5)


def test_momentum_needs_fewer_steps_where_the_curvature_varies():
    scales = torch.logspace(0, 3, 30, dtype=D)

    def stretched(x):
        return 0.5 * (scales * (x - 1) ** 2).sum()

    def count(method):
        return mo.minimize(stretched, torch.zeros(30, dtype=D), method, prox=m.prox.L1Penalty(0.1), tol=1e-6).steps

    assert count("fista") < 0.2 * count("proximal-gradient")


def test_a_low_rank_matrix_and_limits():
    M, mask = numbers(8, 2) @ numbers(2, 8, seed=1), numbers(8, 8, seed=2) < 0.8

    def fill(x):
        return 0.5 * (((x - M) * mask) ** 2).sum()

    result = mo.minimize(fill, torch.zeros(8, 8, dtype=D), prox=m.prox.NuclearPenalty(0.1))
    assert result.success
    assert int((torch.linalg.svdvals(result.x) > 1e-9).sum()) < 8
    short = mo.minimize(fill, torch.zeros(8, 8, dtype=D), prox=m.prox.NuclearPenalty(0.1), max_evals=7)
    assert (short.success, short.evaluations) == (False, 7)
    assert "limit of 7 evaluations" in short.reason
    single = mo.minimize(lambda x: fill(x.double()).float(), torch.zeros(8, 8), prox=m.prox.NuclearPenalty(0.1))
    torch.testing.assert_close(single.x.double(), result.x, rtol=0, atol=1e-3)


def test_the_link_ends_where_minimize_does():
    w = torch.nn.Parameter(torch.zeros(20, dtype=D))
    lr = 1 / float(torch.linalg.eigvalsh(A.T @ A).max())
    link = m.FISTA(m.prox.L1Penalty(8.0), lr=lr)
    opt = mo.Optimizer([w], link)
    for _ in range(400):
        opt.step(mo.closure(lambda: squares(w)))
    expected = mo.minimize(squares, torch.zeros(20, dtype=D), prox=m.prox.L1Penalty(8.0)).x
    here = w.detach().clone()
    with link.solved([w]):
        torch.testing.assert_close(w.data, expected, rtol=0, atol=1e-6)
        assert torch.equal(w == 0, expected == 0)
    assert torch.equal(w, here)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"bounds are prox=m\.prox\.BoxSet"):
        mo.minimize(squares, torch.zeros(20, dtype=D), prox=m.prox.L1Penalty(1.0), lower=0.0)
    with pytest.raises(ValueError, match="'fista' or 'proximal-gradient', not 'lbfgs'"):
        mo.minimize(squares, torch.zeros(20, dtype=D), "lbfgs", prox=m.prox.L1Penalty(1.0))
    with pytest.raises(ValueError, match="use L1Penalty"):
        mo.minimize(squares, torch.zeros(20, dtype=D), prox=m.prox.NuclearPenalty(1.0))
    with pytest.raises(ValueError, match="strength is -1"):
        m.prox.L1Penalty(-1.0)
    with pytest.raises(ValueError, match="no point is between"):
        m.prox.BoxSet(1.0, 0.0)
    with pytest.raises(ValueError, match="give a positive number"):
        m.prox.SimplexSet(0.0)
    with pytest.raises(TypeError, match="prox is a float"):
        m.ProximalGradient(0.1)


def test_standard_errors_with_a_penalty_are_refused():
    result = mo.minimize(
        lambda x: (x - 1).square().sum(), torch.zeros(2, dtype=torch.float64), prox=m.prox.L1Penalty(0.1)
    )
    with pytest.raises(ValueError, match="prox="):
        _ = result.stderr


@pytest.mark.parametrize("side", ["lower", "upper"])
def test_a_box_with_labels_is_refused(side):
    with pytest.raises(TypeError, match=f"{side} is labelled"):
        m.prox.BoxSet(**{side: mo.tensor([1.5, 0.5], band=["b", "a"])})


def test_options_are_those_of_other_methods():
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)

    def call(**arguments):
        return mo.minimize(
            lambda x: ((x - 3) ** 2).sum() + (x[0] * x[1]) ** 2, start, prox=m.prox.L1Penalty(0.1), **arguments
        )

    assert call(options={"maxiter": 2}).nit == 2 < call().nit
    for arguments, words in (
        ({"options": {"bogus": 1}}, "fista has no option 'bogus'"),
        ({"x_scale": 2.0}, "x_scale are options of fits by lm; this is fista"),
    ):
        with pytest.raises(TypeError, match=words):
            call(**arguments)
    with pytest.raises(ValueError, match="tol is -1"):
        call(tol=-1.0)
