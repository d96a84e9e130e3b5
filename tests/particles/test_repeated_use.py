"""Repeated use of a particle: cached readings are checked, and every change since then is in the next result."""

import functools
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

import moduli as mo
from moduli.particles import NytoModule, adopt, keep_removed


class Layer(NytoModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = 1.5
        self.sizes = (2, 2)
        self.activation = relu

    def forward(self, x):
        return self.activation(self.inner(x)) * self.scale


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.layer = Layer()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.layer(self.first(x)))


def settle(net):
    """Use a particle several times, so that its readings are cached."""
    for _ in range(4):
        (2 * net).eval()
        net.touch()
    return net


def check_double(net):
    """Check that `2 * net` has twice the parameters, and the names, classes, attributes and hooks of `net`."""
    twice = 2 * net
    assert [n for n, _ in twice.named_parameters()] == [n for n, _ in net.named_parameters()]
    for result, original in zip(twice.parameters(), net.parameters(), strict=True):
        assert result.dtype == original.dtype
        assert torch.equal(result, 2 * original)
    for (path, result), (other, original) in zip(twice.named_modules(), net.named_modules(), strict=True):
        assert (path, type(result)) == (other, type(original))
        assert result.training == original.training
        for key, value in vars(original).items():
            if type(value) in (int, float, str, tuple) or callable(value):
                assert vars(result)[key] is value
            assert key in vars(result)
        for key in ("_forward_hooks", "_forward_pre_hooks"):
            assert len(vars(result)[key]) == len(vars(original)[key])
            assert vars(result)[key] is not vars(original)[key]
    return twice


CHANGES = {
    "nothing": lambda net: None,
    "values": lambda net: net.first.weight.data.fill_(3.0),
    "a parameter of a plain child": lambda net: setattr(net.first, "weight", nn.Parameter(torch.ones(2, 3))),
    "a registry": lambda net: net.first._parameters.update(bias=nn.Parameter(torch.ones(2))),
    "a name": lambda net: net.layer.inner._parameters.update(extra=nn.Parameter(torch.ones(2))),
    "an empty place": lambda net: net.first._parameters.update(bias=None),
    "the order": lambda net: net.first._parameters.update(weight=net.first._parameters.pop("weight")),
    "dtype": lambda net: net.double(),
    "shape by data": lambda net: setattr(net.first.weight, "data", torch.ones(2, 5)),
    "a child": lambda net: setattr(net.layer, "inner", nn.Linear(2, 2, bias=False)),
    "a class": lambda net: setattr(net.norm, "__class__", nn.SyncBatchNorm),
    "mode": lambda net: net.layer.eval(),
    "an attribute of a plain child": lambda net: setattr(net.first, "in_features", 7),
    "an attribute": lambda net: setattr(net.layer, "scale", 2.5),
    "a new attribute": lambda net: setattr(net.norm, "note", "hello"),
    "an attribute for another": lambda net: (delattr(net.layer, "scale"), setattr(net.layer, "factor", 2.0)),
    "a function": lambda net: setattr(net.layer, "activation", torch.tanh),
    "a hook": lambda net: net.first.register_forward_hook(lambda *_: None),
    "a list": lambda net: setattr(net.layer, "sizes", [1, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_in_the_next_result(change):
    net = settle(Net())
    CHANGES[change](net)
    check_double(net)
    check_double(settle(net))


def test_attributes_come_from_the_left_operand():
    a, b = Net(), Net()
    b.eval()
    b.layer.scale = 3.0
    for _ in range(4):
        assert (a + b).layer.scale == 1.5
        assert (b + a).layer.scale == 3.0
        assert (a + b).training
        assert not (b + a).training


def test_references_that_an_attribute_gains_later_are_replaced():
    """An attribute without references may gain one later; results must not compute with the parameters of the operand."""
    net = Net()
    net.layer.plan = []
    settle(net)
    net.layer.plan.append(net.first)
    twice = 2 * net
    assert twice.layer.plan[0] is twice.first
    net.layer.activation = functools.partial(torch.add, net.first.bias)
    twice = 2 * net
    assert twice.layer.activation.args[0] is twice.first.bias


def test_results_share_no_registry_and_no_labels():
    net = mo.Module()
    net.w = mo.tensor([1.0, 2.0], c=["r", "g"])
    settle(net)
    twice, thrice = 2 * net, 3 * net
    for key in ("_labelled", "_parameters", "_buffers", "_modules", "_forward_hooks"):
        assert len({id(vars(each)[key]) for each in (net, twice, thrice)}) == 3
    twice.w = mo.tensor([1.0, 2.0], c=["x", "y"])
    assert thrice.w.sel(c="g").item() == 6.0


def test_an_edit_frees_the_removed_module(without_gc):
    net = keep_removed(settle(Net()), 0)  # otherwise it is stored for `rollback`
    reference = weakref.ref(net.layer)
    del net.layer
    assert reference() is None


def test_loading_by_assignment_frees_the_replaced_parameter():
    net = settle(Net())
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    reference = weakref.ref(net.first.weight)
    net.load_state_dict(state, assign=True)
    assert reference() is None
    check_double(net)


def test_a_settled_particle_is_freed_at_once(without_gc):
    net = settle(Net())
    references = [weakref.ref(net), weakref.ref(net.layer), weakref.ref(net.first)]
    del net
    assert [each() for each in references] == [None] * 3


def test_the_attributes_of_a_result_are_complete():
    net = adopt(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert list(vars(2 * net)["_modules"]) == ["0", "1"]
    twice = 2 * net
    state = vars(twice)
    assert torch.equal(state["_modules"]["0"].weight, 2 * net[0].weight)
    assert type(vars(twice)) is dict
    assert vars(twice)["_modules"] is state["_modules"]
    with pytest.raises(KeyError, match="nothing"):
        vars(2 * net)["nothing"]


def test_a_result_has_the_order_of_assignments_of_its_operand():
    def make(*names):
        net = NytoModule()
        for name in names:
            setattr(net, name, nn.Parameter(torch.ones(2)) if name == "w" else nn.Linear(2, 2))
        return net

    a, b = make("w", "layer"), make("layer", "w")
    for _ in range(3):
        assert list(vars(2 * a)["_particle"].order) == ["w", "layer"]
        assert list(vars(2 * b)["_particle"].order) == ["layer", "w"]
    assert [a.get_param_id(a.w), b.get_param_id(b.w)] == [0, 2]
