"""Plain attributes and virtual tensors of results: shared, or referring to the result."""

import copy
import pickle
import threading

import torch
from torch import nn

import moduli as mo
from moduli import particles as P
from moduli.particles import NytoModule, adopt
from particles.helpers import Net


class Calls(list):
    """A list that counts how often it is copied."""

    copies = 0

    def __copy__(self):
        Calls.copies += 1
        return Calls(self)

    def __deepcopy__(self, memo):
        Calls.copies += 1
        return Calls(self)


def test_plain_attributes_are_shared(tmp_path):
    n = Net()
    n.lock, n.file, n.ticks = threading.Lock(), open(tmp_path / "log", "w"), (i for i in range(3))  # noqa: SIM115
    n.body.data = Calls(range(10))
    n.body.large = list(range(1_000_000))
    with n.file:
        for result in (2 * n, n + n, n.clone(), n.randn(), n.product().module(), n.detach(), n.clone_from(Net())):
            assert result.lock is n.lock
            assert result.file is n.file
            assert result.ticks is n.ticks
            assert result.body.data is n.body.data
            assert result.body.large is n.body.large
    twin = n.clone()
    n.head = nn.Sequential(nn.Linear(2, 2))
    n.head.lock = threading.Lock()
    n.other = nn.Linear(1, 1)
    assert twin.touch().other.weight.shape == (1, 1)
    assert Calls.copies == 0


def test_attributes_that_refer_to_the_model_refer_to_the_result():
    class Odd(NytoModule):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.order = [self.two, self.one]
            self.by_name = {"first": (self.one, "text"), "weights": [self.one.weight]}
            self.run = self.go
            self.hook = self.one.register_forward_hook(self.seen)
            self.count = []

        def seen(self, module, args, out):
            self.count.append(self)

        def go(self, x):
            return self.order[0](x)

    n = Odd()
    result = 2 * n
    assert result.order == [result.two, result.one]
    assert result.by_name["first"] == (result.one, "text")
    assert result.by_name["weights"][0] is result.one.weight
    assert result.run.__self__ is result
    result.one(torch.ones(2))
    assert n.count[-1] is result
    assert n.order == [n.two, n.one]
    n.order.append(n.one)
    assert len(result.order) == 2


class Tripled(mo.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        mo.VirtualTensor.create(self, "triple", "compute")

    def compute(self, dtype, device):
        return 3 * self.a


def test_virtual_tensors_of_results_are_computed_from_the_result():
    net = Tripled()
    for result in (2 * net, net + net, P.lerp(net, 3 * net, 0.5), (2 * net.product()).module()):
        assert result.triple.owner is result
        assert result.triple.value.tolist() == [6, 6]
        assert copy.deepcopy(result).triple.value.tolist() == [6, 6]
        assert pickle.loads(pickle.dumps(result)).triple.value.tolist() == [6, 6]
    assert net.triple.owner is net
    assert net.triple.value.tolist() == [3, 3]
    plain = nn.Linear(2, 2)
    mo.VirtualTensor.create(plain, "triple", lambda owner, dtype, device: 3 * owner.bias)
    for result in (2 * adopt(plain), adopt(plain).detach()):
        assert result.triple.owner is result
        assert torch.equal(result.triple.value, 3 * result.bias)
        assert result._replicate_for_data_parallel().triple.owner is not result


def test_virtual_tensors_of_added_modules_are_computed_from_each_relative():
    net = Net()
    twin = net.clone()
    net.more = Tripled()
    assert twin.touch().more.triple.owner is twin.more
    twin.more.a.data.zero_()
    assert (twin.more.triple.value.tolist(), net.more.triple.value.tolist()) == ([0, 0], [3, 3])
