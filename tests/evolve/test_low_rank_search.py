"""Searches with low-rank noise evaluate members without storing them, with the same results."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.evolve import Distribution, EvaluationWarning, OpenES, search
from moduli.m import _search_link
from moduli.population._low_rank import LowRankTensor

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tanh(X[:, :1] - X[:, 1:2])


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))


def _fitness(net):
    return (net(X) - Y).square().mean()


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("method", ["openes", "ars", "pgpe", "snes", "sepcmaes"])
def test_members_that_are_not_stored_have_the_same_fitness(method, rank, monkeypatch):
    options = {"method": method, "budget": 160, "population": 40, "rank": rank, "seed": 3}
    shared = search(_net(), _fitness, **options)
    monkeypatch.setattr(Distribution, "shares_products", lambda self: False)
    stored = search(_net(), _fitness, **options)
    torch.testing.assert_close(torch.tensor(shared.history), torch.tensor(stored.history), rtol=1e-4, atol=1e-6)
    for name in stored.x:
        torch.testing.assert_close(shared.x[name], stored.x[name], rtol=1e-3, atol=1e-4)


def test_factors_are_the_noise_of_members():
    shapes = [(5, 4), (5,), (3, 2, 4), (1, 3)]
    size = sum(torch.Size(shape).numel() for shape in shapes)
    for antithetic in (True, False):
        es = OpenES(torch.zeros(size), population=10, sigma=0.3, rank=1, shapes=shapes, antithetic=antithetic)
        rows, members = es.ask(), [7, 2, 3]
        parts = [(left @ right.mT if right is not None else left).reshape(3, -1) for left, right in es.factors(members)]
        torch.testing.assert_close(torch.cat(parts, 1), rows[members])


def test_sums_of_many_directions_are_products():
    shapes = [(300, 200), (300,), (40, 30)]
    size = sum(torch.Size(shape).numel() for shape in shapes)
    es = OpenES(torch.zeros(size), population=40, sigma=1.0, rank=2, shapes=shapes, antithetic=False)
    assert not es._noise.kept
    weights = torch.randn(40, generator=torch.Generator().manual_seed(1))
    expected = weights @ torch.cat([es.rows(at, at + 1) for at in range(40)])
    linear, _ = es._noise.sum_weighted(es.state["seed"], es.state["counter"], weights)
    torch.testing.assert_close(linear, expected, rtol=1e-4, atol=1e-4)


def test_bounded_methods_store_their_members():
    bounded = search(_net(), _fitness, method="openes", budget=40, population=20, rank=1, bounds=(-2.0, 2.0))
    assert not bounded.search.shares_products()


def test_a_fitness_that_torch_can_not_vectorise_is_evaluated_one_by_one():
    net = _net()
    with pytest.warns(EvaluationWarning, match="one by one"):
        one_by_one = search(
            copy.deepcopy(net), lambda net: float(_fitness(net)), method="openes", budget=40, population=20, rank=1
        )
    shared = search(copy.deepcopy(net), _fitness, method="openes", budget=40, population=20, rank=1)
    assert one_by_one.value == pytest.approx(shared.value, rel=1e-5)


def test_parameters_outside_the_pattern_do_not_move():
    net = _net()
    before = net[2].weight.detach().clone()
    search(net, _fitness, "0.*", method="openes", budget=40, population=20, rank=1)
    assert torch.equal(net[2].weight, before)


@pytest.mark.parametrize("link", ["OpenES", "ARS", "PGPE", "SNES"])
def test_links_evaluate_models_without_storing_them(link, monkeypatch):
    def train(shared):
        monkeypatch.setattr(Distribution, "shares_products", (lambda self: True) if shared else (lambda self: False))
        net = _net()
        opt = mo.Optimizer(net, getattr(m, link)(population=40, rank=1, seed=3), m.LR(0.05))
        losses = [opt.step(mo.closure(_fitness)) for _ in range(4)]
        return torch.stack([loss.double() for loss in losses]), net

    of = _search_link.Population.of
    calls = []
    monkeypatch.setattr(_search_link.Population, "of", lambda *args: calls.append(1) or of(*args))
    losses, net = train(True)
    assert not calls
    expected, other = train(False)
    assert calls
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_scaled_noise_equals_that_of_stored_members():
    torch.manual_seed(0)
    w, s, a, b = torch.randn(5, 4), torch.rand(5, 4), torch.randn(5, 2), torch.randn(4, 2)
    weight, full = LowRankTensor("w", w, a, b, {}, spread=s), w + s * (a @ b.T)
    x, y, index = torch.randn(3, 4), torch.randn(3, 5), torch.tensor([[0, 4], [2, 2]])
    pairs = [
        (nn.functional.linear(x, weight), x @ full.T),
        (y @ weight, y @ full),
        (x @ weight.T, x @ full.T),
        (weight @ x.T, full @ x.T),
        (nn.functional.embedding(index, weight), full[index]),
        (weight + 1.0, full + 1.0),
        (
            nn.functional.conv1d(
                torch.ones(2, 2, 6), LowRankTensor("c", w.view(5, 2, 2), a, b, {}, spread=s.view(5, 2, 2))
            ),
            nn.functional.conv1d(torch.ones(2, 2, 6), full.view(5, 2, 2)),
        ),
    ]
    for result, expected in pairs:
        torch.testing.assert_close(result, expected)
