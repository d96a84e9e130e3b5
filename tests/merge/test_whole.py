"""Sums of whole modules: the fast path for modules of one structure equals the general path, bit for bit."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import merge, particles
from moduli.merge import MergeError, _driver


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)).to(dtype)
        self.scale = nn.Parameter(torch.rand(2, dtype=dtype))
        self.frozen = nn.Parameter(torch.full((2,), 3.0, dtype=dtype), requires_grad=False)
        self.activation = torch.tanh
        self.sizes = (3, 4, 2)


class Labelled(mo.Module):
    def __init__(self):
        super().__init__()
        self.w = mo.tensor(torch.rand(2), c=["r", "g"]).attach()
        self.inner = mo.Module()
        self.inner.l = nn.Linear(2, 2)


@pytest.fixture
def general(monkeypatch):
    """A function that merges with the fast path disabled."""

    def run_without_fast_path(merge_models):
        with monkeypatch.context() as patch:
            patch.setattr(_driver, "try_sum", lambda *args: None)
            return merge_models()

    return run_without_fast_path


@pytest.fixture
def fast_path_taken(monkeypatch):
    """A list that records for each merge whether the fast path was taken."""
    results = []
    before = _driver.try_sum

    def count(*args):
        results.append(before(*args) is not None)
        return before(*args)

    monkeypatch.setattr(_driver, "try_sum", count)
    return results


RECIPES = {
    "mean": lambda nets: merge.linear(nets),
    "weights": lambda nets: merge.linear(nets, [0.3, 0.7, 0.0]),
    "sum": lambda nets: merge.linear(nets, [1.0, -2.0, 0.5], normalize=False),
    "nothing": lambda nets: merge.linear(nets, [0.0, 0.0, 0.0], normalize=False),
    "lerp": lambda nets: merge.lerp(nets[0], nets[1], 0.2),
    "tasks": lambda nets: merge.task_arithmetic(nets[0], nets[1:], 0.4),
    "soup": lambda nets: merge.soup(nets),
}


@pytest.mark.parametrize("kind", [Net, lambda: Net(torch.float64), Labelled, lambda: mo.adopt(nn.Linear(2, 3))])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fast_path_equals_the_general_path(recipe, kind, general, fast_path_taken):
    torch.manual_seed(0)
    nets = [kind() for _ in range(3)]
    fast = RECIPES[recipe](nets)
    assert fast_path_taken == [True]
    expected = general(lambda: RECIPES[recipe](nets))
    assert type(fast) is type(expected)
    pairs = zip(fast.state_dict().items(), expected.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)
    assert [p.requires_grad for p in fast.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert repr(fast) == repr(expected)
    memory = {p.data_ptr() for net in nets for p in (*net.parameters(), *net.buffers())}
    assert not memory & {p.data_ptr() for p in (*fast.parameters(), *fast.buffers())}


def test_a_merged_particle_belongs_to_the_species():
    net = Labelled()
    twin = net.clone()
    both = merge.linear([net, twin])
    assert particles.species(both) == particles.species(net)
    net.more = nn.Linear(2, 2)
    assert hasattr(both.touch(), "more")
    assert both.inner._particle_root is both


def test_mutable_attributes_are_copied_by_the_general_path(fast_path_taken):
    a, b = Net(), Net()
    a.history = [1, 2]
    merged = merge.linear([a, b])
    assert fast_path_taken == [False]
    assert merged.history == [1, 2]
    assert merged.history is not a.history


def test_half_precision_ties_and_patterns_take_the_general_path(fast_path_taken):
    halves = [nn.Linear(2, 2).half() for _ in range(2)]
    tied = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for net in tied:
        net[1].weight.data = net[0].weight.data
    merge.linear(halves), merge.linear(tied)
    assert fast_path_taken == [False, False]
    merge.lerp(*tied, {"0.*": 0.5, "*": 0.0})
    assert len(fast_path_taken) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value):
    a, b = Net(), Net()
    with torch.no_grad():
        b.body[2].weight[0, 0] = value
    with pytest.raises(MergeError, match=r"'body\.2\.weight' of models\[1\] has values that are NaN or infinite"):
        merge.linear([a, b])


def test_integers_must_be_equal():
    a, b = Net(), Net()
    for net, value in ((a, 1), (b, 2)):
        net.register_buffer("count", torch.tensor(value))
    with pytest.raises(MergeError, match="'count'"):
        merge.linear([a, b])
    assert merge.linear([a, b], integers="first").count == 1
