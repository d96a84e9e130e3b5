"""Measures of models in half precision are taken in float32 or wider, alone, in a population, and by merge recipes."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import merge, particles
from moduli.population import Population

HALVES = [torch.float16, torch.bfloat16]


def nets(dtype, count=3, size=300):
    """Models of norm `size` whose squares add up to more than float16 holds, near enough to each other for an angle."""
    generator = torch.Generator().manual_seed(0)
    models = [nn.Linear(300, 300) for _ in range(count)]
    first = None
    for model in models:
        vector = torch.randn(300 * 301, generator=generator)
        first = vector if first is None else first
        vector = first + 0.5 * vector
        nn.utils.vector_to_parameters(vector * (size / vector.norm()), model.parameters())
    return [mo.adopt(model.to(dtype)) for model in models]


def double(model):
    return mo.adopt(copy.deepcopy(model).double())


MEASURES = {
    "dot": particles.dot,
    "cosine": particles.cosine,
    "distance": particles.distance,
    "norm": lambda x, _: particles.norm(x),
    "norm 3": lambda x, _: particles.norm(x, 3.0),
    "norm inf": lambda x, _: particles.norm(x, float("inf")),
    "distance 1": lambda x, y: particles.distance(x, y, 1.0),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MEASURES)
def test_measures_of_models(name, dtype):
    a, b, _ = nets(dtype)
    for x, y in ((a, b), (a, a), (a, -1 * a)):
        got = MEASURES[name](x, y)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), MEASURES[name](double(x), double(y)), rtol=5e-5, atol=1e-4)
    assert float(particles.cosine(a, a)) == pytest.approx(1.0, abs=2e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["dot", "cosine", "distance", "norm", "distances", "diversity"])
def test_measures_of_populations(name, dtype):
    models = nets(dtype)
    pop, wide = Population.from_modules(models), Population.from_modules(list(map(double, models)))
    others = [()] if name in ("norm", "diversity") else [(0,), (1,)]
    for which in others:
        given = [(), ()]
        if which:
            given = [(p if which == (0,) or name == "distances" else p[1],) for p in (pop, wide)]
        got, expected = getattr(pop, name)(*given[0]), getattr(wide, name)(*given[1])
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=5e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "recipe",
    [
        lambda a, b, c: merge.slerp(a, b, 0.3),
        lambda a, b, c: merge.karcher([a, b, c]),
        lambda a, b, c: merge.stock(a, [b, c]),
    ],
    ids=["slerp", "karcher", "stock"],
)
def test_angles_of_merge_recipes(recipe, dtype):
    models = nets(dtype)
    got, expected = recipe(*models), recipe(*map(double, models))
    for mine, wide in zip(got.parameters(), expected.parameters(), strict=True):
        assert mine.dtype is dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), wide, rtol=2 * eps, atol=2e-5)
