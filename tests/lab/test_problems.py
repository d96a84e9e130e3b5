"""Every problem: reproducible starts, a correct optimum, and gradients of its loss."""

import pytest
import torch

from moduli.lab import problems
from moduli.lab.catalogue import scatter

NAMES = problems.names()


@pytest.fixture(params=NAMES)
def problem(request):
    problem_of_name = problems.get(request.param)
    for name in problem_of_name.requires:
        pytest.importorskip(name)
    return problem_of_name


def values(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def test_a_seed_decides_the_start(problem):
    state = torch.get_rng_state()
    first, again, other = (values(problem.model(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first) == problem.dimension
    assert torch.equal(state, torch.get_rng_state()), "making a model must not touch torch's randomness"


def test_the_optimum_is_below_the_start(problem):
    model = problem.model(0)
    assert problem.optimum is not None
    assert problem.measure(model) > problem.optimum + problem.tolerance
    assert problem.name in NAMES
    assert problem.summary
    assert problem.tags


def test_gradients_are_those_of_the_loss(problem):
    """The central difference along the gradient equals its squared norm."""
    problem.resample(torch.Generator().manual_seed(0))
    model = problem.model(1).double()
    single = problem.name in ("digits-mlp", "spirals") or problem.name.startswith("mnist1d")
    loss = None if single else problem.loss(model)
    if loss is None:
        pytest.skip("its data are single precision")
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    size = sum(float((g**2).sum()) for g in grads)
    length = 1e-9 if problem.name.startswith("nist-") else 1e-6  # some of their parameters are as small as 1e-7
    step = length / max(size, 1e-12) ** 0.5

    def move(length):
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p += length * g
            return float(problem.loss(model))

    # A central difference cancels the curvature.
    ahead, behind = move(step), move(-2 * step)
    assert (ahead - behind) / (2 * step * size) == pytest.approx(1, rel=2e-2)


def test_between_samples_the_loss_is_the_same(problem):
    model = problem.model(0)
    generator = torch.Generator().manual_seed(0)
    problem.resample(generator)
    first, again = problem.loss(model).item(), problem.loss(model).item()
    problem.resample(generator)
    assert first == again
    assert (problem.loss(model).item() != first) == problem.noisy


def test_members_of_a_population_have_the_loss_of_the_model(problem):
    if problem.name == "text":
        pytest.skip("costs seconds")
    problem.resample(torch.Generator().manual_seed(0))
    model = problem.model(0)
    population = scatter(model, size=3, spread=0.01, seed=0)
    losses = population.losses(problem.loss)
    assert losses[0].item() == pytest.approx(problem.loss(model).item(), rel=1e-5)
    assert len({round(value, 12) for value in losses.tolist()}) == 3


@pytest.mark.parametrize("name", [name for name in NAMES if problems.get(name).window])
def test_minimisers_have_the_optimum_and_are_in_the_window(name):
    problem = problems.get(name)
    points = torch.tensor(problem.minimisers, dtype=torch.float64, requires_grad=True)
    assert len(points)
    values = problem.landscape(points)
    assert torch.allclose(values, torch.full_like(values, problem.optimum), atol=1e-9, rtol=0)
    x0, x1, y0, y1 = problem.window
    assert all(x0 < x < x1 and y0 < y < y1 for x, y in problem.minimisers)
    x, y = torch.linspace(x0, x1, 101).double(), torch.linspace(y0, y1, 101).double()
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
    assert problem.landscape(grid).min() >= problem.optimum - 1e-9
    one = problems.Point(grid[3, 7])
    assert problem.measure(one) == problem.landscape(grid)[3, 7].item()


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name[-1].isdigit() and not name.startswith(("noisy", "nist"))]
)
def test_scalable_functions_have_their_optimum_at_the_known_point(name):
    where = {"rosenbrock": 1.0, "levy": 1.0, "absolute": 1.0, "styblinski-tang": -2.903534027771177}
    problem = problems.get(name)
    family = name.rpartition("-")[0]
    point = torch.full((problem.dimension,), where.get(family, 0.0), dtype=torch.float64)
    assert problem.measure(problems.Point(point)) == pytest.approx(problem.optimum, abs=1e-9)
    near = point + 0.01 * torch.randn(200, problem.dimension, generator=torch.Generator().manual_seed(0)).double()
    assert problem.formula(near).min() > problem.optimum


def test_names_have_sizes_and_unknown_names_are_refused():
    assert problems.get("rosenbrock-7").dimension == 7
    for name, message in [("rosenbrok", "rosenbrock"), ("sphere-1", "from 2"), ("qqqqqq", "there are")]:
        with pytest.raises(problems.UnknownProblemError, match=message):
            problems.get(name)
    with pytest.raises(ValueError, match="multiple of 4"):
        problems.get("powell-6")
    with pytest.raises(TypeError, match="no landscape"):
        problems.get("bands").landscape(torch.zeros(2))


def test_the_exact_solutions_of_physics_and_least_squares():
    bands = problems.get("bands")
    from moduli.lab.problems._physics import TRUE_HOPPINGS, TightBinding

    truth = TightBinding(bands.matrices, torch.tensor(TRUE_HOPPINGS, dtype=torch.float64))
    assert bands.measure(truth) == 0
    state = problems.get("ground-state")
    matrix = state.hamiltonian.data
    energy, vectors = torch.linalg.eigh(matrix)
    from moduli.lab.problems._physics import TrialState

    assert state.measure(TrialState(state.hamiltonian, vectors[:, 0])) == pytest.approx(energy[0].item(), abs=1e-12)
    # The literature's value for H = p^2/2 + x^2/2 + x^4 with an infinite basis is 0.803770651...
    assert state.optimum == pytest.approx(0.8037707, abs=1e-4)


def test_mnist1d_has_the_statistics_of_the_paper():
    x, y = problems.make_mnist1d()
    assert (x.shape, x.dtype) == ((4000, 40), torch.float32)
    assert y.bincount().tolist() == [400] * 10
    assert x.mean().abs() < 1e-5
    assert abs(float(x.std(correction=0)) - 1) < 1e-5
    assert torch.equal(problems.make_mnist1d.__wrapped__(50)[0], problems.make_mnist1d.__wrapped__(50)[0])
    other, _ = problems.make_mnist1d(50, seed=1)
    assert not torch.equal(other, problems.make_mnist1d(50)[0])
    # Digits are at random positions, so nearest neighbours classify poorly.
    a, b, label = x[:1000], x[1000:], y[1000:]
    nearest = label[torch.cdist(a, b).argmin(1)]
    plain = float((nearest == y[:1000]).float().mean())
    assert 0.3 < plain < 0.75  # the paper has 68 % for an MLP, 94 % for a convolutional network, and 10 % is chance


def test_curves_are_moved_scaled_and_sheared_as_in_the_paper(monkeypatch):
    """Without noise and shear, an example is its template, stretched by at most two fifths and shifted cyclically."""
    from moduli.lab.problems import _mnist1d as module

    for name in ("SHEAR", "CORRELATED", "INDEPENDENT", "SCALE"):
        monkeypatch.setattr(module, name, 0.0)
    x, y = module.make_mnist1d.__wrapped__(200)
    zero = x.mode(1).values[:, None]  # most of an example is padding
    inside = (x - zero).abs() > 1e-4
    assert int(inside.sum(1).min()) >= 2
    assert int(inside.sum(1).max()) <= 12 / 48 * 40 + 3
    heights = (x - zero).abs().amax(1)
    for digit in range(10):
        own = heights[y == digit]
        assert float(own.max() / own.min()) < 1.6  # sampling at 40 places cuts peaks


def test_an_ill_conditioned_logistic_regression_has_a_correct_optimum():
    problem = problems.get("logistic-ill")
    w = problem.solution.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss(lambda: w), w)
    assert gradient.abs().max() < 1e-12
    assert problem.measure(lambda: problem.solution) == problem.optimum
    assert problem.condition > 1e5
    assert problem.measure(problem.model(0)) > problem.optimum + problem.tolerance


