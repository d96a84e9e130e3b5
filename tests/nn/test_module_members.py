"""The public members of `Module`: each exists with its documented signature, and their names are protected."""

import inspect
import typing

import pytest
import torch
from torch import nn

import moduli.nn as mn
from moduli.device import DeviceBounded
from moduli.nn import Functional, Module, ModuleType
from nn.helpers import Fit, assert_unchanged, labelled, snapshot


@pytest.mark.parametrize(
    "name", ["ModuleType", "TENSOR_PARAM_PREFIX", "TENSOR_BUFFER_PREFIX", "Module", "nograd_tensors"]
)
def test_the_module_level_names_exist(name):
    assert name in mn.__all__
    assert hasattr(mn, name)


def test_module_type_is_a_type_variable_bound_to_classes_of_modules():
    assert isinstance(ModuleType, typing.TypeVar)
    assert ModuleType.__name__ == "ModuleType"


def test_module_derives_from_functional_torch_module_and_device_bounded():
    assert Module.__bases__ == (Functional, nn.Module, DeviceBounded)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("export", ["self", "name"]),
        ("export_all", ["self"]),
        ("freeze", ["self"]),
        ("unfreeze", ["self"]),
        ("__setattr__", ["self", "name", "value"]),
        ("__delattr__", ["self", "name"]),
        ("to_device", ["self", "device"]),
        ("cpu", ["self"]),
        ("gpu", ["self", "index"]),
        ("allows", ["self", "obj"]),
        ("invoke", ["self", "obj", "kwargs"]),
    ],
)
def test_each_method_has_its_documented_arguments(name, arguments):
    assert list(inspect.signature(getattr(Module, name)).parameters) == arguments


def test_register_and_get_applicable_types_are_called_on_the_class():
    assert inspect.ismethod(Module.register)
    assert Module.get_applicable_types() == ()


def test_device_is_a_property():
    assert isinstance(inspect.getattr_static(Module, "device"), property)


def test_no_public_names_beyond_the_documented_ones_can_shadow_children():
    documented = {"export", "export_all", "freeze", "unfreeze", "device", "to_device", "gpu", "register",
                  "get_applicable_types", "allows", "invoke"}  # fmt: skip
    added = {name for name in dir(Module) if not name.startswith("_")} - set(dir(nn.Module))
    assert added == documented


@pytest.mark.parametrize("name", ["export", "freeze", "device", "forward", "parameters", "train", "register"])
@pytest.mark.parametrize("value", [labelled(2), nn.Linear(1, 1)], ids=["tensor", "child"])
def test_assigning_a_child_or_tensor_to_the_name_of_a_method_raises(name, value):
    module = Fit()
    with pytest.raises(AttributeError, match=name):
        setattr(module, name, value)
    assert {*module.state_dict()} == {*Fit().state_dict()}


def test_a_method_of_the_users_own_class_is_protected_too():
    class Mine(Module):
        def step(self):
            return 1

    module = Mine()
    with pytest.raises(AttributeError, match="step"):
        module.step = nn.Linear(1, 1)
    assert module.step() == 1
    assert not module._modules


def test_a_property_with_a_setter_receives_the_tensor():
    class Logged(Module):
        def __init__(self):
            super().__init__()
            self.inner = labelled(2)

        @property
        def outer(self):
            return self.inner * 2.0

        @outer.setter
        def outer(self, value):
            self.inner = value / 2.0

    module = Logged()
    module.outer = labelled(2, seed=3)
    assert torch.allclose(module.inner.data, labelled(2, seed=3).data / 2)


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_parameter("coef", nn.Parameter(torch.ones(1))),
        lambda m: m.register_buffer("coef", torch.ones(1)),
        lambda m: m.add_module("coef", nn.Identity()),
        lambda m: m.register_parameter("a.b", None),
        lambda m: setattr(m, "a.b", labelled(1)),
        lambda m: setattr(m, "tensor:coef", labelled(1)),
        lambda m: setattr(m, "", labelled(1)),
    ],
)
def test_a_refused_registration_leaves_the_module_bit_identical(register):
    module = Fit()
    before = snapshot(module)
    with pytest.raises(KeyError):
        register(module)
    assert_unchanged(before, snapshot(module))


@pytest.mark.parametrize("name", ["coef", "basis", "head", "note", "new"])
@pytest.mark.parametrize(
    "value", [labelled(2), nn.Parameter(torch.ones(2)), nn.Identity()], ids=["tensor", "parameter", "child"]
)
def test_an_assignment_that_fails_in_a_hook_leaves_the_module_bit_identical(name, value):
    module = Fit()
    module.note = "before"
    before = snapshot(module)

    def refuse(*_):
        raise ValueError("refused")

    hooks = nn.modules.module
    handles = [
        hooks.register_module_parameter_registration_hook(refuse),
        hooks.register_module_buffer_registration_hook(refuse),
        hooks.register_module_module_registration_hook(refuse),
    ]
    try:
        with pytest.raises(ValueError, match="refused"):
            setattr(module, name, value)
    finally:
        for handle in handles:
            handle.remove()
    assert_unchanged(before, snapshot(module))


def test_repr_shows_owned_tensors_with_their_axes():
    text = repr(Fit())
    assert "(coef): Tensor(channel=3), float32 parameter" in text
    assert "(basis): Tensor(channel=3, x=4), float32 buffer" in text
    assert "(head): Linear" in text


def test_repr_of_an_empty_module_and_of_extra_repr_is_as_in_torch():
    class Extra(Module):
        def extra_repr(self):
            return "size=3"

    assert repr(Module()) == "Module()"
    assert repr(Extra()) == "Extra(size=3)"
    module = Extra()
    module.w = labelled(1, requires_grad=False)
    assert repr(module) == "Extra(\n  size=3\n  (w): Tensor(_=1), float32 parameter without gradient\n)"


def test_dir_lists_public_names_only():
    names = dir(Fit())
    assert {"coef", "basis", "head"} <= set(names)
    assert not any(":" in name for name in names)


def test_nograd_tensors_raises_on_classes_that_are_no_names_or_no_modules():
    with pytest.raises(TypeError, match="takes names"):
        mn.nograd_tensors(Module)
    with pytest.raises(TypeError, match="Module"):
        mn.nograd_tensors("a")(nn.Linear)


def test_a_declared_name_that_is_never_assigned_warns_once():
    @mn.nograd_tensors("bassis")
    class Typo(Module):
        def __init__(self):
            super().__init__()
            self.basis = labelled(2)

    with pytest.warns(UserWarning, match="Typo declares 'bassis'"):
        list(Typo().parameters())
    list(Typo().parameters())
    Typo().state_dict()
    Typo().export_all()
