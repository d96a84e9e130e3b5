"""Searches for the coefficients of recipes."""

import pytest
import torch

import moduli as mo
from moduli import merge


def test_a_search_finds_the_coefficients_of_modules():
    torch.manual_seed(0)
    base, a, b = (torch.nn.Linear(3, 2) for _ in range(3))
    target = merge.task_arithmetic(base, [a, b], [0.8, 0.3])
    x = torch.randn(20, 3)

    def score(model):
        return (model(x) - target(x)).square().mean()

    for method in ("cmaes", "de"):
        result = merge.search("task_arithmetic", [base, a, b], score, 150, method=method)
        assert result.options["scale"] == pytest.approx([0.8, 0.3], abs=0.05)
        assert result.score == pytest.approx(float(score(result.model).detach()))
        assert result.evaluations <= 170
    with pytest.raises(merge.MergeError, match="no coefficients to search for"):
        merge.search("stock", [base, a, b], score)
    layered = merge.search("lerp", [base, a], score, 20, start={"t": {"weight": 0.5, "bias": 0.5}})
    assert set(layered.options["t"]) == {"weight", "bias"}


def test_a_search_over_groups_of_layers_agrees_with_a_vectorised_one():
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)) for _ in range(2)]
    target, x = merge.lerp(*nets, {"0.*": 0.8, "*": 0.1}), torch.randn(40, 3)

    def score(model):
        return (model(x) - target(x).detach()).square().mean()

    def score_all(members):
        assert type(members) is mo.Population
        return members.losses(score)

    alone = merge.search("lerp", nets, score, 120, groups="layers")
    assert alone.options["t"] == pytest.approx({"0.*": 0.8, "2.*": 0.1}, abs=0.02)
    together = merge.search("lerp", nets, score_all, 120, groups="layers", vectorised=True)
    # Both searches evaluate the same members, up to the order of a sum.
    assert together.options["t"] == pytest.approx(alone.options["t"], abs=1e-3)
    assert together.evaluations == alone.evaluations
    assert together.score == pytest.approx(float(score(together.model).detach()), rel=1e-2, abs=1e-9)
    by_pattern = merge.search("linear", nets, score, 60, groups=["*.bias", "*"])
    assert [set(each) for each in by_pattern.options["weights"]] == [{"*.bias", "*"}] * 2
    mixed = merge.search("task_arithmetic", nets, score, 40, groups=["0.*", "*"], start={"scale": [0.5]})
    assert set(mixed.options["scale"][0]) == {"0.*", "*"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"groups": ["0.*"]}, "no pattern for '1.weight'"),
        ({"groups": ["layers.*", "*"]}, "'layers.\\*' of groups matches none"),
        ({"recipe": "slerp", "vectorised": True}, "a weighted sum of modules"),
        ({"vectorised": True, "score": lambda members: [1.0, 2.0]}, "2 numbers for 1 members"),
        ({"models": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}], "groups": "layers"}, "no name has the number"),
        ({"models": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}], "vectorised": True}, "a weighted sum of modules"),
    ],
)
def test_invalid_searches_are_refused(options, match):
    nets = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(2)]
    arguments = {"recipe": "lerp", "models": nets, "score": lambda model: 0.0, **options}
    with pytest.raises(merge.MergeError, match=match):
        merge.search(**arguments)
