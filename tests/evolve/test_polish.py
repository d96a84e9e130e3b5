"""The final descent of `search(polish=True)`, the population sizes of DE, and CMA-ES in NumPy."""

import copy

import pytest
import torch

from moduli.evolve import CMAES, DE, Polish, Reason, search
from moduli.evolve.de import choose_members

D = torch.float64


def rosenbrock(x):
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


def descend(f, x0, **options):
    descent = Polish(x0, value=float(f(x0[None])), **options)
    while not (reason := descent.should_stop()):
        descent.tell(f(descent.ask()))
    return descent, reason


@pytest.mark.parametrize("dim", [2, 5])
def test_it_descends_as_lbfgs_of_scipy(dim):
    optimize = pytest.importorskip("scipy.optimize")
    x0 = torch.full((dim,), -1.0, dtype=D)
    descent, reason = descend(rosenbrock, x0)
    theirs = optimize.minimize(lambda x: float(rosenbrock(torch.from_numpy(x)[None])), x0.numpy(), method="L-BFGS-B")
    assert descent.best_fitness < 1e-8
    assert reason is Reason.SMALL_STEP
    assert descent.evaluations < 2 * theirs.nfev


def test_slopes_are_those_of_the_function():
    x0 = torch.tensor([0.5, -1.0, 2.0], dtype=D)
    descent = Polish(x0, value=float(rosenbrock(x0[None])))
    descent.tell(rosenbrock(descent.ask()))
    point = x0.clone().requires_grad_()
    exact = torch.autograd.grad(rosenbrock(point[None]).sum(), point)[0]
    torch.testing.assert_close(descent.state["gradient"], exact, rtol=1e-5, atol=1e-5)
    # The first trial is a gradient step of length one.
    torch.testing.assert_close(descent.ask()[0], x0 - exact / exact.norm(), rtol=1e-5, atol=1e-5)


def test_points_stay_inside_and_end_at_the_bound():
    centre = torch.tensor([3.0, 0.2, -4.0], dtype=D)
    lower, upper = torch.tensor([-1.0, -1.0, 0.5], dtype=D), torch.tensor([1.0, 1.0, 0.5], dtype=D)
    x0 = torch.tensor([1.0, -0.5, 0.5], dtype=D)
    descent = Polish(x0, value=float((x0 - centre).square().sum()), bounds=(lower, upper))
    while not descent.should_stop():
        x = descent.ask()
        assert bool(((x >= lower) & (x <= upper)).all())
        descent.tell((x - centre).square().sum(1))
    torch.testing.assert_close(descent.best, torch.tensor([1.0, 0.2, 0.5], dtype=D), rtol=0, atol=1e-6)


def test_a_descent_resumes_bit_for_bit():
    x0 = torch.full((4,), -1.0, dtype=D)
    one = Polish(x0, value=float(rosenbrock(x0[None])))
    for _ in range(7):
        one.tell(rosenbrock(one.ask()))
    other = Polish(x0, value=0.0)
    other.load_state_dict(one.state_dict())
    for _ in range(8):
        one.tell(rosenbrock(one.ask()))
        other.tell(rosenbrock(other.ask()))
    assert torch.equal(one.ask(), other.ask())


@pytest.mark.parametrize("method", ["de", "lshade"])
def test_search_polishes_within_the_budget(method):
    evaluated = []

    def fitness(x):
        evaluated.append(1)
        return float((x - 0.3).square() @ torch.tensor([1.0, 10.0, 100.0], dtype=D))

    options = {"method": method, "budget": 500, "bounds": (-2.0, 2.0), "population": 16}
    plain = search(torch.zeros(3, dtype=D), fitness, **options)
    evaluated.clear()
    result = search(torch.zeros(3, dtype=D), fitness, polish=True, **options)
    assert len(evaluated) == result.evaluations <= 500
    assert result.value < 0.01 * plain.value
    assert result.steps == len(result.history)
    assert isinstance(result.search, Polish)
    with pytest.raises(ValueError, match="not kept in checkpoints"):
        search(torch.zeros(3), fitness, polish=True, checkpoint="never")


