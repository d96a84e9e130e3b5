"""Coefficients of recipes: numbers by pattern, functions of names, and invalid ones; and invalid options."""

import numpy as np
import pytest
import torch

from merge.helpers import TwoParts, assert_same, raises_merge_error, siblings, state
from moduli import merge


def test_the_first_pattern_that_matches_wins():
    a, b = siblings(TwoParts(), 2)
    merged = merge.lerp(a, b, {"encoder.bias": 1.0, "encoder.*": 0.0, "*": 0.5})
    assert torch.equal(merged.encoder.bias, b.encoder.bias)
    assert torch.equal(merged.encoder.weight, a.encoder.weight)
    torch.testing.assert_close(merged.head.weight, (a.head.weight + b.head.weight) / 2)


def test_every_coefficient_accepts_patterns():
    base, a, b = siblings(TwoParts(), 3)
    only_head = {"head.*": 1.0, "*": 0.0}
    merged = [
        merge.linear([base, a], [{"head.*": 0, "*": 1}, only_head]),
        merge.slerp(base, a, only_head),
        merge.slerp(base, a, only_head, angle="model"),
        merge.task_arithmetic(base, [a], only_head),
        merge.task_arithmetic(base, [a, b], [only_head, 0.0]),
        merge.ties(base, [a], only_head),
        merge.ties(base, [a, b], 1.0, weights=[only_head, 0]),
        merge.ties(base, [a], 1.0, scale=only_head),
        merge.dare(base, [a], only_head),
        merge.dare(base, [a, b], [only_head, 0.0], normalize=False),
        merge.dare(base, [a], 1.0, scale=only_head),
        merge.dare(base, [a, b], 1.0, weights=[only_head, 0], normalize=False),
        merge.fisher([base, a], [{}, {}], [{"head.*": 0, "*": 1}, only_head]),
    ]
    for model in merged:
        assert_same(model.encoder, base.encoder, exactly=False)
        assert_same(model.head, a.head, exactly=False)


def test_a_coefficient_may_be_a_function_of_the_name():
    a, b = siblings(TwoParts(), 2)
    merged = merge.lerp(a, b, lambda name: 0.25 if name.startswith("head") else 1.0)
    assert_same(merged, merge.lerp(a, b, {"head*": 0.25, "*": 1.0}))


def test_invalid_coefficients_are_refused():
    a, b = siblings(TwoParts(), 2)
    with raises_merge_error("t has no number for 'head.weight'", "'encoder.*'", "add one"):
        merge.lerp(a, b, {"encoder.*": 0.5})
    with raises_merge_error("pattern 'encodr.*' of t matches none of the 4 names", "'encoder.weight'"):
        merge.lerp(a, b, {"encodr.*": 0.5, "*": 0.1})
    with raises_merge_error("weights[1]['head.*'] is nan"):
        merge.linear([a, b], [1, {"head.*": float("nan"), "*": 1}])
    with raises_merge_error("t of 'encoder.weight' is nan; it must be finite"):
        merge.lerp(a, b, lambda name: float("nan"))
    with raises_merge_error("density is 1.5; it must be at least 0 and at most 1"):
        merge.ties(a, [b], 1.5)
    with raises_merge_error("density[0] is -0.1"):
        merge.dare(a, [b], [-0.1])
    with raises_merge_error("weights[0] is -1.0; it must be at least 0"):
        merge.fisher([a, b], [{}, {}], [-1.0, 1.0])
    with raises_merge_error("weights has 1 entries for 2 models"):
        merge.linear([a, b], [1.0])
    with raises_merge_error("t is an empty mapping"):
        merge.lerp(a, b, {})
    with raises_merge_error("weights for 'encoder.weight' are [1.0, -1.0] and add up to 0", "normalize=False"):
        merge.linear([a, b], [1, -1])
    with raises_merge_error("weights for 'encoder.weight'", "add up to 0"):
        merge.dare(a, [b, b], 0.5, weights=[1, -1])
    with raises_merge_error("the weights for 'encoder.weight' are [0.0, 0.0] and add up to 0"):
        merge.fisher([a, b], [{}, {}], [0, 0])
    with raises_merge_error("density has numbers by name, but is used for whole models here"):
        merge.ties(a, [b], {"head.*": 0.5, "*": 1.0}, trim="model")
    for wrong in ("0.5", None, torch.ones(2), {"*": "0.5"}, {3: 0.5}):
        with pytest.raises(TypeError, match="must be a number, or a mapping from glob patterns"):
            merge.lerp(a, b, wrong)
    assert_same(merge.lerp(a, b, np.float32(0.5)), merge.lerp(a, b, 0.5))
    assert_same(merge.linear([a, b], np.array([1.0, 3.0]).tolist()), merge.linear([a, b], [1, 3]))


def test_options_that_are_no_choices_are_refused():
    a, b = state(1.0), state(2.0)
    with raises_merge_error("angle is 'row'"):
        merge.slerp(a, b, 0.5, angle="row")
    with raises_merge_error("elect is 'max'"):
        merge.ties(a, [b], elect="max")
    with raises_merge_error("trim is 'row'"):
        merge.ties(a, [b], trim="row")
    with raises_merge_error("elect is 'max'"):
        merge.dare(a, [b], 0.5, elect="max")
    with raises_merge_error("then is 'soup'"):
        merge.dare(a, [b], 0.5, then="soup")
    with raises_merge_error("how is 'best'"):
        merge.soup([a, b], how="best")
    with raises_merge_error("needs evaluate="):
        merge.soup([a, b], how="greedy")
    with raises_merge_error("has no use for it"):
        merge.soup([a, b], evaluate=lambda model: 0.0)
    with raises_merge_error("mode is 'most'"):
        merge.greedy_soup([a, b], lambda model: 0.0, mode="most")
    with raises_merge_error("evaluate gave NaN for models[0]"):
        merge.greedy_soup([a, b], lambda model: float("nan"))
    with raises_merge_error("buffers is 'average'"):
        merge.linear([a, b], buffers="average")
    with raises_merge_error("integers is 'merge'"):
        merge.linear([a, b], integers="merge")


def test_invalid_steps_and_bounds_are_refused():
    a, b = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
    with raises_merge_error("steps is 0"):
        merge.karcher([a, b], steps=0)
    with raises_merge_error("the first must be less than the second"):
        merge.search("lerp", [a, b], lambda model: model["w"].sum(), 12, bounds=(1.0, 0.0))
