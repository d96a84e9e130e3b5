"""Measures of half-precision models are computed in float32 or wider: of models, of populations, and in merge recipes."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import merge, particles
from moduli.population import Population

HALVES = [torch.float16, torch.bfloat16]


def make_models(dtype, count=3, size=300):
    """Return models of norm `size` whose sum of squares overflows in float16, and which are correlated.

    Args:
        dtype: The dtype of the parameters.
        count: The number of models.
        size: The norm of each model's parameter vector.
    """
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
def test_measures_of_models_equal_those_in_float64(name, dtype):
    a, b, _ = make_models(dtype)
    for x, y in ((a, b), (a, a), (a, -1 * a)):
        result = MEASURES[name](x, y)
        assert result.dtype is torch.float32
        torch.testing.assert_close(result.double(), MEASURES[name](double(x), double(y)), rtol=5e-5, atol=1e-4)
    assert float(particles.cosine(a, a)) == pytest.approx(1.0, abs=2e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["dot", "cosine", "distance", "norm", "distances", "diversity"])
def test_measures_of_populations_equal_those_in_float64(name, dtype):
    models = make_models(dtype)
    pop, wide = Population.from_modules(models), Population.from_modules(list(map(double, models)))
    others = [()] if name in ("norm", "diversity") else [(0,), (1,)]
    for which in others:
        arguments = [(), ()]
        if which:
            arguments = [(p if which == (0,) or name == "distances" else p[1],) for p in (pop, wide)]
        result, expected = getattr(pop, name)(*arguments[0]), getattr(wide, name)(*arguments[1])
        assert result.dtype is torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=5e-5, atol=1e-3)


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
def test_recipes_with_angles_equal_those_in_float64(recipe, dtype):
    models = make_models(dtype)
    merged, expected = recipe(*models), recipe(*map(double, models))
    for param, wide in zip(merged.parameters(), expected.parameters(), strict=True):
        assert param.dtype is dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(param.double(), wide, rtol=2 * eps, atol=2e-5)
