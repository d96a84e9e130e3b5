"""`particles.diff`: one row for each difference of two models."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moduli as mo
from moduli import particles
from moduli.particles import ModelDiff, diff


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gain = mo.tensor([1.0, 2.0, 3.0], c=["r", "g", "b"]).attach()


def test_equal_models_have_no_difference():
    net = Net()
    for other in (net, net.clone(), copy.deepcopy(net), net.state_dict(), copy.deepcopy(net.state_dict())):
        difference = diff(net, other)
        assert not difference
        assert difference.same == len(net.state_dict())
        assert str(difference) == "no difference: 8 tensors equal"


def test_differences_of_names_shapes_dtypes_and_values_have_rows():
    torch.manual_seed(0)
    net = Net()
    other = net.clone()
    other.body = nn.Linear(3, 6)
    with torch.no_grad():
        other.body.weight[:4] = net.body.weight * 1.5
        other.norm.weight.mul_(2)
    other.norm.running_mean = other.norm.running_mean.double()
    other.extra = nn.Parameter(torch.zeros(2))
    del other.norm.bias
    other.norm.register_parameter("bias", None)
    difference = diff(net, other)
    assert isinstance(difference, ModelDiff)
    rows = {row.name: row for row in difference}
    assert difference.added == ["extra"]
    assert difference.removed == ["norm.bias"]
    assert difference.changed == ["body.weight", "body.bias", "norm.weight", "norm.running_mean"]
    assert rows["body.weight"][1:4] == ("shape", "(4, 3) float32", "(6, 3) float32")
    assert rows["body.weight"].distance == pytest.approx(0.5)
    assert rows["body.weight"].largest == pytest.approx(net.body.weight.abs().max().item() / 2)
    assert rows["norm.weight"][1:] == ("values", "(4) float32", "(4) float32", 1.0, 1.0)
    assert rows["norm.running_mean"].change == "dtype"
    assert rows["norm.running_mean"].distance == 0
    assert rows["extra"][1:] == ("added", None, "(2) float32", None, None)
    assert difference.same == 3
    assert difference[0].name == "body.weight"
    assert len(str(difference).splitlines()) == len(difference) + 2
    assert json.loads(json.dumps(difference.as_dict()))["same"] == 3


def test_labelled_tensors_are_compared_by_label():
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    other.gain = mo.tensor([3.0, 1.0, 2.0], c=["b", "r", "g"]).attach()
    assert not diff(net, other)
    other.gain = mo.tensor([3.0, 1.0, 5.0], c=["b", "r", "g"]).attach()
    assert diff(net, other)[0][1] == "values"
    assert diff(net, other)[0].largest == 3
    other.gain = mo.tensor([3.0, 1.0, 5.0], c=["b", "r", "x"]).attach()
    row = diff(net, other)[0]
    assert row[:4] == ("gain", "axes", "(c=3 [r g b]) float32", "(c=3 [b r x]) float32")
    assert row.largest == 0
    other.gain = mo.tensor([3.0, 1.0], c=["b", "r"]).attach()
    assert diff(net, other)[0].change == "shape"
    other.gain = mo.tensor([3.0, 1.0, 2.0], d=["b", "r", "g"]).attach()
    row = diff(net, other)[0]
    assert (row.change, row.distance) == ("axes", None)
    del other.gain
    other.gain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    assert diff(net, other)[0].change == "axes"


def test_modules_of_other_classes_and_special_values_are_compared():
    difference = diff(nn.Linear(2, 2), nn.Conv1d(2, 2, 3))
    assert [row.change for row in difference] == ["shape", "values"]
    assert difference[0].distance is None
    values = {"n": torch.tensor([1, 2]), "z": torch.tensor([1 + 2j]), "b": torch.tensor([True]), "e": torch.zeros(0, 3)}
    assert not diff(values, values)
    other = {"n": torch.tensor([1, 4]), "z": torch.tensor([1 + 0j]), "b": torch.tensor([False]), "e": torch.zeros(0, 4)}
    rows = {row.name: row for row in diff(values, other)}
    assert (rows["n"].largest, rows["z"].largest, rows["b"].largest) == (2, 2, 1)
    assert rows["e"].change == "shape"
    assert diff({"w": torch.zeros(1)}, {"w": torch.ones(1)})[0].distance == float("inf")
    assert diff({"w": torch.tensor([float("nan")])}, {"w": torch.ones(1)})
    assert not diff({"w": torch.zeros(2), "_extra_state": 3}, {"w": torch.zeros(2), "_extra_state": 4})
    with pytest.raises(TypeError, match="diff compares modules and state dicts, not a list"):
        diff([], {})


def test_tied_parameters_have_a_row_for_each_name():
    net = mo.Module()
    net.a = nn.Linear(2, 2)
    net.b = net.a
    other = net.clone()
    with torch.no_grad():
        other.a.bias.add_(1)
    assert [row.name for row in diff(net, other)] == ["a.bias", "b.bias"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6))
def test_distances_of_rows_equal_those_of_the_tensors(seed, scale):
    torch.manual_seed(seed)
    net = Net()
    other = particles.axpy_(net.clone(), float(scale), particles.randn(net))
    for row in diff(net, other):
        a, b = net.state_dict(), other.state_dict()
        key = next(name for name in a if name.endswith(row.name.rpartition(".")[2]) and row.name.split(".")[0] in name)
        gap = b[key].double() - a[key].double()
        size = a[key].double().norm().item()
        assert row.largest == pytest.approx(gap.abs().max().item())
        assert size == 0 or row.distance == pytest.approx(gap.norm().item() / size)


def test_versions_of_a_model_are_compared():
    net = Net()
    before = net.clone()
    particles.independent(before)
    net.head = nn.Linear(4, 2)
    assert diff(before, net).added == ["head.weight", "head.bias"]
    assert not diff(before, particles.rollback(net, 0))
