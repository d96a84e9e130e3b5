"""`TreeWatch`: it returns the current reading or None, notices every edit, and keeps no module alive."""

import copy
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moduli as mo
from layout.helpers import check_watch, mlp
from moduli.layout import (
    TreeWatch,
    read,
)
from strategies import edit, modules


@settings(max_examples=150)
@given(modules(), st.data())
def test_a_watch_returns_the_current_reading_or_none(net, data):
    watch = TreeWatch.of(net, read(net))
    assert check_watch(watch, net)
    for _ in range(data.draw(st.integers(1, 4))):
        edit(data, net)
        check_watch(watch, net)


def tie_equal_scalars(net):
    net[3]._parameters["b"] = net[3]._parameters["a"]


def reorder(net):
    net[0]._parameters["weight"] = net[0]._parameters.pop("weight")


def exchange_for_a_copy(net):
    net[3] = copy.deepcopy(net[3])


WATCHED = {
    "equal parameters of one element are tied": tie_equal_scalars,
    "a parameter of one element is replaced by an equal one": lambda net: setattr(
        net[3], "b", nn.Parameter(torch.ones(1))
    ),
    "parameters change places": reorder,
    "a child is replaced by a copy": exchange_for_a_copy,
    "the class changes": lambda net: setattr(net[2], "__class__", nn.ReLU),
    "the attributes of a child are replaced": lambda net: net[0].__setattr__("__dict__", vars(nn.Linear(3, 4))),
    "a buffer is no longer saved": lambda net: net[1]._non_persistent_buffers_set.add("running_mean"),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_a_watch_returns_none_after_an_edit(kind):
    net = mlp()
    net[3].a, net[3].b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watch = TreeWatch.of(net, read(net))
    assert check_watch(watch, net)
    WATCHED[kind](net)
    assert not check_watch(watch, net)


def test_a_watch_returns_none_after_other_labels():
    net = mo.Module()
    net.w = mo.tensor([1.0, 2.0], c=["r", "g"])
    watch = TreeWatch.of(net, read(net))
    assert check_watch(watch, net)
    other = mo.Module()
    other.w = mo.tensor([1.0, 2.0], c=["x", "y"])
    vars(net)["_labelled"] = vars(other)["_labelled"]
    assert not check_watch(watch, net)


def test_a_watch_keeps_no_root_alive():
    net = mlp()
    watch, reference = TreeWatch.of(net, read(net)), weakref.ref(net)
    del net
    assert reference() is None
    assert watch is not None
