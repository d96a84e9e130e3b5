"""Virtual tensors and versions: relatives gain and lose them with their reference, and compute from their own tensors."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles
from moduli.nn import VirtualTensor


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.inner = mo.Module()
        self.inner.v = nn.Parameter(torch.ones(2))
        self.plain = nn.Linear(2, 2)

    @mo.virtual
    def twice(self):
        return 2 * self.w


def double_w(module, dtype, device):
    return 2 * module.w


def sum_v(module, dtype, device):
    return module.v.sum()


def make_relatives():
    net = Net()
    return net, 0 * net + 7, net.clone()


def test_a_relative_gets_the_attribute_with_its_reference():
    net, relative, _ = make_relatives()
    VirtualTensor.create(net, "g", double_w)
    relative.touch()
    assert relative.g.owner is relative
    assert relative.g.value.tolist() == [14, 14, 14]
    assert net.g.value.tolist() == [2, 2, 2]
    assert len(net.history) == 1
    # Either model may create it again.
    VirtualTensor.create(relative, "g", lambda module, dtype, device: 3 * module.w)
    assert relative.g.value.tolist() == [21, 21, 21]
    assert net.touch().g.value.tolist() == [3, 3, 3]


def test_virtual_tensors_of_submodules_of_both_kinds_are_followed():
    net, relative, _ = make_relatives()
    VirtualTensor.create(net.inner, "g", sum_v)
    VirtualTensor.create(net.plain, "h", lambda module, dtype, device: module.weight + 1)
    relative.touch()
    assert relative.inner.g.value == 14
    assert relative.plain.h.owner is relative.plain
    assert (relative.plain.h.value == 8).all()
    adopted = mo.adopt(nn.Linear(2, 1))
    other = 0 * adopted + 7
    VirtualTensor.create(adopted, "row", lambda module, dtype, device: module.weight[0])
    assert other.touch().row.value.tolist() == [7, 7]


def test_an_assigned_instance_is_followed():
    net, relative, _ = make_relatives()
    net.g = VirtualTensor(net, "g", double_w)
    assert relative.touch().g.value.tolist() == [14, 14, 14]
    assert net.history[-1].where == ("g",)


@pytest.mark.parametrize("remove", ["delete", "number", "parameter", "module"])
def test_removing_the_attribute_removes_its_reference_everywhere(remove):
    net, relative, late = make_relatives()
    VirtualTensor.create(net, "g", double_w)
    assert relative.touch().g.value.tolist() == [14, 14, 14]
    value = {"number": 5, "parameter": nn.Parameter(torch.zeros(1)), "module": nn.ReLU()}.get(remove)
    if remove == "delete":
        del net.g
    else:
        net.g = value
    gc.collect()
    for each in (relative.touch(), late.touch()):
        assert "_g_ref" not in dict(each.named_buffers())
        assert not isinstance(each.__dict__.get("g"), VirtualTensor)
        assert hasattr(each, "g") == (remove in ("parameter", "module"))
    assert "_g_ref" not in dict(net.named_buffers())
    if remove == "delete":
        VirtualTensor.create(relative, "g", double_w)
        assert net.touch().g.value.tolist() == [2, 2, 2]


def test_a_persistent_reference_restores_its_dtype_in_relatives():
    net, relative, late = make_relatives()
    VirtualTensor.create(net, "g", double_w, dtype=torch.float64, persist=True)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for each in (relative.touch(), late.touch(), net.clone()):
        each.g.dtype = torch.float16
        assert each.g.value.dtype == torch.float16
        each.load_state_dict(state)
        assert each.g.dtype == torch.float64


def test_the_function_may_refer_to_another_model():
    net, relative, _ = make_relatives()
    VirtualTensor.create(net, "g", lambda module, dtype, device: net.w + 1)
    assert relative.touch().g.value.tolist() == [8, 8, 8]
    assert (2 * relative).g.value.tolist() == [15, 15, 15]


def test_rollback_removes_and_restores_virtual_tensors():
    net, relative, _ = make_relatives()
    VirtualTensor.create(net, "g", double_w)
    relative.touch()
    particles.rollback(net, 0)
    for each in (net, relative.touch()):
        assert not hasattr(each, "g")
        assert not hasattr(each, "_g_ref")
    particles.rollback(net, 1)
    assert net.g.value.tolist() == [2, 2, 2]
    assert relative.touch().g.value.tolist() == [14, 14, 14]
    del net.g
    assert not hasattr(relative.touch(), "g")
    particles.rollback(net, 3)
    assert net.g.value.tolist() == [2, 2, 2]
    assert relative.touch().g.value.tolist() == [14, 14, 14]
    gc.collect()
    assert net.g.value.tolist() == [2, 2, 2]


def test_replaced_sources_are_read_inside_a_scope():
    net, relative, _ = make_relatives()
    VirtualTensor.create(net, "g", double_w)
    relative.touch()
    with mo.cached():
        assert relative.twice.tolist() == relative.g.value.tolist() == [14, 14, 14]
        net.w = nn.Parameter(torch.ones(4))
        relative.touch()
        assert relative.twice.tolist() == relative.g.value.tolist() == [14, 14, 14, 2]
        particles.rollback(net, 1)
        assert net.twice.tolist() == net.g.value.tolist() == [2, 2, 2]
        assert relative.touch().twice.tolist() == relative.g.value.tolist() == [14, 14, 14]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), lambda net: net + 0])
def test_copies_of_a_relative_have_its_virtual_tensors_and_follow_edits(duplicate):
    net, relative, _ = make_relatives()
    VirtualTensor.create(net, "g", double_w)
    twin = duplicate(relative.touch())
    assert twin.g.owner is twin
    assert torch.equal(twin.g.value, 2 * twin.w)
    del net.g
    assert not hasattr(twin.touch(), "g")


def test_a_failed_creation_changes_nothing():
    net, relative, _ = make_relatives()
    for wrong in ("no such method", 3):
        with pytest.raises((AttributeError, TypeError)):
            VirtualTensor.create(net, "g", wrong)
    with pytest.raises(ValueError, match="must be an identifier"):
        VirtualTensor.create(net, "not a name", double_w)
    assert not hasattr(net, "_g_ref")
    assert len(net.history) == 0
    assert not hasattr(relative.touch(), "_g_ref")
