"""Plain attributes and virtual tensors of results, which refer to the result itself."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles as P
from moduli.particles import NytoModule, adopt


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Calls(list):
    """Counts how often it is copied."""

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
        for made in (2 * n, n + n, n.clone(), n.randn(), n.product().module(), n.detach(), n.clone_from(Net())):
            assert made.lock is n.lock
            assert made.file is n.file
            assert made.ticks is n.ticks
            assert made.body.data is n.body.data
            assert made.body.large is n.body.large
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
    made = 2 * n
    assert made.order == [made.two, made.one]
    assert made.by_name["first"] == (made.one, "text")
    assert made.by_name["weights"][0] is made.one.weight
    assert made.run.__self__ is made
    made.one(torch.ones(2))
    assert n.count[-1] is made
    assert n.order == [n.two, n.one]
    n.order.append(n.one)
    assert len(made.order) == 2


@pytest.fixture(autouse=True)
def switching(request):
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    if "thread" in request.node.name:
        sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Scaled(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Tripled(mo.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        mo.VirtualTensor.create(self, "triple", "compute")

    def compute(self, dtype, device):
        return 3 * self.a


def test_virtual_tensors_of_results_read_from_the_result():
    net = Tripled()
    for made in (2 * net, net + net, P.lerp(net, 3 * net, 0.5), (2 * net.product()).module()):
        assert made.triple.owner is made
        assert made.triple.value.tolist() == [6, 6]
        assert copy.deepcopy(made).triple.value.tolist() == [6, 6]
        assert pickle.loads(pickle.dumps(made)).triple.value.tolist() == [6, 6]
    assert net.triple.owner is net
    assert net.triple.value.tolist() == [3, 3]
    plain = nn.Linear(2, 2)
    mo.VirtualTensor.create(plain, "triple", lambda owner, dtype, device: 3 * owner.bias)
    for made in (2 * adopt(plain), adopt(plain).detach()):
        assert made.triple.owner is made
        assert torch.equal(made.triple.value, 3 * made.bias)
        assert made._replicate_for_data_parallel().triple.owner is not made


def test_virtual_tensors_of_modules_that_relatives_get_read_from_them():
    net = Scaled()
    twin = net.clone()
    net.more = Tripled()
    assert twin.touch().more.triple.owner is twin.more
    twin.more.a.data.zero_()
    assert (twin.more.triple.value.tolist(), net.more.triple.value.tolist()) == ([0, 0], [3, 3])
