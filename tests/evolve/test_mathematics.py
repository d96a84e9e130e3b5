"""The formulas of searches against loops, closed forms, invariances, and other libraries."""

import math

import numpy as np
import pytest
import torch

from moduli.evolve import ARS, CMAES, DE, PGPE, SNES, XNES, GuidedES, OpenES, _problem
from moduli.evolve import cmaes as _cmaes
from moduli.evolve import de as _de
from moduli.evolve import pso as _pso
from moduli.evolve._noise import KEPT, SEGMENT, Noise, key
from moduli.evolve._problem import reflect

CPU = torch.device("cpu")


def rotation(n):
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]


# -- noise


@pytest.mark.parametrize(("dim", "directions"), [(7, 5), (1000, 130), (SEGMENT + 5, 3), (SEGMENT // 2, 5)])
def test_noise_drawn_again_equals_stored_noise(dim, directions, monkeypatch):
    stored = Noise(dim, directions, torch.float64, CPU)
    replayed = Noise(dim, directions, torch.float64, CPU)
    stored.kept, replayed.kept = True, False
    whole = stored.rows(3, 10, 0, directions)
    assert torch.equal(whole, replayed.rows(3, 10, 0, directions))
    for start, stop in [(1, 3), (directions - 1, directions), (0, 1)]:
        assert torch.equal(whole[start:stop], replayed.rows(3, 10, start, stop))
    w1, w2 = torch.randn(2, directions, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for a, b in zip(stored.sum_weighted(3, 10, w1, w2), replayed.sum_weighted(3, 10, w1, w2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert not torch.equal(whole, replayed.rows(3, 10 + stored.blocks, 0, directions))
    assert Noise(KEPT, 2, torch.float32, CPU).kept is False


@pytest.mark.parametrize("kind", [OpenES, ARS, PGPE, SNES, GuidedES])
def test_parts_of_long_members_are_the_members(kind):
    # Directions of several blocks each, and too many of them to be stored.
    dim, options = 2 * SEGMENT + 11, {"population": 40, "sigma": 0.3, "seed": 2}
    search = kind(torch.linspace(-1, 1, dim), **options)
    assert not search._noise.kept
    for index in (0, 1, 7, 38):
        row = torch.empty(dim)
        for at, part in search.parts(index):
            row[at : at + len(part)] = part
        assert torch.equal(row, search.rows(index, index + 1)[0])
    if kind is OpenES:
        assert len(list(search.parts(0))) == 3
    before = search.lend_best()
    copy = before.clone()
    fitness = torch.arange(40.0).roll(5)
    rows, weights = search.rows(0, 40), torch.randn(search._noise.directions)
    linear, square = search._noise.sum_weighted(2, 0, weights, weights)
    eps = search._noise.rows(2, 0, 0, search._noise.directions)
    torch.testing.assert_close(linear, weights @ eps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(square, weights @ eps.square(), rtol=1e-4, atol=1e-4)
    search.tell(fitness)
    assert torch.equal(search.best, rows[5])
    assert torch.equal(before, copy)  # the tensor that `lend_best` returned is not written to
    mine, again = search.state["best"], search.rows(3, 4)[0]
    search.tell((torch.arange(40) != 3).float() - 1)
    assert torch.equal(search.best, again)
    if kind is OpenES:
        assert search.state["best"] is mine


def test_tell_by_parts_equals_tell_of_whole_vectors():
    dim = SEGMENT + 100
    for options in ({"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "sgd"}):
        parts, whole = (OpenES(torch.ones(dim), population=80, **options) for _ in range(2))
        whole._estimates = lambda f, s=whole: iter(
            [(slice(0, dim), torch.cat([p.clone() for _, p in OpenES._estimates(s, f)]))]
        )
        for seed in range(2):
            fitness = torch.randn(80, generator=torch.Generator().manual_seed(seed))
            parts.tell(fitness)
            whole.tell(fitness)
        assert torch.equal(parts.mean, whole.mean)
        assert parts.state.get("step") == whole.state.get("step")


def test_low_rank_noise_has_rank_and_variance():
    noise = Noise(30 * 20 + 7, 400, torch.float64, CPU, [(30, 20), (7,)], 2)
    rows = noise.rows(0, 0, 0, 400)
    assert noise.drawn == 2 * 50 + 7
    assert all(torch.linalg.matrix_rank(row[:600].view(30, 20)) == 2 for row in rows[:5])
    assert rows[:, :600].var() == pytest.approx(1, abs=0.05)
    assert rows[:, 600:].var() == pytest.approx(1, abs=0.1)
    noise.kept = False
    w = torch.randn(400, dtype=torch.float64)
    torch.testing.assert_close(noise.sum_weighted(0, 0, w)[0], w @ rows)
    for shapes, rank, error in [
        (None, 2, "needs the shapes"),
        ([(3, 3)], 0, "at least 1"),
        ([(3, 3)], 1, "hold 9 numbers"),
    ]:
        with pytest.raises(ValueError, match=error):
            Noise(10, 2, torch.float64, CPU, shapes, rank)


def test_seeds_of_one_run_never_repeat():
    assert len({key(7, counter) for counter in range(100_000)}) == 100_000
    assert len({key(seed, 0) for seed in range(10_000)}) == 10_000


def test_noise_is_standard_normal():
    x = Noise(1000, 500, torch.float32, CPU).rows(1, 0, 0, 500).double()
    assert abs(float(x.mean())) < 5 / math.sqrt(x.numel())
    assert abs(float(x.var()) - 1) < 5 * math.sqrt(2 / x.numel())
    assert abs(float((x[0] * x[1]).mean())) < 0.2


# -- ranks and bounds


def test_ranks_by_a_loop():
    f = torch.tensor([3.0, 1.0, math.inf, 1.0, -2.0, math.inf], dtype=torch.float64)
    expected = [sum((g < v) + 0.5 * (g == v) for g in f.tolist()) - 0.5 for v in f.tolist()]
    assert _problem.centre_ranks(f).tolist() == pytest.approx([r / 5 - 0.5 for r in expected])
    n = len(f)
    raw = [max(0.0, math.log(n / 2 + 1) - math.log(k)) for k in range(1, n + 1)]
    u = [v / sum(raw) - 1 / n for v in raw]
    got = _problem.nes_utilities(f).tolist()
    assert got == pytest.approx(
        [u[3], (u[1] + u[2]) / 2, (u[4] + u[5]) / 2, (u[1] + u[2]) / 2, u[0], (u[4] + u[5]) / 2]
    )
    assert sum(got) == pytest.approx(0)


def test_reflection_is_a_triangle_wave():
    lower, upper = torch.tensor([-1.0]), torch.tensor([2.0])
    for x in torch.linspace(-20, 20, 201).double():
        y = float(x)
        while not -1 <= y <= 2:
            y = -2 - y if y < -1 else 4 - y
        assert float(reflect(x[None], lower.double(), upper.double())) == pytest.approx(y, abs=1e-9)


# -- gradient estimates against the closed form of a quadratic


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("kind", [OpenES, PGPE, GuidedES])
def test_gradients_of_a_quadratic(kind, antithetic):
    if kind is GuidedES and not antithetic:
        pytest.skip("GuidedES is antithetic")
    A = torch.diag(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    x0 = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    estimates = []
    for seed in range(200):
        search = kind(x0, population=20, sigma=0.3, shape="raw", antithetic=antithetic, seed=seed)
        x = search.ask()
        estimates.append(search.gradient(torch.einsum("ni,ij,nj->n", x, A, x) / 2))
    estimates = torch.stack(estimates)
    # E ∇f(x + σε) = A x for a quadratic.
    expected = A @ x0
    error = (estimates.mean(0) - expected) / (estimates.std(0) / math.sqrt(len(estimates)))
    assert float(error.abs().max()) < 4


def test_ars_by_a_loop():
    search = ARS(torch.zeros(4, dtype=torch.float64), population=12, top=3, sigma=0.1)
    x = search.ask()
    f = (x - torch.arange(4.0)).square().sum(1)
    plus, minus, delta = f[0::2], f[1::2], x[0::2] / 0.1
    best = sorted(range(6), key=lambda i: float(min(plus[i], minus[i])))[:3]
    deviation = torch.tensor([float(v) for i in best for v in (plus[i], minus[i])], dtype=torch.float64).std(
        correction=0
    )
    expected = sum((plus[i] - minus[i]) * delta[i] for i in best) / (3 * deviation)
    torch.testing.assert_close(search.gradient(f), expected)


# -- invariances


@pytest.mark.parametrize("kind", [OpenES, PGPE, SNES, XNES, CMAES, GuidedES])
def test_only_the_order_of_fitness_counts(kind):
    a, b = (kind(torch.ones(4, dtype=torch.float64), population=10) for _ in range(2))
    for _ in range(20):
        f = a.ask().square().sum(1)
        a.tell(f)
        b.tell(torch.exp(f) * 7 - 3)
    assert torch.equal(a.mean, b.mean)


def test_snes_is_invariant_to_the_scale_of_coordinates():
    scale = torch.tensor([1.0, 2.0, 0.25], dtype=torch.float64)
    a = SNES(torch.ones(3, dtype=torch.float64), sigma=1.0)
    b = SNES(scale.clone(), sigma=scale)
    for _ in range(20):
        a.tell(a.ask().square().sum(1))
        b.tell((b.ask() / scale).square().sum(1))
    torch.testing.assert_close(a.mean * scale, b.mean)


@pytest.mark.parametrize("kind", [CMAES, XNES])
def test_a_rotated_problem_has_a_rotated_path(kind):
    R, x0 = rotation(5), torch.arange(5, dtype=torch.float64)
    weights = torch.tensor([1.0, 10.0, 100.0, 3.0, 30.0], dtype=torch.float64)
    a, b = kind(x0, population=10, sigma=0.5), kind(R @ x0, population=10, sigma=0.5)
    plain = b._noise.rows
    # Rotate the samples, so that both searches draw the same ones.
    b._noise.rows = lambda *args: plain(*args) @ R.mT
    for _ in range(30):
        a.tell((a.ask().square() * weights).sum(1))
        b.tell(((b.ask() @ R).square() * weights).sum(1))
    torch.testing.assert_close(a.mean @ R.mT, b.mean, rtol=1e-6, atol=1e-8)


def test_cholesky_and_eigen_are_one_distribution():
    C = rotation(6) @ torch.diag(torch.arange(1.0, 7).double()) @ rotation(6).mT
    for root in (_cmaes.symmetric_root(C)[0], _cmaes.cholesky_root(C)[0]):
        torch.testing.assert_close(root @ root.mT, C)
    indefinite = torch.diag(torch.tensor([1.0, -1e-18, 1.0], dtype=torch.float64))
    A, thin, _ = _cmaes.cholesky_root(indefinite)
    assert thin > 0
    assert torch.allclose(A @ A.mT, indefinite, atol=1e-12)
    with pytest.raises(ArithmeticError, match="not finite"):
        _cmaes.cholesky_root(torch.full((2, 2), math.nan))


def test_bipop_alternates_between_both_regimes():
    assert _cmaes.bipop(10, 10, 100, 200, 0.5, 0.5) == (True, 20, 1.0)
    large, size, shrink = _cmaes.bipop(10, 80, 300, 200, 0.5, 0.5)
    assert (large, size) == (False, math.floor(10 * 4**0.25))
    assert shrink == pytest.approx(0.1)


@pytest.mark.parametrize("restarts", ["ipop", "bipop"])
def test_restarts_find_an_optimum_that_one_run_misses(restarts):
    def rastrigin(x):
        return 10 * x.shape[1] + (x.square() - 10 * torch.cos(2 * math.pi * x)).sum(1)

    search = CMAES(
        torch.full((3,), 3.0, dtype=torch.float64),
        sigma=1.0,
        restarts=restarts,
        target=1e-8,
        bounds=(-5.0, 5.0),
        seed=2,
    )
    while not (reason := search.should_stop()):
        search.tell(rastrigin(search.ask()))
    assert str(reason) == "The target fitness was reached."
    assert search.state["runs"] > 0
    if restarts == "ipop":
        assert search.population == 7 * 2 ** search.state["runs"]


# -- CMA-ES against the tutorial and the package `cmaes`


def plain_cmaes(mean, sigma, populations, fitness_of):
    """Return (mean, σ, C, p_σ, p_c) after each generation, by the tutorial in NumPy with loops.

    Args:
        mean: The start.
        sigma: The first step size.
        populations: The members of each generation.
        fitness_of: The fitness of one member.
    """
    n, lam = len(mean), len(populations[0])
    w0 = np.array([math.log((lam + 1) / 2) - math.log(i) for i in range(1, lam + 1)])
    mu = lam // 2
    mueff, mueffn = w0[:mu].sum() ** 2 / (w0[:mu] ** 2).sum(), w0[mu:].sum() ** 2 / (w0[mu:] ** 2).sum()
    c1 = 2 / ((n + 1.3) ** 2 + mueff)
    cmu = min(1 - c1 - 1e-8, 2 * (mueff - 2 + 1 / mueff) / ((n + 2) ** 2 + mueff))
    alpha = min(1 + c1 / cmu, 1 + 2 * mueffn / (mueff + 2), (1 - c1 - cmu) / (n * cmu))
    w = np.where(w0 >= 0, w0 / w0[w0 > 0].sum(), w0 * alpha / abs(w0[w0 < 0].sum()))
    cs = (mueff + 2) / (n + mueff + 5)
    ds = 1 + 2 * max(0, math.sqrt((mueff - 1) / (n + 1)) - 1) + cs
    cc = (4 + mueff / n) / (n + 4 + 2 * mueff / n)
    chi = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))
    C, ps, pc, out = np.eye(n), np.zeros(n), np.zeros(n), []
    for g, x in enumerate(populations, 1):
        values, B = np.linalg.eigh(C)
        inverse = B @ np.diag(values**-0.5) @ B.T
        x = x[np.argsort([fitness_of(row) for row in x], kind="stable")]
        y = (x - mean) / sigma
        yw = sum(w[i] * y[i] for i in range(mu))
        mean = mean + sigma * yw
        ps = (1 - cs) * ps + math.sqrt(cs * (2 - cs) * mueff) * inverse @ yw
        h = np.linalg.norm(ps) / math.sqrt(1 - (1 - cs) ** (2 * (g + 1))) < (1.4 + 2 / (n + 1)) * chi
        pc = (1 - cc) * pc + h * math.sqrt(cc * (2 - cc) * mueff) * yw
        wi = [w[i] if w[i] >= 0 else w[i] * n / (np.linalg.norm(inverse @ y[i]) ** 2 + 1e-8) for i in range(lam)]
        C = (1 + c1 * (1 - h) * cc * (2 - cc) - c1 - cmu * w.sum()) * C + c1 * np.outer(pc, pc)
        C = C + cmu * sum(wi[i] * np.outer(y[i], y[i]) for i in range(lam))
        sigma = sigma * math.exp(cs / ds * (np.linalg.norm(ps) / chi - 1))
        out.append((mean, sigma, C, ps, pc))
    return out


def ellipsoid(x):
    return (x**2 * 10.0 ** np.arange(x.shape[-1])).sum(-1)


def trace_cmaes(generations=40, n=5, population=12):
    search = CMAES(torch.full((n,), 2.0, dtype=torch.float64), sigma=0.7, population=population, factor="eigen")
    asked, states = [], []
    for _ in range(generations):
        x = search.ask().numpy().copy()
        search.tell(torch.from_numpy(ellipsoid(x)))
        asked.append(x)
        s = search.state_dict()
        states.append([s[k] if k == "sigma" else s[k].numpy() for k in ("mean", "sigma", "C", "p_sigma", "p_c")])
    return asked, states


def test_cmaes_is_the_tutorial():
    asked, states = trace_cmaes()
    for ours, theirs in zip(states, plain_cmaes(np.full(5, 2.0), 0.7, asked, ellipsoid), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * np.abs(b).max())


def test_cmaes_has_the_statistics_of_cmaes():
    cmaes = pytest.importorskip("cmaes", reason="a peer, used as an oracle where it is installed")
    asked, states = trace_cmaes()
    other = cmaes.CMA(mean=np.full(5, 2.0), sigma=0.7, population_size=12)
    for x, (mean, sigma, C, p_sigma, p_c) in zip(asked, states, strict=True):
        # `ask` factors its covariance, which `tell` then uses.
        other.ask()
        other.tell([(row, float(ellipsoid(row))) for row in x])
        np.testing.assert_allclose(other.mean, mean, rtol=1e-8, atol=1e-10)
        assert other._sigma == pytest.approx(sigma, rel=1e-8)
        np.testing.assert_allclose(other._C, C, rtol=1e-8, atol=1e-8 * np.abs(C).max())
        np.testing.assert_allclose(other._p_sigma, p_sigma, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(other._pc, p_c, rtol=1e-8, atol=1e-8)


# -- PSO and DE by loops


def test_the_swarm_by_a_loop():
    g = torch.Generator().manual_seed(0)
    x, v, own, r1, r2 = torch.rand(5, 6, 3, generator=g, dtype=torch.float64)
    best = own[2]
    expected = torch.empty(6, 3, dtype=torch.float64)
    for i in range(6):
        for j in range(3):
            pull = 1.2 * r1[i, j] * (own[i, j] - x[i, j]) + 0.8 * r2[i, j] * (best[j] - x[i, j])
            expected[i, j] = 0.6 * v[i, j] + pull
    torch.testing.assert_close(_pso.swarm_velocity(x, v, own, best, r1, r2, 0.6, 1.2, 0.8), expected)
    roles = [[role] for role in (x, v, own, best.expand(6, 3).contiguous(), r1, r2)]
    moved, faster = _pso.move(*roles, -math.inf, math.inf, 0.6, 1.2, 0.8)
    torch.testing.assert_close(faster[0], expected)
    torch.testing.assert_close(moved[0], x + expected)
    walls = [torch.full((6, 3), wall, dtype=torch.float64) for wall in (0.2, 0.9)]
    inside, really = _pso.move(*roles, *([wall] for wall in walls), 0.6, 1.2, 0.8)
    assert torch.equal(inside[0], moved[0].clamp(0.2, 0.9))
    torch.testing.assert_close(really[0], inside[0] - x)
    fitness = torch.tensor([5.0, 1.0, 4.0, 0.5, 4.0, 9.0], dtype=torch.float64)
    assert _pso.neighbourhood_best(fitness, 1).tolist() == [1, 1, 3, 3, 3, 4]
    assert _pso.neighbourhood_best(fitness, 2).tolist() == [1, 3, 3, 3, 3, 3]
    draws = torch.rand(3, 6, 3, generator=g, dtype=torch.float64)
    informed = _pso.informed_velocity(x, v, own, draws, 1, 0.7, 4.1, torch.empty_like(x))
    for i in range(6):
        total = sum(4.1 * draws[k][i] * (own[(i + k - 1) % 6] - x[i]) for k in range(3)) / 3
        torch.testing.assert_close(informed[i], 0.7 * (v[i] + total))


def test_distinct_parents_are_distinct_and_fair():
    g = torch.Generator().manual_seed(0)
    seen = torch.zeros(6, 6)
    for _ in range(400):
        picks = _de.distinct(6, 3, g, CPU)
        members = torch.cat([torch.arange(6)[None], picks])
        assert all(len(set(column.tolist())) == 4 for column in members.mT)
        seen[torch.arange(6).repeat(3), picks.flatten()] += 1
    off = seen[~torch.eye(6, dtype=torch.bool)]
    assert float((off - off.mean()).abs().max()) < 5 * math.sqrt(float(off.mean()))


def test_one_pass_is_mutation_crossover_and_midpoint():
    g = torch.Generator().manual_seed(0)
    base, a, b, x = torch.randn(4, 7, 5, generator=g, dtype=torch.float64)
    draw = _pso.uniforms(torch.empty(7, 5, dtype=torch.float64), g)
    lower, upper = (torch.full((7, 5), wall, dtype=torch.float64) for wall in (-0.5, 0.7))
    limit = 0.6
    expected = torch.where(draw < limit, base + 0.7 * (a - b), x)
    one = _de.crossed([base], [a], [b], [x], [draw], -math.inf, math.inf, 0.7, limit)[0]
    torch.testing.assert_close(one, expected)
    below, above = expected < -0.5, expected > 0.7
    expected = torch.where(below, (x - 0.5) / 2, torch.where(above, (x + 0.7) / 2, expected))
    for walls in ([-0.5, 0.7], [[lower], [upper]]):
        inside = _de.crossed([base], [a], [b], [x], [draw], *walls, 0.7, limit)[0]
        torch.testing.assert_close(inside, expected)
    numbers = ([torch.full_like(x, number)] for number in (0.7, limit))
    each = _de.crossed([base], [a], [b], [x], [draw], [lower], [upper], *numbers)[0]
    torch.testing.assert_close(each, expected)


def test_uniform_numbers_have_their_distribution():
    for columns in (1000, 1001):
        u = _pso.uniforms(torch.empty(300, columns), torch.Generator().manual_seed(0))
        for chance in (0.1, 0.5, 0.9):
            share = float((u < chance).double().mean())
            assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / u.numel())
        assert not bool((u < 0.0).any())
        assert bool((u < 1.0).all())
    u = _pso.uniforms(torch.empty(300, 1000), torch.Generator().manual_seed(0)).double()
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * u.numel())
    assert abs(float(u.var()) - 1 / 12) < 1e-3
    assert abs(float(torch.corrcoef(u[:2])[0, 1])) < 0.2


def test_adaptation_by_hand():
    cr, f = torch.tensor([0.2, 0.6]).double(), torch.tensor([0.5, 1.0]).double()
    assert _de.success_means(cr, f, torch.full((2,), 0.5).double()) == pytest.approx((0.4, 1.25 / 1.5))
    weights = _de.gain_weights(torch.tensor([3.0, 1.0]).double())
    expected = 0.75 * 0.2 + 0.25 * 0.6, (0.75 * 0.25 + 0.25) / (0.75 * 0.5 + 0.25)
    assert _de.success_means(cr, f, weights) == pytest.approx(expected)
    assert _de.gain_weights(torch.full((2,), math.inf).double()).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("adapt", "share"), [("jade", 0.1), ("shade", 1.0)])
def test_means_follow_successful_settings(adapt, share):
    search = DE(torch.zeros(3), population=8, strategy="current-to-pbest/1", adapt=adapt, learning=0.1, seed=1)
    search.tell([100.0] * 8)
    drawn = search._proposal()
    search.tell([0.0, 0.0] + [1000.0] * 6)
    rate, scale = drawn["rate"][:2], drawn["scale"][:2]
    assert float(search.state["rates"][0]) == pytest.approx((1 - share) * 0.5 + share * float(rate.mean()))
    lehmer = float(scale.square().sum() / scale.sum())
    assert float(search.state["scales"][0]) == pytest.approx((1 - share) * 0.5 + share * lehmer)
    assert search.state["slot"] == (1 if adapt == "shade" else 0)


def test_the_steps_of_evox_pso_under_its_random_numbers(monkeypatch):
    evox = pytest.importorskip("evox.algorithms", reason="a peer, used as an oracle where it is installed")
    torch.manual_seed(0)
    other = evox.PSO(8, -10 * torch.ones(3), 10 * torch.ones(3), w=0.6, phi_p=1.2, phi_g=0.8)
    other.evaluate = lambda x: x.square().sum(1)
    other.init_step()
    for _ in range(10):
        x, v = other.pop.clone(), other.velocity.clone()
        drawn, rand = [], torch.rand
        monkeypatch.setattr(torch, "rand", lambda *a, **k: drawn.append(rand(*a, **k)) or drawn[-1])
        other.step()
        monkeypatch.setattr(torch, "rand", rand)
        matrices = [d for d in drawn if d.shape == x.shape]
        assert len(matrices) == 2
        # EvoX updates the best positions before it moves, and evaluates afterwards.
        own, best = other.local_best_location, other.global_best_location
        # EvoX draws the social random numbers first.
        mine = _pso.swarm_velocity(x, v, own, best, *reversed(matrices), 0.6, 1.2, 0.8)
        torch.testing.assert_close((x + mine).clamp(-10, 10), other.pop)


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(("base", "strategy"), [("rand", "rand/1"), ("best", "best/1")])
def test_the_steps_of_evox_de_under_its_random_numbers(base, strategy, monkeypatch):
    evox = pytest.importorskip("evox.algorithms", reason="a peer, used as an oracle where it is installed")

    def fitness(x):
        return (x.square() * torch.tensor([1.0, 10.0, 3.0, 0.3])).sum(1)

    torch.manual_seed(0)
    # No member reaches these bounds, at which EvoX clamps and moduli goes halfway.
    far, options = 1e6 * torch.ones(4), {"mean": torch.zeros(4), "stdev": torch.ones(4)}
    other = evox.DE(12, -far, far, base, differential_weight=0.7, cross_probability=0.6, **options)
    other.evaluate = fitness
    other.init_step()
    mine = DE(torch.zeros(4), population=12, initial=other.pop, strategy=strategy, scale=0.7, rate=0.6)
    mine.tell(fitness(mine.ask()))
    for _ in range(40):
        picks, draws = [], []
        with monkeypatch.context() as patch:
            randint, rand = torch.randint, torch.rand
            patch.setattr(torch, "randint", lambda *a, _r=randint, _p=picks, **k: _p.append(_r(*a, **k)) or _p[-1])
            patch.setattr(torch, "rand", lambda *a, _r=rand, _d=draws, **k: _d.append(_r(*a, **k)) or _d[-1])
            other.step()
        *parents, forced = picks
        parents = parents if base == "rand" else [parents[0], *parents]
        with monkeypatch.context() as patch:
            patch.setattr(_de, "distinct", lambda *a, _p=parents: torch.stack(_p))
            patch.setattr("moduli.evolve.de.uniforms", lambda *a, _d=draws[0]: _d.clone())
            patch.setattr(torch, "randint", lambda *a, _f=forced, **k: _f[:, 0])
            mine.tell(fitness(mine.ask()))
        torch.testing.assert_close(mine.state["x"], other.pop)
        assert mine.best_fitness == pytest.approx(float(other.fit.min()), rel=1e-9)
    assert mine.best_fitness < 1e-2
