"""The short way equals the long way, whatever was done to the models between two operations."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from moduli.particles import NytoModule, adopt
from moduli.particles._template import LAZY, RECORD


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))


class Other(Net):
    pass


def big():
    return adopt(nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 300)))


@pytest.fixture(params=["auto", "eager"], autouse=True)
def mode(request, monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", request.param)


def first(net):
    return next(iter(net.children()))


def moved(net):
    first(net).weight.data = first(net).weight.data.clone() * 2


CHANGES = {
    "nothing": lambda m: None,
    "values": lambda m: m.mul_() if hasattr(m, "mul_") else m.load_state_dict((2 * m).state_dict()),
    "values elsewhere": moved,
    "the mode": lambda m: m.eval(),
    "a mode below": lambda m: first(m).eval(),
    "no gradients": lambda m: first(m).weight.requires_grad_(False),
    "another parameter": lambda m: setattr(first(m), "weight", nn.Parameter(torch.ones_like(first(m).weight))),
    "an attribute": lambda m: setattr(m, "note", "new"),
    "an attribute below": lambda m: setattr(first(m), "note", "new"),
    "an attribute that went again": lambda m: (setattr(m, "note", "new"), delattr(m, "note")),
    "moved, and the mode": lambda m: (moved(m), m.eval()),
}


def attributes(net):
    return [
        (type(each), {key: held for key, held in each.__dict__.items() if isinstance(held, bool | str | int)})
        for each in net.modules()
    ]


def check(made, left, right, fn):
    for (name, mine), (_, theirs) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        got = made.get_parameter(name)
        torch.testing.assert_close(got.detach(), fn(mine.detach(), theirs.detach()))
        assert got.requires_grad == mine.requires_grad
    assert attributes(made) == attributes(left)


@pytest.mark.parametrize("make", [Net, big])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("built", [False, True], ids=["constructed", "built results"])
def test_after_a_change(make, change, built):
    a, b = make(), make()
    if built:
        a, b = a.clone(), b.clone()
        list(a.parameters()), list(b.parameters())
    for _ in range(3):
        check(a + b, a, b, torch.add)
    CHANGES[change](b)
    # As the right operand first: what is remembered of it then must not be taken for all there is to know.
    check(a - b, a, b, torch.sub)
    check(b - a, b, a, torch.sub)
    check(0.5 * b, b, b, lambda x, _: 0.5 * x)
    for _ in range(3):
        check(a + 0.5 * (b - a), a, b, lambda x, y: x + 0.5 * (y - x))
        check(b + a, b, a, torch.add)


def test_the_class_of_the_root_may_change():
    a, b = Net(), Net()
    a + b, a + b
    a.__class__ = Other
    assert type(a + b) is Other


def test_the_class_below_may_change():
    a, b = Net(), Net()
    a + b, a + b
    a.l1.__class__ = type("Special", (nn.Linear,), {})
    assert type((a + b).l1) is type(a.l1)


def test_single_numbers_are_told_apart():
    def make(value):
        return adopt(nn.ParameterList([torch.tensor([value]), torch.tensor([2.0, 3.0])]))

    a, b = make(1.0), make(1.0)
    a + b, a + b
    a[0] = nn.Parameter(torch.tensor([1.0]))
    with torch.no_grad():
        a[0].fill_(5.0)
    assert (a + b)[0].item() == 6.0


def test_frozen_in_between_is_seen_and_remembered():
    a, b = Net(), Net()
    a + b, a + b
    a.l1.weight.requires_grad_(False)
    a + b
    assert a.__dict__[RECORD].quick is not None
    assert not (a + b).l1.weight.requires_grad
    a.l1.weight.requires_grad_(True)
    assert (a + b).l1.weight.requires_grad


def test_nothing_else_is_kept_alive():
    a, b = Net(), Net()
    a + b, a - b, b + a
    held = [weakref.ref(each) for each in (b, b.l1, b.l1.weight)]
    gc.disable()
    try:
        del b
        assert [each() for each in held] == [None] * 3
        c = Net()
        # Another model may have come to lie where the old one was.
        for _ in range(3):
            check(a + c, a, c, torch.add)
    finally:
        gc.enable()


def test_results_stay_lazy():
    a, b = Net(), Net()
    a + b
    assert LAZY in (a + b).__dict__
    assert LAZY in (a + 0.5 * (b - a)).__dict__


def test_a_reflected_difference_is_not_turned_round():
    a, b = Net(), Net()
    a - b
    check(a.__rsub__(b), b, a, torch.sub)


def test_a_copy_is_not_taken_for_the_original():
    a, b = Net(), Net()
    a + b, a + b
    c = copy.deepcopy(a)
    with torch.no_grad():
        c.l1.weight.fill_(7.0)
    check(c + b, c, b, torch.add)
    check(a + b, a, b, torch.add)