@pytest.mark.parametrize(("rate", "steps"), [(0.1, 3), (0.5, 40), (1.5, 200)])
def test_a_noisy_quadratic_has_the_mean_of_its_closed_form(rate, steps):
    problem = problems.NoisyQuadratic(6, 10.0, 0.3)
    start = torch.arange(1.0, 7.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = start.repeat(20_000, 1)
    for _ in range(steps):
        centre = problem.noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = x - rate * problem.curvature * (x - centre)
    values = 0.5 * (problem.curvature * x**2).sum(-1)
    error = float(values.std()) / len(x) ** 0.5
    assert abs(float(values.mean()) - problem.expected_value(start, rate, steps)) < 4 * error + 1e-12


@pytest.mark.parametrize("name", ["mnist1d", "mnist1d-conv", "mnist1d-autoencoder", "digits-mlp", "text"])
def test_the_loss_of_batches_is_near_that_of_the_whole_sample(name):
    problem, generator = problems.get(name), torch.Generator().manual_seed(3)
    model = problem.model(0)
    with torch.no_grad():
        losses = []
        for _ in range(30):
            problem.resample(generator)
            losses.append(float(problem.loss(model)))
    mean, spread = sum(losses) / 30, max(losses) - min(losses)
    assert spread > 0
    assert abs(mean - problem.measure(model)) < 0.5 * spread
