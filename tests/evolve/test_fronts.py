"""Multi-objective searches and archives over descriptors: sorting, known fronts, resuming."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moduli.evolve import NSGA2, MAPElites, ParetoFront
from moduli.evolve.nsga2 import measure_crowding, sort_fronts


def _dominates(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def _sort_by_definition(rows):
    left, ranks, rank = set(range(len(rows))), {}, 0
    while left:
        front = [i for i in left if not any(_dominates(rows[j], rows[i]) for j in left)]
        ranks |= dict.fromkeys(front, rank)
        left -= set(front)
        rank += 1
    return [ranks[i] for i in range(len(rows))]


numbers = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 3).flatmap(lambda m: st.lists(st.lists(numbers, min_size=m, max_size=m), min_size=1, max_size=12))
)
def test_fronts_are_those_of_the_definition(rows):
    assert sort_fronts(torch.tensor(rows)).tolist() == _sort_by_definition(rows)


def test_crowding_of_a_line():
    fitness = torch.tensor([[0.0, 4.0], [1.0, 3.0], [3.0, 1.0], [4.0, 0.0]])
    crowding = measure_crowding(fitness, torch.zeros(4, dtype=torch.long))
    assert crowding.tolist() == [math.inf, 1.5, 1.5, math.inf]


def _zdt1(x):
    g = 1 + 9 * x[:, 1:].mean(1)
    return torch.stack([x[:, 0], g * (1 - (x[:, 0] / g).sqrt())], 1)


def test_the_front_of_a_known_problem():
    search = NSGA2(torch.full((8,), 0.5, dtype=torch.float64), bounds=(0.0, 1.0), population=60, seed=1)
    for _ in range(120):
        search.tell(_zdt1(search.ask()))
    front = search.front
    # The front is f2 = 1 - sqrt(f1); its hypervolume below (1.1, 1.1) is at most 1.1² - 1/3.
    exact = 1.1 * 1.1 - 1 / 3
    assert front.find_hypervolume([1.1, 1.1]) > 0.985 * exact
    assert float((front.fitness[:, 1] - (1 - front.fitness[:, 0].sqrt())).abs().max()) < 0.05
    assert bool((sort_fronts(front.fitness) == 0).all())
    assert search.evaluations == 120 * 60


def test_hypervolumes_of_boxes():
    cube = ParetoFront(torch.zeros(1, 1), torch.tensor([[0.0, 0.0, 0.0]]))
    assert cube.find_hypervolume([1.0, 2.0, 3.0]) == 6.0
    two = ParetoFront(torch.zeros(2, 1), torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    assert two.find_hypervolume([2.0, 2.0, 1.0]) == 3.0
    assert two.find_hypervolume([0.5, 0.5, 1.0]) == 0.0
    with pytest.raises(ValueError, match="2 numbers for 3 objectives"):
        cube.find_hypervolume([1.0, 2.0])


@pytest.mark.parametrize("kind", ["front", "archive"])
def test_states_resume_bit_for_bit(kind):
    def make():
        if kind == "front":
            return NSGA2(torch.zeros(3), bounds=(-1.0, 1.0), population=8, seed=2)
        return MAPElites(torch.zeros(3), ranges=[(-1.0, 1.0)] * 2, cells=4, population=8, seed=2)

    def step(search):
        x = search.ask()
        assert torch.equal(x, search.ask())
        if kind == "front":
            search.tell(torch.stack([x.square().sum(1), (x - 1).square().sum(1)], 1))
        else:
            search.tell(x.square().sum(1), x[:, :2])

    one = make()
    for _ in range(3):
        step(one)
    other = make()
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        step(one)
        step(other)
    assert torch.equal(one.state["x"], other.state["x"])
    with pytest.raises(ValueError, match="the state is one of"):
        make().load_state_dict({"method": "CMAES", "x": torch.zeros(1, 3)})


def test_an_archive_holds_the_best_of_each_cell():
    search = MAPElites(torch.zeros(2), ranges=[(0.0, 1.0), (0.0, 1.0)], cells=(2, 3), population=6)
    kinds = torch.tensor([[0.1, 0.1], [0.1, 0.2], [0.9, 0.9], [0.6, 5.0], [-3.0, 0.1], [0.7, 0.5]])
    fitness = torch.tensor([3.0, 1.0, 2.0, 4.0, math.nan, math.inf])
    x = search.ask()
    search.tell(fitness, kinds)
    assert search.archive.tolist() == [[1.0, math.inf, math.inf], [math.inf, math.inf, 2.0]]
    assert torch.equal(search.best, x[1])
    assert search.coverage == pytest.approx(2 / 6)
    before = search.archive
    search.tell(torch.full((6,), 9.0), kinds)
    assert torch.equal(search.archive, before.where(before.isfinite(), search.archive))
    assert float(search.archive[1, 1]) == 9.0
    elites, values = search.elites
    assert elites.shape == (3, 2)
    assert sorted(values.tolist()) == [1.0, 2.0, 9.0]


def test_plots_of_fronts_and_archives():
    pytest.importorskip("matplotlib")
    search = MAPElites(torch.zeros(2), ranges=[(0.0, 1.0)] * 3, cells=2, population=6)
    search.tell(torch.ones(6), torch.rand(6, 3))
    assert search.plot().axes[0].get_xlabel() == "first descriptor"
    assert ParetoFront(torch.zeros(1, 1), torch.zeros(1, 2)).plot().axes[0].get_ylabel() == "second objective"


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="has to be even"):
        NSGA2(torch.zeros(2), bounds=(0.0, 1.0), population=5)
    with pytest.raises(ValueError, match="have to be finite"):
        NSGA2(torch.zeros(2), bounds=(0.0, math.inf))
    search = NSGA2(torch.zeros(2), bounds=(0.0, 1.0), population=4)
    with pytest.raises(ValueError, match=r"got \(4,\)"):
        search.tell(torch.zeros(4))
    assert len(search.front) == 0
    with pytest.raises(ValueError, match="a range from low to high"):
        MAPElites(torch.zeros(2), ranges=[(1.0, 0.0)])
    archive = MAPElites(torch.zeros(2), ranges=[(0.0, 1.0)], population=3)
    with pytest.raises(ValueError, match="3 rows of 1 descriptors"):
        archive.tell(torch.zeros(3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="over two descriptors"):
        archive.plot()
    assert archive.state["generation"] == 0
