"""PSGD: preconditioners whiten updates, or converge to the inverse of the absolute Hessian."""

import itertools
from typing import get_args

import pytest
import torch

import moduli as mo
from moduli import m, optim
from moduli.m.adaptive import _kron, _lra
from moduli.m.adaptive._psgd import Geometry

GEOMETRIES = get_args(Geometry)


def _draw(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _measure_covariance(link, left, right, steps, last):
    """Return the covariance of the last results of a link for updates with factors `left` and `right` of their covariance."""
    w = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    noise = torch.Generator().manual_seed(1)
    seen = []
    for k in range(steps):
        u = left @ torch.randn(w.shape, generator=noise, dtype=torch.float64) @ right
        out = optim.step_tensors(link, [u], params=[w])[0]
        if k >= steps - last:
            seen.append(out.reshape(-1))
    rows = torch.stack(seen)
    return rows.mT @ rows / last


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_factors_whiten(geometry):
    left = torch.diag(torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)) + 0.1 * _draw((3, 3))
    right = torch.diag(torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)) + 0.1 * _draw((3, 3), 1)
    link = m.PSGDKronWhiten(seed=0, dQ=geometry, max_skew=2.0)
    covariance = _measure_covariance(link, left, right, 1000, 600)
    assert (covariance - torch.eye(9, dtype=torch.float64)).abs().max() < 0.5


def test_diagonal_factors_whiten_diagonal_covariances():
    scale = torch.tensor([5.0, 1.0, 0.2], dtype=torch.float64)
    link = m.PSGDKronWhiten(seed=0, max_dim=1)
    covariance = _measure_covariance(link, torch.diag(scale), torch.eye(2, dtype=torch.float64), 1000, 600)
    assert (torch.diagonal(covariance) - 1).abs().max() < 0.35


def test_low_rank_whitens():
    # The covariance is diagonal plus rank one, so its inverse root is in the family of preconditioners.
    direction = _draw(6).reshape(-1, 1)
    root = torch.linalg.cholesky(
        torch.diag(torch.linspace(0.5, 2.0, 6, dtype=torch.float64)) + 2 * direction @ direction.mT
    )
    link = m.PSGDLRAWhiten(rank=2, seed=0)
    covariance = _measure_covariance(link, root, torch.eye(1, dtype=torch.float64), 2000, 1000)
    assert (covariance - torch.eye(6, dtype=torch.float64)).abs().max() < 0.5


def test_the_stored_product_is_that_of_the_factors():
    link, w = m.PSGDKronWhiten(seed=0, balance_probability=0.5), torch.zeros(4, 3, dtype=torch.float64)
    for k in range(20):
        optim.step_tensors(link, [_draw((4, 3), k)], params=[w])
        state = link.state[w]
        for q, p in zip(state["factors"], state["products"], strict=True):
            expected = q.mT @ q if q.dim() == 2 else q * q
            torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-12)


def test_a_low_rank_product_is_that_of_the_dense_matrix():
    state, x = {}, _draw(5)
    setting = {"rank": 2, "init_scale": None, "damping": 1e-9, "betaL": 0.9, "lr_preconditioner": 0.1}
    _lra.begin(state, x, setting, torch.Generator().manual_seed(0))
    for k in range(30):
        _lra.fit(state, _draw(5, k), _draw(5, k + 100), bool(k % 2), setting)
    U, V = torch.stack(state["U"], 1), torch.stack(state["V"], 1)
    Q = (torch.eye(5, dtype=torch.float64) + U @ V.mT) @ torch.diag(state["d"])
    torch.testing.assert_close(_lra.precondition(state, x), Q.mT @ Q @ x, rtol=1e-10, atol=1e-10)


def _criterion(Q, h, v):
    P = Q.mT @ Q
    return h @ P @ h + v @ torch.linalg.solve(P, v)