def test_population_sizes_of_de_by_dimension():
    assert choose_members(5, 10, None) == 50
    assert choose_members(1, 10, None) == 20
    assert choose_members(100_000, 10, None) == 400
    assert choose_members(10, 18, 10_000) == 180
    assert choose_members(10, 18, 1000) == 40
    assert choose_members(10, 10, 8) == 8
    assert DE(torch.zeros(7)).population == 70


def test_the_population_shrinks_to_four():
    make = {"strategy": "current-to-pbest/1", "adapt": "shade", "shrink": True, "max_evaluations": 2000}
    one = DE(torch.ones(3, dtype=D), bounds=(torch.full((3,), -5.0), torch.tensor([5.0, 4.0, 3.0])), **make)
    first, sizes = one.population, []
    while not one.should_stop():
        before = one.state["fitness"].clone()
        x = one.ask()
        one.tell(x.square().sum(1))
        sizes.append(one.population)
        assert one.population == len(one.state["x"]) == len(one.state["fitness"])
        if one.generation > 1:
            wanted = round(first + (4 - first) * one.evaluations / 2000)
            assert one.population == max(4, wanted)
            assert float(one.state["fitness"].min()) <= float(before.min())
        if one.generation == 10:
            other = DE(torch.ones(3, dtype=D), bounds=(torch.full((3,), -5.0), torch.tensor([5.0, 4.0, 3.0])), **make)
            other.load_state_dict(one.state_dict())
            assert torch.equal(one.ask(), other.ask())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 6
    assert one.best_fitness < 1e-6
    with pytest.raises(ValueError, match="give that number"):
        DE(torch.zeros(2), shrink=True)


def test_restarts_begin_in_their_region_which_members_may_leave():
    options = {"restarts": "bipop", "restart_region": (7.0, 8.0), "sigma": 1.0, "seed": 3}
    cmaes = CMAES(torch.zeros(2, dtype=D), **options)
    while cmaes.state["runs"] < 2:
        cmaes.tell(torch.zeros(cmaes.population))  # equal fitness ends every run
    assert bool(((cmaes.mean >= 7) & (cmaes.mean <= 8)).all())
    assert float(cmaes.ask().max()) > 8


def test_the_first_run_belongs_to_neither_regime():
    cmaes = CMAES(torch.zeros(2, dtype=D), restarts="bipop", population=6)
    runs = []
    while len(runs) < 4:
        if cmaes.state["age"] == 0:
            runs.append((cmaes.population, cmaes.state["is_large"]))
        cmaes.tell(torch.zeros(cmaes.population))
    assert runs[:2] == [(6, 1), (12, 1)]
    assert runs[2][1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cmaes_in_numpy_equals_cmaes_in_torch(dtype):
    def make():
        return CMAES(torch.full((4,), 2.0, dtype=dtype), sigma=0.7, seed=1, bounds=(-3.0, 5.0))

    arrays, tensors = make(), make()
    tensors._numpy = False
    for _ in range(25):
        assert arrays._numpy
        x = arrays.ask()
        torch.testing.assert_close(x, tensors.ask(), rtol=1e-3 if dtype is torch.float32 else 1e-9, atol=1e-5)
        fitness = (x.square() * torch.tensor([1.0, 3.0, 10.0, 30.0])).sum(1)
        arrays.tell(fitness)
        tensors.tell(fitness)
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-8, "atol": 1e-10}
    for name in ("mean", "C", "p_sigma", "p_c", "root", "best"):
        torch.testing.assert_close(arrays.state[name], tensors.state[name], **tolerance)
    assert arrays.sigma == pytest.approx(tensors.sigma, rel=1e-2 if dtype is torch.float32 else 1e-8)
    # A copy has separate memory and continues alike.
    other = copy.deepcopy(arrays)
    for each in (arrays, other):
        each.tell(torch.arange(float(each.population)))
    assert torch.equal(arrays.state["C"], other.state["C"])
    assert torch.equal(arrays.ask(), other.ask())


def test_overflow_ends_a_run_without_a_warning():
    cmaes = CMAES(torch.zeros(3, dtype=D), sigma=1e300)
    while not (reason := cmaes.should_stop()):
        cmaes.tell(-(cmaes.ask() / 1e300).abs().sum(1))
    assert reason is Reason.DIVERGED
    assert cmaes.generation < 100
