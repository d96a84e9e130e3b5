"""Operators of the searches against loops written from their papers; and every check fails for a mutant of its operator."""

import dataclasses
import itertools
import math

import pytest
import torch

from evolve.test_mathematics import test_cmaes_is_the_tutorial as check_cmaes
from moduli.evolve import CEM, DE, GA, PSO, cmaes, ga

D = torch.float64


def advance(search, generations=1):
    """Return the search after some generations."""
    for _ in range(generations):
        fitness = (search.ask() - torch.tensor([1.0, -2.0, 0.5], dtype=D)).square().sum(1)
        search.tell(fitness)
    return search


def check_ga_children():
    """Compare a generation of children with loops over tournaments, crossover and mutation, with the same random numbers."""
    search = advance(GA(torch.zeros(3, dtype=D), population=8, tournament=3, mutation=0.4, seed=3))
    x, fitness = search.state["x"].clone(), search.state["fitness"].clone()
    g, n, dim = search._make_generator(), 8, 3

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=D)

    entrants = torch.randint(n, (2 * n, 3), generator=g)
    swap, u = uniform(n, dim) < 0.5, uniform(n, dim)
    step, both, mutates = torch.randn(n, dim, generator=g, dtype=D), uniform(n, 1) < 0.9, uniform(n, dim) < 0.4
    winners = [min(row, key=lambda i: fitness[i]) for row in entrants.tolist()]
    expected = torch.empty(n, dim, dtype=D)
    for i, j in itertools.product(range(n), range(dim)):
        a, b = float(x[winners[i], j]), float(x[winners[n + i], j])
        r = float(u[i, j])
        beta = (2 * r) ** (1 / 11) if r <= 0.5 else (1 / (2 * (1 - r))) ** (1 / 11)
        sign = 1 if swap[i, j] else -1
        child = 0.5 * ((1 + sign * beta) * a + (1 - sign * beta) * b) if both[i, 0] else a
        if mutates[i, j]:
            child += float(x[:, j].std(correction=0)) * float(step[i, j])
        expected[i, j] = child
    torch.testing.assert_close(search.ask(), expected, rtol=1e-12, atol=1e-12)


def check_ga_elites():
    """Check that the two best members survive a generation of worse children."""
    search = advance(GA(torch.zeros(3, dtype=D), population=8, elites=2, seed=3))
    x, fitness = search.state["x"].clone(), search.state["fitness"].clone()
    search.ask()
    search.tell(torch.full((8,), 1e6, dtype=D))
    survivors = {tuple(row) for row in search.state["x"].tolist()}
    for i in fitness.argsort()[:2].tolist():
        assert tuple(x[i].tolist()) in survivors
    assert sorted(search.state["fitness"].tolist())[:2] == sorted(fitness.tolist())[:2]


def check_cem():
    """Check that mean and deviation are those of the best quarter of the members."""
    search = CEM(torch.zeros(3, dtype=D), population=20, elites=0.25, smoothing=0.8, seed=1)
    x = search.ask().clone()
    fitness = (x - torch.tensor([1.0, -2.0, 0.5], dtype=D)).square().sum(1)
    search.tell(fitness)
    best = [row for _, row in sorted(zip(fitness.tolist(), x.tolist(), strict=True))][:5]
    for j in range(3):
        column = [row[j] for row in best]
        mean = sum(column) / 5
        spread = math.sqrt(sum((v - mean) ** 2 for v in column) / 5)
        assert float(search.state["mean"][j]) == pytest.approx(0.8 * mean, rel=1e-12)
        assert float(search.state["std"][j]) == pytest.approx(0.2 * 1.0 + 0.8 * spread, rel=1e-12)


def check_de_base():
    """Check that with rate 1 every trial is x_a + F (x_b - x_c) for three different other members."""
    search = advance(DE(torch.zeros(3, dtype=D), population=6, rate=1.0, scale=0.5, seed=2))
    x, trials = search.state["x"], search.ask()
    for i in range(6):
        others = [k for k in range(6) if k != i]
        candidates = [x[a] + 0.5 * (x[b] - x[c]) for a, b, c in itertools.permutations(others, 3)]
        assert any(torch.allclose(trials[i], one, rtol=1e-12, atol=1e-12) for one in candidates)


