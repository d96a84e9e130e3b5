"""Laws for every search."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evolve.searches import CATEGORICAL, INTEGER, SEARCHES, find_least_population, sphere
from moduli.evolve import Reason, Search

every = pytest.mark.parametrize("name", SEARCHES)


def make(name, dim=3, dtype=torch.float64, **options):
    options.setdefault("population", 12)
    return SEARCHES[name](torch.linspace(0.5, 1.5, dim, dtype=dtype), **options)


def run(search, generations, fitness=sphere):
    for _ in range(generations):
        search.tell(fitness(search.ask()))
    return search


def assert_same(a, b):
    assert a.keys() == b.keys()
    for k, v in a.items():
        if isinstance(v, torch.Tensor):
            assert torch.equal(v, b[k]), k
        else:
            assert v == b[k] or (math.isnan(v) and math.isnan(b[k])), k


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_improves_and_has_the_documented_attributes(name, dtype):
    search = make(name, dtype=dtype)
    assert isinstance(search, Search)
    assert search.best_fitness == math.inf
    x = search.ask()
    assert x.shape == (12, 3)
    assert x.dtype == dtype
    assert torch.equal(x, search.ask())
    first = float(sphere(x).min())
    run(search, 60)
    assert search.best_fitness < first
    assert search.best_fitness < 0.3
    assert search.best_fitness == float(sphere(search.best[None]))
    assert search.mean.shape == (3,)
    assert search.mean.dtype == dtype
    assert search.generation == 60
    assert search.evaluations >= 60 * 12


@every
def test_rows_are_rows_of_the_whole(name):
    search = run(make(name, population=14), 3)
    x = search.ask()
    for start, stop in [(0, 14), (3, 4), (2, 3), (5, 9), (13, 14), (4, 4)]:
        torch.testing.assert_close(search.rows(start, stop), x[start:stop], rtol=1e-14, atol=1e-14)
    with pytest.raises(IndexError, match="members 3 to 15 of a population of 14"):
        search.rows(3, 15)


@every
@pytest.mark.parametrize("stop", [0, 1, 7])
@pytest.mark.parametrize("asked", [False, True])
def test_resumed_is_uninterrupted(name, stop, asked):
    whole = run(make(name, seed=3), 15)
    part = run(make(name, seed=3), stop)
    if asked:
        part.ask()
    state = pickle.loads(pickle.dumps(part.state_dict()))
    other = run(make(name, seed=99), 2)
    other.load_state_dict(state)
    run(other, 15 - stop)
    assert_same(whole.state_dict(), other.state_dict())
    assert torch.equal(whole.ask(), other.ask())


@every
def test_copies_of_states_are_independent(name):
    search = run(make(name), 4)
    twin = copy.deepcopy(search.state_dict())
    run(search, 3)
    again = make(name)
    again.load_state_dict(twin)
    assert_same(run(again, 3).state_dict(), search.state_dict())


@every
def test_the_global_generator_does_not_change(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run(make(name), 3)
    assert torch.equal(torch.get_rng_state(), before)


@every
def test_equal_seeds_give_equal_members(name):
    a, b, c = make(name, seed=1), make(name, seed=1), make(name, seed=2)
    assert torch.equal(a.ask(), b.ask())
    assert not torch.equal(a.ask(), c.ask())
    assert not torch.equal(make(name, seed=1 + 2**32).ask(), a.ask())


@every
@pytest.mark.parametrize("population", [1, 2, 3, 4, 5, 8])
def test_every_size_works_or_is_refused(name, population):
    if population < find_least_population(name) or (name == "ARS" and population % 2):
        with pytest.raises(ValueError, match="at least|even"):
            make(name, population=population)
        return
    search = run(make(name, population=population), 12)
    assert bool(search.mean.isfinite().all())
    assert bool(search.ask().isfinite().all())


@every
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -math.inf])
def test_fitness_without_information_leaves_a_finite_mean(name, value):
    search = make(name)
    x0 = search.mean
    for _ in range(14):
        search.tell(torch.full((search.population,), value))
    assert bool(search.mean.isfinite().all())
    assert bool(search.ask().isfinite().all())
    reason = search.should_stop()
    if math.isnan(value) or value == math.inf:
        assert reason is Reason.NOT_FINITE
        assert search.best_fitness == math.inf
    if not name.startswith(("PSO", "DE", "JADE", "SHADE", "GA", "CMAES")):
        assert torch.equal(search.mean, x0)


@every
def test_some_bad_members_do_not_matter(name):
    search = make(name)

    def fitness(x):
        f = sphere(x)
        f[1], f[4] = math.nan, math.inf
        return f

    run(search, 60, fitness)
    assert search.best_fitness < 0.5
    assert bool(search.mean.isfinite().all())


@every
def test_flat_fitness_ends_with_a_reason(name):
    search = make(name, population=12)
    for _ in range(60):
        if search.should_stop():
            break
        search.tell(torch.ones(search.population))
    reason = search.should_stop()
    assert reason in (Reason.FLAT, Reason.SMALL_STEP, Reason.RESTARTS) or "ipop" in name or "bipop" in name


@every
def test_bounds_hold(name):
    lower, upper = torch.tensor([-1.0, 0.3, -math.inf, 2.0]), torch.tensor([1.0, 0.3, 0.0, math.inf])
    x0 = torch.tensor([0.0, 0.3, -1.0, 3.0], dtype=torch.float64)
    search = SEARCHES[name](x0, population=12, bounds=(lower, upper))
    for _ in range(25):
        x = search.ask()
        assert bool((x >= lower).all())
        assert bool((x <= upper).all())
        assert bool((x[:, 1] == torch.tensor(0.3).double()).all())
        search.tell((x - 5).square().sum(1))
        assert bool((search.mean >= lower).all())
        assert bool((search.mean <= upper).all())


@every
def test_equal_bounds_leave_one_point(name):
    search = make(name, bounds=(0.25, 0.25))
    run(search, 5)
    assert torch.equal(search.ask(), torch.full((search.population, 3), 0.25, dtype=torch.float64))
    assert search.best_fitness == 3 * 0.0625


@every
def test_target_budget_and_patience_are_reasons_to_stop(name):
    assert make(name).should_stop() is None
    assert run(make(name, target=1e9), 1).should_stop() is Reason.TARGET
    assert run(make(name, max_evaluations=24), 2).should_stop() is Reason.BUDGET
    search = make(name, patience=3)
    search.tell(sphere(search.ask()) - 1e6)
    run(search, 3)
    assert search.should_stop() is Reason.STALLED
    assert str(Reason.STALLED).endswith("allows.")


@every
def test_wrong_fitness_changes_nothing(name):
    search = run(make(name), 2)
    before = search.state_dict()
    for wrong, error in [
        (torch.zeros(5), "one fitness for each of 12 members"),
        (torch.zeros(12, 1), "got shape"),
        (torch.tensor(1.0), "got shape"),
    ]:
        with pytest.raises(ValueError, match=error):
            search.tell(wrong)
    with pytest.raises(TypeError, match="complex"):
        search.tell(torch.zeros(12, dtype=torch.complex64))
    assert_same(before, search.state_dict())


@every
def test_lists_and_integers_are_fitness_too(name):
    a, b = make(name), make(name)
    for _ in range(3):
        f = [int(v * 100) for v in sphere(a.ask()).tolist()]
        a.tell(f)
        b.tell(torch.tensor(f))
    assert_same(a.state_dict(), b.state_dict())


@every
def test_wrong_states_are_refused(name):
    search = make(name)
    before = search.state_dict()
    with pytest.raises(ValueError, match="can't be loaded"):
        search.load_state_dict({**before, "method": "Other"})
    with pytest.raises(ValueError, match="lacks"):
        search.load_state_dict({k: v for k, v in before.items() if k != "best"})
    with pytest.raises(ValueError, match="shape"):
        search.load_state_dict(make(name, dim=4).state_dict())
    assert_same(before, search.state_dict())


@every
def test_revise_sets_state_and_proposes_again(name):
    search = run(make(name), 3)
    entry = "mean" if "mean" in search.state else "x"
    old = search.ask().clone()
    moved = search.state[entry] + 1
    search.revise(**{entry: moved})
    assert torch.equal(search.state[entry], moved)
    assert not torch.equal(search.ask(), old)  # the proposal was drawn again
    before = search.state_dict()
    with pytest.raises(KeyError, match="has no 'magic' to revise; there are best"):
        search.revise(magic=moved)
    with pytest.raises(ValueError, match="shape"):
        search.revise(**{entry: moved[..., :-1]})
    with pytest.raises(ValueError, match="float64"):
        search.revise(**{entry: moved.float()})
    assert_same(before, search.state_dict())
    run(search, 2)
    assert bool(search.mean.isfinite().all())


@every
def test_wrong_arguments_are_refused(name):
    make_it = SEARCHES[name]
    with pytest.raises(TypeError, match="vector of floating-point"):
        make_it(torch.zeros(3, dtype=torch.long), population=8)
    with pytest.raises(TypeError, match="vector of floating-point"):
        make_it(torch.zeros(3, 3), population=8)
    with pytest.raises(ValueError, match="nothing to search"):
        make_it(torch.zeros(0), population=8)
    with pytest.raises(ValueError, match="infinities"):
        make_it(torch.tensor([math.nan]), population=8)
    with pytest.raises(ValueError, match="lower bound"):
        make_it(torch.zeros(3), population=8, bounds=(1.0, 0.0))
    with pytest.raises(ValueError, match="lower bound has shape"):
        make_it(torch.zeros(3), population=8, bounds=(torch.zeros(2), 1.0))
    with pytest.raises(ValueError, match="NaN"):
        make_it(torch.zeros(3), population=8, bounds=(math.nan, 1.0))
    if name not in INTEGER + ["PSO informed", "DE best/1", "DE pbest", "JADE"]:
        with pytest.raises(TypeError, match="no integer coordinates"):
            make_it(torch.zeros(3), population=8, integer=[0])
    if name not in CATEGORICAL:
        with pytest.raises(TypeError, match="no categorical coordinates"):
            make_it(torch.zeros(3), population=8, categorical={0: 2})


@pytest.mark.parametrize("name", INTEGER)
def test_integer_coordinates_are_integers_and_are_found(name):
    search = SEARCHES[name](
        torch.zeros(3, dtype=torch.float64), population=30, bounds=(-9.5, 9.5), integer=[0, 2], seed=1
    )
    goal = torch.tensor([4.0, 0.5, -7.0], dtype=torch.float64)
    for _ in range(80):
        x = search.ask()
        assert torch.equal(x[:, [0, 2]], x[:, [0, 2]].round())
        assert float(x.abs().max()) <= 9.5
        search.tell((x - goal).square().sum(1))
    assert search.best[0] == 4
    assert search.best[2] == -7


@pytest.mark.parametrize("name", CATEGORICAL)
def test_categories_are_found_whatever_their_order(name):
    counts = {0: 4, 1: 7, 3: 1}
    good = torch.tensor([2.0, 5.0, 0.0, 0.0], dtype=torch.float64)
    search = SEARCHES[name](torch.zeros(4, dtype=torch.float64), population=40, categorical=counts)
    for _ in range(40):
        x = search.ask()
        for index, count in counts.items():
            assert set(x[:, index].tolist()) <= set(map(float, range(count)))
        search.tell((x[:, [0, 1, 3]] != good[[0, 1, 3]]).double().sum(1) + x[:, 2] ** 2)
    assert torch.equal(search.best[[0, 1, 3]], good[[0, 1, 3]])


def test_coordinates_are_checked():
    make_it, x0 = SEARCHES["GA"], torch.zeros(3)
    for options, error in [
        ({"integer": [3]}, "names coordinate 3 of 3"),
        ({"integer": [0], "categorical": {0: 2}}, "both integer and categorical"),
        ({"categorical": {0: 0}}, "0 categories"),
        ({"integer": [0], "bounds": (0.2, 0.8)}, "no integer between"),
    ]:
        with pytest.raises(ValueError, match=error):
            make_it(x0, population=8, **options)
    with pytest.raises(TypeError, match="'str' and 'int'|'int' and 'str'"):
        make_it(x0, population=8, integer=["a"])


@pytest.mark.parametrize("name", ["PSO", "DE rand/1", "GA", "CEM"])
def test_writing_to_a_proposal_does_not_change_the_search(name):
    search, other = run(make(name), 2), run(make(name), 2)
    clean = search.ask()
    search.ask().add_(1.0)
    assert torch.equal(search.ask(), clean)
    search.tell(sphere(clean))
    clean.zero_()
    other.tell(sphere(other.ask()))
    assert_same(search.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", ["PSO", "DE rand/1", "GA", "CEM", "OpenES", "CMAES"])
@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[1], lambda x: x.numpy(), lambda x: x * x.requires_grad_()])
def test_a_proposal_that_is_referenced_is_not_overwritten(name, hold):
    search = run(make(name), 2)
    asked = search.ask()
    reference, before = hold(asked), asked.detach().clone()
    search.tell(sphere(before))
    place = asked.data_ptr()
    del asked
    assert search.ask().data_ptr() != place
    if isinstance(reference, torch.Tensor) and reference.requires_grad:
        reference.sum().backward()
    else:
        assert torch.equal(torch.as_tensor(reference), torch.as_tensor(hold(before)))


@given(st.sampled_from(sorted(SEARCHES)), st.integers(1, 7), st.integers(0, 2**40), st.integers(4, 11), st.data())
def test_any_fitness_leaves_a_finite_state(name, dim, seed, population, data):
    population += population % 2
    search = make(name, dim=dim, population=population, seed=seed)
    special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e300, -1e300, 5e-324])
    for _ in range(4):
        n = search.population
        f = data.draw(st.lists(st.one_of(special, st.floats(-1e6, 1e6)), min_size=n, max_size=n))
        search.tell(f)
        assert bool(search.ask().isfinite().all())
        assert bool(search.mean.isfinite().all())
        assert search.best_fitness == min([v for v in f if not math.isnan(v)] + [search.best_fitness])