@pytest.mark.parametrize("first", [True, False])
def test_a_step_of_low_rank_lowers_the_criterion(first):
    state, h, v = {}, _draw(5, 2), _draw(5, 3)
    setting = {"rank": 2, "init_scale": 0.7, "damping": 0.0, "betaL": 0.0, "lr_preconditioner": 1e-3}
    _lra.begin(state, h, setting, torch.Generator().manual_seed(0))
    state["U"], state["V"] = list(_draw((5, 2), 4).unbind(1)), list(_draw((5, 2), 5).unbind(1))

    def value():
        U, V = torch.stack(state["U"], 1), torch.stack(state["V"], 1)
        return _criterion((torch.eye(5, dtype=torch.float64) + U @ V.mT) @ torch.diag(state["d"]), h, v)

    before = value()
    _lra.fit(state, h, v, first, setting)
    assert value() < before


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_step_of_a_dense_factor_lowers_the_criterion(geometry):
    h, v = _draw(4, 2), _draw(4, 3)
    setting = {
        "init_scale": 0.7, "damping": 0.0, "betaL": 0.0, "lr_preconditioner": 1e-3, "dQ": geometry,
        "max_dim": 10, "max_skew": float("inf"),
    }  # fmt: skip
    state = {}
    _kron.begin(state, h, setting)
    values = []
    for _ in range(5):
        P = state["products"][0]
        values.append(float(h @ P @ h + v @ torch.linalg.solve(P, v)))
        _kron.fit(state, h, v, setting)
    assert all(after < before for before, after in itertools.pairwise(values))


MATRIX = torch.tensor([[4.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_dense_preconditioner_becomes_the_inverse_of_the_absolute_hessian(geometry):
    setting = {
        "init_scale": None, "damping": 0.0, "betaL": 0.9, "dQ": geometry, "max_dim": 10, "max_skew": float("inf"),
    }  # fmt: skip
    state = {}
    noise = torch.Generator().manual_seed(0)
    _kron.begin(state, MATRIX @ torch.ones(3, dtype=torch.float64), setting)
    for k in range(1500):
        v = torch.randn(3, generator=noise, dtype=torch.float64)
        _kron.fit(state, MATRIX @ v, v, {**setting, "lr_preconditioner": 0.3 / (1 + k / 200)})
    values, vectors = torch.linalg.eigh(MATRIX)
    wanted = (vectors / values.abs()) @ vectors.mT
    product = state["products"][0]
    assert torch.linalg.matrix_norm(product - wanted, 2) < 0.25 * torch.linalg.matrix_norm(wanted, 2)


def test_one_factor_over_a_vector_is_the_dense_preconditioner():
    ends = []
    for link in (m.PSGDDenseNewton(seed=0), m.PSGDKronNewton(seed=0, max_skew=float("inf"), balance_probability=0.0)):
        w = torch.nn.Parameter(torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64))
        opt = mo.Optimizer([w], link, m.LR(0.1))
        for _ in range(20):
            opt.step(mo.closure(lambda w=w: w @ MATRIX @ MATRIX @ w / 2))
        ends.append(w.detach().clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("link", [m.PSGDLRANewton(rank=2, seed=0), m.PSGDKronNewton(seed=0)])
def test_ill_conditioned_problems_become_easy(link):
    scale = torch.logspace(-0.7, 0.7, 6, dtype=torch.float64).reshape(2, 3)
    w = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    opt = mo.Optimizer([w], link, m.LR(0.3))
    for _ in range(300):
        opt.step(mo.closure(lambda: (scale * w.square()).sum() / 2))
    assert w.detach().abs().max() < 0.05


def test_products_may_come_from_differences():
    w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
    opt = mo.Optimizer([w], m.PSGDDenseNewton(seed=0, hvp_method="fd_central"), m.LR(0.3))
    for _ in range(100):
        opt.step(mo.closure(lambda: 4 * w[0] ** 2 + 0.5 * w[1] ** 2))
    assert w.detach().abs().max() < 0.05


def test_results_are_bounded():
    link = m.PSGDKronWhiten(seed=0, grad_clip_max_amp=0.1)
    out = optim.step_tensors(link, [_draw((4, 4)) * 100], params=[torch.zeros(4, 4)])[0]
    assert out.square().mean().sqrt() <= 0.1 + 1e-12
    w = torch.nn.Parameter(torch.full((3,), 100.0))
    opt = mo.Optimizer([w], m.PSGDDenseNewton(seed=0, grad_clip_max_norm=0.5))
    opt.step(mo.closure(lambda: w.square().sum()))
    assert (w.detach() - 100.0).norm() <= 0.5 + 1e-4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: m.PSGDKronWhiten(dQ="QQ"), "dQ"),
        (lambda: m.PSGDLRAWhiten(rank=0), "rank"),
        (lambda: m.PSGDLRAWhiten(update_probability=2.0), "update_probability"),
        (lambda: m.PSGDDenseNewton(dQ="QQ"), "dQ"),
        (lambda: m.PSGDDenseNewton(hvp_method="x"), "hvp_method"),
        (lambda: m.PSGDKronNewton(distribution="x"), "distribution"),
        (lambda: m.PSGDLRANewton(rank=0), "rank"),
        (lambda: m.PSGDLRANewton(lr_preconditioner=-1.0), "lr_preconditioner"),
    ],
)
def test_arguments_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()