def check_de_selection():
    """Check that a trial replaces its member if and only if it is not worse."""
    search = advance(DE(torch.zeros(3, dtype=D), population=6, seed=2))
    x, old, trials = search.state["x"].clone(), search.state["fitness"].clone(), search.ask().clone()
    fitness = old + torch.tensor([-1.0, 1.0, 0.0, 5.0, -2.0, 0.5], dtype=D)
    search.tell(fitness)
    for i, better in enumerate([True, False, True, False, True, False]):
        assert torch.equal(search.state["x"][i], trials[i] if better else x[i])


def check_pso():
    """Compare a step with Clerc and Kennedy's formula, with the same random numbers."""
    search = advance(PSO(torch.zeros(3, dtype=D), population=6, seed=4), 3)
    x, v, own = (search.state[k].clone() for k in ("x", "v", "own"))
    leader = own[int(search.state["own_fitness"].argmin())]
    r1, r2 = search._draw(2).clone()
    phi = 4.1
    chi = 2 / abs(2 - phi - math.sqrt(phi**2 - 4 * phi))
    expected = x + chi * (v + 0.5 * phi * r1 * (own - x) + 0.5 * phi * r2 * (leader - x))
    torch.testing.assert_close(search.ask(), expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(own, x)  # otherwise the cognitive term would be zero


def equalize_weights(real):
    def mutant(dim, population, *, separable=False):
        k = real(dim, population, separable=separable)
        weights = k.weights.clone()
        weights[: k.mu] = 1 / k.mu
        return dataclasses.replace(k, weights=weights)

    return mutant


def remove_cumulation(real):
    def mutant(p_sigma, p_c, *rest):
        return real(0 * p_sigma, 0 * p_c, *rest)

    return mutant


def select_without_elites(self, proposal, fitness):
    self.state["x"], self.state["fitness"] = proposal["x"].clone(), fitness.clone()


def use_member_as_base(real):
    def mutant(n, k, generator, device):
        picks = real(n, k, generator, device)
        picks[0] = torch.arange(n)
        return picks

    return mutant


def always_take_the_trial(self, proposal, fitness):
    self.state["x"], self.state["fitness"] = proposal["x"].clone(), fitness.clone()


def remove_cognition(real):
    def mutant(self, *args, **options):
        real(self, *args, **options)
        self.cognitive = 0.0

    return mutant


def select_everyone(real):
    def mutant(self, *args, **options):
        real(self, *args, **options)
        self.elites = 1.0

    return mutant


CHECKS = [check_ga_children, check_ga_elites, check_cem, check_de_base, check_de_selection, check_pso, check_cmaes]

MUTANTS = {
    "GA, random parents": (ga, "tournament", lambda fitness, entrants: entrants[:, 0], check_ga_children),
    "GA, no crossover": (ga, "sbx", lambda a, b, u, swap, eta: a, check_ga_children),
    "GA, parents swapped in the crossover": (ga, "sbx", lambda a, b, u, swap, eta: ga_sbx(b, a, u, swap, eta), check_ga_children),
    "GA, no elite": (GA, "_select", select_without_elites, check_ga_elites),
    "CEM, no elite": (CEM, "__init__", select_everyone(CEM.__init__), check_cem),
    "DE, wrong base": ("moduli.evolve.de", "distinct", None, check_de_base),
    "DE, no selection": (DE, "_select", always_take_the_trial, check_de_selection),
    "PSO, zero cognition": (PSO, "__init__", remove_cognition(PSO.__init__), check_pso),
    "CMA-ES, no cumulation": (cmaes, "update_paths", remove_cumulation(cmaes.update_paths), check_cmaes),
    "CMA-ES, wrong weights": (cmaes, "constants", equalize_weights(cmaes.constants), check_cmaes),
}  # fmt: skip
ga_sbx = ga.sbx


@pytest.mark.parametrize("check", CHECKS)
def test_operators_equal_their_loops(check):
    check()


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_fails_its_check(name, monkeypatch):
    where, attribute, mutant, check = MUTANTS[name]
    if isinstance(where, str):
        from moduli.evolve import de

        where, mutant = de, use_member_as_base(de.distinct)
    monkeypatch.setattr(where, attribute, mutant)
    with pytest.raises(AssertionError):
        check()
