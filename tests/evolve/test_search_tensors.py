"""`search` over tensors equals the search over a module with these parameters."""

from typing import NamedTuple

import pytest
import torch

import moduli as mo
from moduli.evolve import Pool


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def bowl(x):
    return ((x - torch.tensor([1.0, -2.0])) ** 2).sum()


def bowl_of_pair(pair):
    return bowl(pair.a) + (pair.b**2).sum()


def test_a_tensor_is_searched_like_the_parameter_of_a_module():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(2))

    start, net = torch.zeros(2), Holder()
    result = mo.search(start, bowl, budget=400)
    expected = mo.search(net, lambda net: bowl(net.x), budget=400)
    assert result.history == expected.history
    assert torch.equal(result.x, expected.x["x"])
    assert torch.equal(start, torch.zeros(2))
    torch.testing.assert_close(result.x, torch.tensor([1.0, -2.0]), rtol=0, atol=1e-2)


@pytest.mark.parametrize("vectorised", [False, True])
def test_results_have_the_nesting_of_the_start(vectorised):
    space = mo.Space(("u", "v"), "axis")
    start = {"w": [torch.zeros(2), mo.Tensor(torch.zeros(2), (space,))], "pair": Pair(torch.zeros(2), torch.ones(1))}

    def fitness(p):
        assert type(p["pair"]) is Pair
        return bowl(p["w"][0]) + (p["w"][1] ** 2).sum() + bowl_of_pair(p["pair"])

    result = mo.search(start, fitness, budget=3000, vectorised=vectorised)
    assert result.x["w"][1].dims == (space,)
    assert type(result.x["pair"]) is Pair
    torch.testing.assert_close(result.x["w"][0], torch.tensor([1.0, -2.0]), rtol=0, atol=1e-2)
    assert result.value < 1e-3


def test_patterns_choose_by_key_and_index():
    start = {"w": [torch.zeros(2), torch.ones(2)], "b": 3.0}
    result = mo.search(start, lambda p: bowl(p["w"][0]) + (p["w"][1] ** 2).sum() + p["b"] ** 2, "w/0", budget=300)
    assert torch.equal(result.x["w"][1], torch.ones(2))
    assert float(result.x["b"]) == 3.0
    torch.testing.assert_close(result.x["w"][0], torch.tensor([1.0, -2.0]), rtol=0, atol=1e-2)


def test_other_processes_are_sent_the_tensors():
    start = Pair(torch.zeros(2), torch.ones(1))
    with Pool(1) as pool:
        result = mo.search(start, bowl_of_pair, budget=40, executor=pool)
    assert result.history == mo.search(start, bowl_of_pair, budget=40).history


def test_objects_that_are_not_tensors_are_refused():
    with pytest.raises(TypeError, match="'a' is a str; search over a module, tensors"):
        mo.search({"a": "text"}, bowl)
    with pytest.raises(ValueError, match="can't name a parameter"):
        mo.search({"a.b": torch.zeros(2)}, bowl)
    with pytest.raises(TypeError, match="real floating-point"):
        mo.search(torch.zeros(2, dtype=torch.long), bowl)
