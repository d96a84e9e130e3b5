"""`search` over tensors equals the search over a module with these parameters."""

import pytest
import torch

import moduli as mo
from evolve.pairs import Pair, bowl, bowl_of_pair
from moduli.evolve import Pool


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


TARGET = mo.tensor([1.0, 2.0], band=["a", "b"], dtype=torch.float64)


def distance(p):
    return float(((p - TARGET) ** 2).sum())


def test_labelled_bounds_meet_the_labels_of_the_tensor():
    low = mo.tensor([-3.0, -3.0], band=["b", "a"], dtype=torch.float64)
    high = mo.tensor([1.5, 0.5], band=["b", "a"], dtype=torch.float64)
    options = {"method": "de", "budget": 400, "seed": 0, "polish": True}
    found = mo.search(0 * TARGET, distance, bounds=(low, high), **options).x
    assert torch.allclose(found.data, torch.tensor([0.5, 1.5], dtype=torch.float64), atol=1e-3)
    with pytest.raises(ValueError, match="not those of the tensor"):
        mo.search(0 * TARGET, distance, bounds=(-3.0, mo.tensor([1.5, 0.5], band=["b", "z"])), **options)
    with pytest.raises(TypeError, match="labelled bounds are those of one labelled tensor"):
        mo.search({"x": 0 * TARGET}, lambda p: distance(p["x"]), bounds=(-3.0, high), **options)


def test_bounds_in_the_form_of_the_tensor():
    high = torch.tensor([[0.5, 3.0], [3.0, 0.25]], dtype=torch.float64)
    found = mo.search(0 * high, lambda x: float(((x - 1) ** 2).sum()), bounds=(-3.0, high), budget=600, polish=True)
    assert torch.allclose(found.x, torch.tensor([[0.5, 1.0], [1.0, 0.25]], dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("bounds", [[(-3.0, 0.5), (-3.0, 3.0)], [(0.0, 1.0)] * 3, {"x": (0.0, 1.0)}, 3.0, "ab"])
def test_bounds_that_are_no_pair_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds are a pair"):
        mo.search(torch.zeros(2), bowl, bounds=bounds, budget=100)
    with pytest.raises(ValueError, match="bounds are a pair"):
        mo.evolve.DE(torch.zeros(2), bounds=bounds)


@pytest.mark.parametrize(("method", "setting"), [("de", "sigma"), ("cmaes", "bound"), ("openes", "spread")])
def test_a_setting_that_a_method_does_not_have_is_named(method, setting):
    with pytest.raises(TypeError, match=f"method='{method}' has no setting '{setting}'; it has .*seed"):
        mo.search(torch.zeros(2), bowl, method=method, budget=100, **{setting: 0.5})
