"""Attributes that refer to the model: in a copy they refer to the copy, or the copy is refused."""

from __future__ import annotations

import copy
import functools
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


# For each kind of reference: a function that creates it for a model, and one that reads the layer of the model through it.
REFERENCES: dict[str, tuple[Any, Any]] = {
    "list": (lambda net: [net.layer], lambda attribute: attribute[0]),
    "nested": (lambda net: {"a": [(1, {2: net.layer})]}, lambda attribute: attribute["a"][0][1][2]),
    "long list": (lambda net: [net.layer] * 1000, lambda attribute: attribute[999]),
    "long dict": (lambda net: dict.fromkeys(range(1000), net.layer), lambda attribute: attribute[999]),
    "keys": (lambda net: {net.layer: 1}, lambda attribute: next(iter(attribute))),
    "ordered": (lambda net: OrderedDict(a=net.layer), lambda attribute: attribute["a"]),
    "defaultdict": (lambda net: defaultdict(list, a=[net.layer]), lambda attribute: attribute["a"][0]),
    "deque": (lambda net: deque([net.layer], maxlen=3), lambda attribute: attribute[0]),
    "set": (lambda net: {net.layer}, lambda attribute: next(iter(attribute))),
    "frozenset": (lambda net: frozenset({net.layer}), lambda attribute: next(iter(attribute))),
    "namedtuple": (lambda net: Pair(net.layer, "a"), lambda attribute: attribute.layer),
    "list subclass": (lambda net: Layers([net.layer]), lambda attribute: attribute[0]),
    "dict subclass": (lambda net: Table(a=net.layer), lambda attribute: attribute["a"]),
    "dataclass": (lambda net: Record(net.layer), lambda attribute: attribute.layer),
    "frozen dataclass": (lambda net: FrozenRecord(net.layer), lambda attribute: attribute.layer),
    "namespace": (lambda net: types.SimpleNamespace(layer=net.layer), lambda attribute: attribute.layer),
    "object": (lambda net: Helper(net), lambda attribute: attribute.model.layer),
    "weak": (lambda net: weakref.ref(net), lambda attribute: attribute().layer),
    "weak method": (lambda net: weakref.WeakMethod(net.forward), lambda attribute: attribute().__self__.layer),
    "proxy": (lambda net: [weakref.proxy(net)], lambda attribute: attribute[0].layer),
    "partial": (lambda net: functools.partial(getattr, net, "layer"), lambda attribute: attribute()),
    "method": (lambda net: net.forward, lambda attribute: attribute.__self__.layer),
    "cached": (lambda net: functools.lru_cache(net.get_submodule), lambda attribute: attribute("layer")),
    "closure": (make_closure, lambda attribute: attribute()),
    "recursive closure": (make_recursive, lambda attribute: attribute()),
    "default": (make_default, lambda attribute: attribute()),
    "built-in method": (lambda net: [net.layer].copy, lambda attribute: attribute()[0]),
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("where", ["root", "child"])
def test_references_to_the_model_become_references_to_the_copy(kind: str, where: str) -> None:
    make, find = REFERENCES[kind]
    net = Net()
    owner: Any = net if where == "root" else net.layer
    owner.__dict__["attribute"] = make(net)
    for twin in (2 * net, net.clone(), net + net, (2 * net).clone(), net.product().module(), net.detach()):
        attribute = (twin if where == "root" else twin.layer).attribute
        assert type(attribute) is type(owner.attribute)
        assert find(attribute) is twin.layer
    assert find(owner.attribute) is net.layer


def test_a_forward_that_is_an_attribute_computes_with_the_copy() -> None:
    net, x = Net(), torch.randn(3, 2)
    for forward in (functools.partial(Net.forward, net), lambda x: net.layer(x), types.MethodType(Net.forward, net)):
        net.forward = forward  # type: ignore[method-assign]
        assert torch.equal((5 * net)(x), nn.functional.linear(x, 5 * net.layer.weight, 5 * net.layer.bias))


def test_hooks_are_called_with_the_copy() -> None:
    net, models = Net(), []
    net.layer.register_forward_hook(Helper(net))
    net.layer.register_forward_pre_hook(lambda module, _: models.append(net))
    net.register_load_state_dict_pre_hook(lambda module, *_: models.append(module))
    twin = 2 * net
    twin(torch.ones(1, 2))
    twin.load_state_dict(net.state_dict())
    assert "seen" not in vars(net)
    assert vars(twin)["seen"]
    assert len(models) == 2
    assert all(each is twin for each in models)


def test_hooks_added_by_an_edit_are_called_with_the_relative() -> None:
    net = mo.adopt(nn.Sequential(nn.Linear(2, 2)))
    twin = net.clone()
    net.register_forward_hook(Helper(net))
    net.append(nn.ReLU())
    twin.touch()
    twin(torch.ones(1, 2))
    assert vars(twin).get("seen")
    assert "seen" not in vars(net)


def test_attributes_without_a_reference_to_the_model_are_shared() -> None:
    net, other = Net(), nn.Linear(1, 1)
    helper, data = Helper(other), [{"a": [object()]} for _ in range(3)]
    cyclic: list[Any] = [helper]
    cyclic.append(cyclic)
    net.helper, net.data, net.cyclic, net.function = helper, data, cyclic, make_closure(other)
    twin = 2 * net
    assert all(getattr(twin, name) is getattr(net, name) for name in ("helper", "data", "cyclic", "function"))


def test_an_object_of_several_attributes_is_copied_once() -> None:
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
def test_attributes_that_cannot_be_copied_are_refused_by_name(make: Any) -> None:
    net = Net()
    net.tool = make(net)
    with pytest.raises(StructureError, match=rf"the attribute 'tool' of Net .*{type(net.tool).__name__}"):
        _ = 2 * net
    twin = copy.deepcopy(net)  # Python's own copies are not affected, nor are operations in place and edits
    net *= 2
    net.extra = nn.Linear(1, 1)
    assert torch.equal(net.layer.weight, 2 * twin.layer.weight)


def test_a_copy_does_not_keep_the_original_alive(without_gc: None) -> None:
    net = Net()
    net.__dict__["references"] = [weakref.ref(net), weakref.WeakMethod(net.forward)]
    twin, reference = 2 * net, weakref.ref(net)
    del net
    assert reference() is None
    assert twin.references[0]() is twin


class Slotted(mo.Module):
    __slots__ = ("__hidden", "layers", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.layers = [self.layer]
        self.__hidden = 3

    def read_hidden(self) -> int:
        return self.__hidden


def test_attributes_in_slots_are_copied() -> None:
    net = Slotted()
    for twin in (2 * net, copy.deepcopy(net)):
        assert twin.layers[0] is twin.layer
        assert twin.read_hidden() == 3
        assert not hasattr(twin, "scale")
    relative = net.clone()
    net.inner = Slotted()
    assert relative.touch().inner.layers[0] is relative.inner.layer
    assert particles.norm(relative - relative) == 0
