"""Relatives follow edits: at the next operation, inside plain children, on other devices, with their configurations."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import moduli as mo
from moduli import particles as P
from moduli.particles import NytoModule, StructureError
from particles.helpers import Net

RELATIVES = {
    "clone": lambda n: n.clone(),
    "clone_from": lambda n: n.clone_from(Net()),
    "a result": lambda n: 2 * n,
    "a product": lambda n: n.product().module(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "a copy of a copy": lambda n: copy.deepcopy(n.clone()),
}


OPERATIONS = {
    "b + b": lambda n, b: b + b,
    "2 * b": lambda n, b: 2 * b,
    "b + n": lambda n, b: b + n,
    "n + b": lambda n, b: n + b,
    "lerp": lambda n, b: P.lerp(b, n, 0.5),
    "touch": lambda n, b: b.touch(),
    "in place": lambda n, b: b.__iadd__(n),
    "product": lambda n, b: b.touch().product().module(),
}


@pytest.mark.parametrize("act", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("relate", RELATIVES.values(), ids=RELATIVES)
def test_relatives_follow_an_edit_at_the_next_operation(relate, act):
    n = Net()
    n + n  # creates the species
    b = relate(n)
    n.head = nn.Linear(2, 7)
    result = act(n, b)
    assert result.head.weight.shape == (7, 2)
    assert b.touch().head.weight.shape == (7, 2)
    assert b._version_kernel is n._version_kernel
    assert b.head.weight is not n.head.weight


CONTAINERS = {
    "append": lambda n: n.body.append(nn.Linear(2, 2)),
    "insert": lambda n: n.body.insert(0, nn.Linear(2, 2)),
    "pop": lambda n: n.body.pop(0),
    "replace": lambda n: n.body.__setitem__(0, nn.Linear(2, 2, bias=False)),
    "set_submodule": lambda n: n.set_submodule("body.1", nn.Tanh()),
    "a parameter below": lambda n: n.body[0].register_parameter("more", nn.Parameter(torch.ones(3))),
    "a buffer below": lambda n: n.body[0].register_buffer("mask", torch.ones(3)),
    "late tying": lambda n: setattr(n.body[0], "bias", n.head.bias),
    "a bias less": lambda n: setattr(n.body[0], "bias", None),
    "pruning": lambda n: prune.l1_unstructured(n.body[0], "weight", 0.5),
}


@pytest.mark.parametrize("edit", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("relate", ["clone", "clone_from", "a result", "deepcopy"])
def test_touch_follows_edits_inside_plain_children(relate, edit):
    n = Net()
    n.clone()
    child = RELATIVES[relate](n)
    if relate == "a result":
        child.head  # evaluates the result
    edit(n)
    child.touch()
    assert list(child.state_dict()) == list(n.state_dict())
    assert [type(m) for m in child.modules()] == [type(m) for m in n.modules()]
    assert child._version_kernel is n._version_kernel
    child(torch.ones(1, 2)).sum().backward()
    assert child.head.weight.grad is not None
    assert n.head.weight.grad is None
    assert {id(p) for p in child.parameters()}.isdisjoint(id(p) for p in n.parameters())
    n + child


def test_parameter_lists_and_dicts_follow_with_their_keys():
    a = NytoModule()
    a.p, a.d = nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"x": torch.ones(1)})
    b = a.clone()
    a.p.append(torch.full((3,), 2.0))
    a.d["y"] = torch.zeros(2)
    a.touch()
    b.touch()
    assert len(b.p) == 2
    assert b.p[1].tolist() == [2, 2, 2]
    assert list(b.d) == ["x", "y"]
    assert [tuple(q.shape) for q in b.p] == [(2,), (3,)]
    del a.d["x"]
    assert list(b.touch().d) == ["y"]
    assert b.d._keys is not a.d._keys


def test_a_relative_on_another_device_stays_on_it():
    n = Net()
    b = n.clone().to("meta")
    n.head = nn.Linear(2, 7)
    n.head.register_buffer("scale", torch.ones(1))
    b.touch()
    assert {t.device.type for t in b.state_dict().values()} == {"meta"}
    assert b.head.scale.device.type == "meta"
    assert n.head.weight.device.type == "cpu"


def test_an_independent_copy_does_not_follow():
    n = Net()
    n.clone()
    apart = P.independent(copy.deepcopy(n))
    n.head = nn.Linear(2, 7)
    assert apart.touch().head.weight.shape == (2, 2)
    assert (2 * apart).head.weight.shape == (2, 2)
    apart.extra = nn.Parameter(torch.zeros(1))
    assert not hasattr(n.touch(), "extra")


def test_a_configuration_applies_to_the_replaced_parameter_of_the_same_name():
    for replace in (nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 2)):
        n = Net()
        n.set_param_config(operational=False, name="head")
        n.head = replace
        doubled = 2 * n
        for name, p in n.head.named_parameters():
            assert torch.equal(doubled.head.get_parameter(name), p)
        assert torch.equal(doubled.body[0].weight, 2 * n.body[0].weight)
    n = Net()
    n.apply_param_config(lambda _, config: setattr(config, "rate", 0.1), "head.weight")
    twin = n.clone()
    n.head = nn.Linear(2, 5)
    for each in (n, twin.touch(), n.detach()):
        config = each._version_kernel.data.config
        assert config[each.get_param_id(each.head.weight)].rate == 0.1
        assert not hasattr(config[each.get_param_id(each.head.bias)], "rate")


def test_public_names_select_parameters_and_buffers():
    @mo.nograd_tensors("scale")
    class Fit(mo.Module):
        def __init__(self):
            super().__init__()
            self.coef = mo.tensor([1.0, 2.0], mode=["a", "b"]).attach()
            self.scale = mo.tensor([3.0], k=["c"])
            self.other = nn.Parameter(torch.ones(1))

    class Outer(mo.Module):
        def __init__(self):
            super().__init__()
            self.fit = Fit()

    for name in ("fit.coef", "fit.tensor:coef", "*.coef"):
        n = Outer()
        n.set_param_config(operational=False, name=name)
        assert torch.equal((2 * n).fit.coef.data, n.fit.coef.data)
        assert (2 * n).fit.other.item() == 2
        assert (P.only(Outer(), name) * 2).fit.other.item() == 1
        assert (P.only(Outer(), name) * 2).fit.coef.data.tolist() == [2, 4]
    for name in ("fit.scale", "fit.*scale"):
        n = P.buffer_policy(Outer(), "operate", name)
        assert (2 * n).fit.scale.data.tolist() == [6]
    inner = Fit()
    inner.set_param_config(operational=False, name="coef")
    assert (2 * inner).coef.data.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"no parameters called 'cof'; did you mean 'coef'"):
        inner.set_param_config(operational=False, name="cof")


def test_hooks_that_an_edit_removed_are_removed_from_relatives():
    net = Net()
    twin = net.clone()
    prune.l1_unstructured(net.head, "weight", 0.5)
    assert "weight_mask" in dict(twin.touch().head.named_buffers())
    prune.remove(net.head, "weight")
    assert twin.touch()(torch.ones(1, 2)).shape == (1, 2)
    assert not twin.head._forward_pre_hooks


def test_a_product_whose_particle_was_edited_is_refused_when_copied():
    net = Net()
    product = net.product()
    net.head = nn.Linear(2, 7)
    for act in (copy.deepcopy, pickle.dumps, lambda each: each.module()):
        with pytest.raises(StructureError, match="has been edited since"):
            act(product)
