"""Operations scoped to names change no other parameters."""

import operator
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from moduli.particles import only
from moduli.population import Population
from population.helpers import assert_same_members, copies


def pair():
    torch.manual_seed(0)
    return tuple(
        Population.of(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 3).to(torch.float64)
        for _ in range(2)
    )


@pytest.mark.parametrize("patterns", [("0.*",), ("*.bias", "2.weight"), ("1.weight",)])
def test_only_is_a_loop(patterns):
    a, b = pair()
    xs, ys = copies(a), copies(b)
    for fn in (operator.add, operator.sub, operator.mul):
        assert_same_members(fn(a.only(*patterns), b), [fn(only(x, *patterns), y) for x, y in zip(xs, ys, strict=True)])
        assert_same_members(fn(a.only(*patterns), 3.0), [fn(only(x, *patterns), 3.0) for x in xs])
    assert_same_members(-a.only(*patterns), [-only(x, *patterns) for x in xs])
    part = a.only(*patterns)
    part *= 2.0
    part += b
    for x, y in zip(xs, ys, strict=True):
        scope = only(x, *patterns)
        scope *= 2.0
        scope += y
    assert_same_members(a, xs)
    moved = a.only(*patterns).mutate(scale=1.0)
    for (name, before), (_, after) in zip(a.named_parameters(), moved.named_parameters(), strict=True):
        chosen = not torch.equal(before, after)
        assert chosen == any(fnmatchcase(name, pattern) for pattern in patterns)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no parameter is called 'head'"):
        pair()[0].only("head")
