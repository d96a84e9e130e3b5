"""No copy of a model reads the model it was made from: what refers to the model refers to the copy in the copy, or is refused."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles
from moduli.particles import StructureError

Pair = namedtuple("Pair", "layer name")


class Net(mo.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@dataclass
class Record:
    layer: nn.Module
    name: str = "layer"


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    layer: nn.Module


class Helper:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.model.__dict__["seen"] = True


class Layers(list[Any]):
    pass


class Table(dict[str, Any]):
    pass


def make_closure(net: nn.Module) -> Any:
    return lambda: net.layer


def make_recursive(net: nn.Module) -> Any:
    def function(depth: int = 2) -> Any:
        return function(depth - 1) if depth else net.layer

    return function


def make_default(net: nn.Module) -> Any:
    return lambda layer=net.layer: layer


# For each kind of reference: how a model gets it, and how its layer is found through it.
REFERENCES: dict[str, tuple[Any, Any]] = {
    "list": (lambda net: [net.layer], lambda held: held[0]),
    "nested": (lambda net: {"a": [(1, {2: net.layer})]}, lambda held: held["a"][0][1][2]),
    "long list": (lambda net: [net.layer] * 1000, lambda held: held[999]),
    "long dict": (lambda net: dict.fromkeys(range(1000), net.layer), lambda held: held[999]),
    "keys": (lambda net: {net.layer: 1}, lambda held: next(iter(held))),
    "ordered": (lambda net: OrderedDict(a=net.layer), lambda held: held["a"]),
    "defaultdict": (lambda net: defaultdict(list, a=[net.layer]), lambda held: held["a"][0]),
    "deque": (lambda net: deque([net.layer], maxlen=3), lambda held: held[0]),
    "set": (lambda net: {net.layer}, lambda held: next(iter(held))),
    "frozenset": (lambda net: frozenset({net.layer}), lambda held: next(iter(held))),
    "namedtuple": (lambda net: Pair(net.layer, "a"), lambda held: held.layer),
    "list subclass": (lambda net: Layers([net.layer]), lambda held: held[0]),
    "dict subclass": (lambda net: Table(a=net.layer), lambda held: held["a"]),
    "dataclass": (lambda net: Record(net.layer), lambda held: held.layer),
    "frozen dataclass": (lambda net: FrozenRecord(net.layer), lambda held: held.layer),
    "namespace": (lambda net: types.SimpleNamespace(layer=net.layer), lambda held: held.layer),
    "object": (lambda net: Helper(net), lambda held: held.model.layer),
    "weak": (lambda net: weakref.ref(net), lambda held: held().layer),
    "weak method": (lambda net: weakref.WeakMethod(net.forward), lambda held: held().__self__.layer),
    "proxy": (lambda net: [weakref.proxy(net)], lambda held: held[0].layer),
    "partial": (lambda net: functools.partial(getattr, net, "layer"), lambda held: held()),
    "method": (lambda net: net.forward, lambda held: held.__self__.layer),
    "cached": (lambda net: functools.lru_cache(net.get_submodule), lambda held: held("layer")),
    "closure": (make_closure, lambda held: held()),
    "recursive closure": (make_recursive, lambda held: held()),
    "default": (make_default, lambda held: held()),
    "built-in method": (lambda net: [net.layer].copy, lambda held: held()[0]),
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("where", ["root", "child"])
def test_references_to_the_model_are_those_of_the_copy(kind: str, where: str) -> None:
    make, find = REFERENCES[kind]
    net = Net()
    owner: Any = net if where == "root" else net.layer
    owner.__dict__["held"] = make(net)
    for made in (2 * net, net.clone(), net + net, (2 * net).clone(), net.product().module(), net.detach()):
        held = (made if where == "root" else made.layer).held
        assert type(held) is type(owner.held)
        assert find(held) is made.layer
    assert find(owner.held) is net.layer


def test_a_forward_that_is_an_attribute_computes_with_the_copy() -> None:
    net, x = Net(), torch.randn(3, 2)
    for forward in (functools.partial(Net.forward, net), lambda x: net.layer(x), types.MethodType(Net.forward, net)):
        net.forward = forward  # type: ignore[method-assign]
        assert torch.equal((5 * net)(x), nn.functional.linear(x, 5 * net.layer.weight, 5 * net.layer.bias))


def test_hooks_see_the_copy() -> None:
    net, seen = Net(), []
    net.layer.register_forward_hook(Helper(net))
    net.layer.register_forward_pre_hook(lambda module, _: seen.append(net))
    net.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    twin = 2 * net
    twin(torch.ones(1, 2))
    twin.load_state_dict(net.state_dict())
    assert "seen" not in vars(net)
    assert vars(twin)["seen"]
    assert len(seen) == 2
    assert all(each is twin for each in seen)


def test_hooks_that_come_with_an_edit_see_the_relative() -> None:
    net = mo.adopt(nn.Sequential(nn.Linear(2, 2)))
    twin = net.clone()
    net.register_forward_hook(Helper(net))
    net.append(nn.ReLU())
    twin.touch()
    twin(torch.ones(1, 2))
    assert vars(twin).get("seen")
    assert "seen" not in vars(net)


def test_what_does_not_refer_to_the_model_is_shared() -> None:
    net, other = Net(), nn.Linear(1, 1)
    helper, data = Helper(other), [{"a": [object()]} for _ in range(3)]
    cyclic: list[Any] = [helper]
    cyclic.append(cyclic)
    net.helper, net.data, net.cyclic, net.function = helper, data, cyclic, make_closure(other)
    twin = 2 * net
    assert all(getattr(twin, name) is getattr(net, name) for name in ("helper", "data", "cyclic", "function"))


def test_objects_that_several_attributes_refer_to_stay_one_object() -> None:
    net = Net()
    net.helper = helper = Helper(net)
    net.layer.helper = helper  # type: ignore[assignment]
    helper.itself = helper  # type: ignore[attr-defined]
    twin = 2 * net
    assert twin.helper is twin.layer.helper is twin.helper.itself is not helper
    assert twin.helper.model is twin


class Unclonable:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __copy__(self) -> Unclonable:
        raise TypeError


UNCLONABLE = (lambda net: torch.optim.SGD(net.parameters(), 0.1), Unclonable, lambda net: weakref.WeakSet([net.layer]))


@pytest.mark.parametrize("make", UNCLONABLE)
def test_what_cannot_be_made_again_is_refused_by_name(make: Any) -> None:
    net = Net()
    net.tool = make(net)
    with pytest.raises(StructureError, match=rf"the attribute 'tool' of Net .*{type(net.tool).__name__}"):
        _ = 2 * net
    twin = copy.deepcopy(net)  # Python's own copies are not affected, nor are operations in place and edits
    net *= 2
    net.extra = nn.Linear(1, 1)
    assert torch.equal(net.layer.weight, 2 * twin.layer.weight)


def test_a_copy_does_not_keep_the_original() -> None:
    net = Net()
    net.__dict__["references"] = [weakref.ref(net), weakref.WeakMethod(net.forward)]
    made, gone = 2 * net, weakref.ref(net)
    gc.collect()
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()
    assert made.references[0]() is made


class Slotted(mo.Module):
    __slots__ = ("__hidden", "layers", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.layers = [self.layer]
        self.__hidden = 3

    def read_hidden(self) -> int:
        return self.__hidden


def test_attributes_in_slots_are_carried_over() -> None:
    net = Slotted()
    for made in (2 * net, copy.deepcopy(net)):
        assert made.layers[0] is made.layer
        assert made.read_hidden() == 3
        assert not hasattr(made, "scale")
    relative = net.clone()
    net.inner = Slotted()
    assert relative.touch().inner.layers[0] is relative.inner.layer
    assert particles.norm(relative - relative) == 0
