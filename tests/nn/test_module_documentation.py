"""Each documented statement about `Module`: ownership, devices, and the meaning of assignment."""

import pytest
import torch
from torch import nn

from moduli.device import Device, DeviceBounded
from moduli.labels import Space, Tensor
from moduli.nn import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX, FrozenDict, Functional, Module, nograd_tensors
from nn.helpers import Fit, labelled


def test_assigning_a_tensor_keeps_the_public_wrapper_while_registering_the_underlying_data():
    module = Module()
    module.weight = labelled(2, 3)
    assert isinstance(module.weight, Tensor)
    assert dict(module.named_parameters())["tensor:weight"] is module.weight.data


def test_optimizers_update_labelled_tensors_and_keep_their_axes():
    module = Fit()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before, dims = module.export("coef"), module.coef.dims
    (module.coef * module.coef).sum().backward()
    optimizer.step()
    assert torch.allclose(module.coef.data, before.data * 0.8)
    assert module.coef.dims == dims


def test_hidden_names_are_the_prefix_and_the_public_name():
    assert (TENSOR_PARAM_PREFIX, TENSOR_BUFFER_PREFIX) == ("tensor:", "buffer:")
    assert {*Fit().state_dict()} == {"tensor:coef", "buffer:basis", "head.weight", "head.bias"}


def test_the_underlying_data_is_automatically_copied_into_module_owned_storage():
    module, source = Module(), labelled(2)
    module.weight = source
    with torch.no_grad():
        source.data.fill_(7.0)
    assert not (module.weight.data == 7.0).any()


def test_trainable_attributes_are_parameters_while_nograd_names_are_buffers():
    module = Fit()
    assert isinstance(module.coef.data, nn.Parameter)
    assert module.basis.data is module._buffers["buffer:basis"]
    assert isinstance(module.coef, Tensor)
    assert isinstance(module.basis, Tensor)


def test_the_module_is_also_a_functional_so_calling_dispatches():
    class Shape(Module):
        pass

    @Shape.register(Tensor)
    def _(shape, tensor):
        return tuple(tensor.shape)

    assert isinstance(Shape(), Functional)
    assert Shape()(labelled(2, 3)) == (2, 3)


def test_assigned_values_move_to_the_device_of_the_module():
    module = Module().to_device(Device("meta"))
    module.weight = labelled(2)
    assert module.weight.data.is_meta

    class Reading(DeviceBounded):
        def __init__(self, device):
            self._at = device

        @property
        def device(self):
            return self._at

        def to_device(self, device):
            return Reading(device)

    module.reading = Reading(Device("cpu"))
    assert module.reading.device == Device("meta")


def test_assigned_submodules_move_to_the_modules_device():
    outer, inner, plain = Module().to_device("meta"), Fit(), nn.Linear(2, 2)
    outer.inner, outer.plain = inner, plain
    assert inner.device == Device("meta")
    assert plain.weight.is_meta


def test_a_module_without_forward_trains_and_exports_do_not_follow():
    class Bag(Module):
        def __init__(self):
            super().__init__()
            self.amp = labelled(3)

    bag = Bag()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)
    (bag.amp * bag.amp).sum().backward()
    exported = bag.export("amp")
    values = exported.data.clone()
    optimizer.step()
    assert torch.equal(exported.data, values)
    assert not exported.requires_grad
    assert not torch.equal(bag.amp.data, values)


def test_after_assignment_the_wrapper_is_module_bound():
    module = Fit()
    assert module.coef.data is module.get_parameter("coef")
    assert module.basis.data is module.get_buffer("basis")


def test_requires_grad_of_the_module_applies_to_the_wrapper():
    module = Fit()
    module.requires_grad_(False)
    assert not module.coef.requires_grad


def test_nograd_attributes_follow_standard_buffer_behaviour():
    module = Fit().double()
    assert module.basis.dtype == torch.float64
    assert "buffer:basis" in module.state_dict()
    assert all(parameter is not module.basis.data for parameter in module.parameters())


def test_assignment_is_owning_by_value():
    module = Module()
    module.a = labelled(3)
    module.b = module.a
    assert module.a.data is not module.b.data
    assert module.a.data.data_ptr() != module.b.data.data_ptr()


def test_exports_cannot_be_changed_by_optimizer_steps_reassignment_or_updates():
    module = Fit()
    exported = module.export_all()
    values = {name: tensor.data.clone() for name, tensor in exported.items()}
    with torch.no_grad():
        module.coef.data.add_(1.0)
        module.basis.data.zero_()
    module.coef = labelled(5)
    assert all(torch.equal(exported[name].data, values[name]) for name in values)


def test_the_logical_device_defaults_to_cpu():
    assert Module().device == Device("cpu")


def test_nograd_tensors_class_attribute_defaults_to_the_empty_set():
    assert Module.__nograd_tensors__ == frozenset()
    assert Fit.__nograd_tensors__ == {"basis"}


def test_export_works_uniformly_for_parameters_and_buffers():
    module = Fit()
    for name in ("coef", "basis"):
        exported = module.export(name)
        assert exported.dims == getattr(module, name).dims
        assert exported.is_leaf
        assert exported.data.data_ptr() != getattr(module, name).data.data_ptr()


def test_export_raises_attribute_error_if_the_module_has_no_such_attribute():
    with pytest.raises(AttributeError, match="nothing"):
        Fit().export("nothing")


def test_export_raises_type_error_if_the_attribute_is_not_a_tensor():
    with pytest.raises(TypeError, match=r"head.*Linear"):
        Fit().export("head")


def test_export_all_traverses_nested_modules_with_dotted_names():
    outer = Module()
    outer.inner, outer.wrapped = Fit(), nn.Sequential(nn.Identity(), Fit(1))
    outer.scale = labelled(1)
    exported = outer.export_all()
    assert isinstance(exported, FrozenDict)
    assert list(exported) == ["scale", "inner.basis", "inner.coef", "wrapped.1.basis", "wrapped.1.coef"]


def test_freeze_disables_gradients_recursively_and_returns_self():
    module = Module()
    module.inner = Fit()
    assert module.freeze() is module
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_unfreeze_enables_gradients_recursively_and_returns_self():
    module = Module()
    module.inner = Fit()
    assert module.freeze().unfreeze() is module
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_buffers_remain_unaffected_by_freeze_and_unfreeze():
    module = Fit().freeze().unfreeze()
    assert not module.basis.requires_grad


def test_names_listed_as_nograd_are_registered_as_hidden_buffers_detached():
    module = Fit()
    module.basis = labelled(2, 2)
    assert not module.basis.requires_grad
    assert list(module._buffers) == ["buffer:basis"]


def test_an_assigned_copy_keeps_requires_grad():
    module = Module()
    module.a, module.b = labelled(2), labelled(2, requires_grad=False)
    assert (module.a.requires_grad, module.b.requires_grad) == (True, False)


@pytest.mark.parametrize("value", [None, 3, "text", torch.ones(2)])
def test_a_value_that_is_no_tensor_removes_the_hidden_registration(value):
    module = Fit()
    module.coef = module.basis = value
    assert not any(":" in name for name in module.state_dict())
    assert module.coef is value


def test_a_parameter_or_a_module_may_replace_an_owned_tensor_too():
    module = Fit()
    module.coef, module.basis = nn.Parameter(torch.ones(2)), nn.Linear(1, 1)
    assert {*module.state_dict()} == {"coef", "basis.weight", "basis.bias", "head.weight", "head.bias"}


def test_deleting_removes_the_hidden_storage():
    module = Fit()
    del module.coef
    del module.basis
    assert {*module.state_dict()} == {"head.weight", "head.bias"}
    with pytest.raises(AttributeError, match="coef"):
        module.coef
    with pytest.raises(AttributeError, match="coef"):
        del module.coef


def test_to_device_moves_everything_recursively_and_returns_the_module():
    outer = Module()
    outer.inner = nn.Sequential(Fit())
    assert outer.to_device(Device("meta")) is outer
    assert outer.device == outer.inner[0].device == Device("meta")
    assert all(tensor.is_meta for tensor in (*outer.parameters(), *outer.buffers()))


def test_cpu_returns_the_module_on_the_cpu():
    module = Fit()
    assert module.cpu() is module
    assert module.device == Device("cpu")


def test_gpu_moves_to_an_accelerator_or_raises_with_its_name():
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        assert Fit().gpu().device.name == "gpu"
    else:
        with pytest.raises(RuntimeError, match="gpu"):
            Fit().gpu()
        with pytest.raises(RuntimeError, match="gpu:1"):
            Fit().gpu(1)


def test_nograd_decoration_is_inherited_and_extends():
    @nograd_tensors("projector")
    class Sub(Fit):
        pass

    assert Sub.__nograd_tensors__ == {"basis", "projector"}
    assert Fit.__nograd_tensors__ == {"basis"}


def test_nograd_decorator_annotates_in_place_and_returns_that_same_class():
    class Plain(Module):
        pass

    assert nograd_tensors("basis", "projector")(Plain) is Plain
    assert Plain.__nograd_tensors__ == {"basis", "projector"}


def test_a_name_declared_after_instances_exist_changes_later_assignments():
    class Late(Module):
        pass

    class Sub(Late):
        pass

    module = Sub()
    module.z = labelled(2)
    nograd_tensors("z")(Late)
    module.z = module.z
    assert list(module._buffers) == ["buffer:z"]
    assert not module._parameters


def test_a_non_leaf_source_is_detached_into_a_fresh_leaf():
    source = labelled(2)
    module = Module()
    module.w = source * 2.0
    assert module.w.requires_grad
    assert module.w.is_leaf
    (module.w * 1.0).sum().backward()
    assert source.grad is None


class Somewhere(DeviceBounded):
    @property
    def device(self):
        return Device("cpu")

    def to_device(self, device):
        return self


def test_assignment_before_init_raises_and_names_super_init():
    class Early(Module):
        def __init__(self):
            self.w = labelled(2)

    class Half(Module):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.w = labelled(2)

    class Place(Module):
        def __init__(self):
            self.w = Somewhere()

    for cls in (Early, Half, Place):
        with pytest.raises(AttributeError, match=r"super\(\).__init__\(\) first"):
            cls()


def test_a_dot_in_a_name_is_refused_as_in_torch():
    module = Module()
    with pytest.raises(KeyError, match=r"\."):
        setattr(module, "a.b", labelled(2))
    assert not module.state_dict()


def test_integer_and_scalar_and_empty_tensors_can_be_owned():
    module = Module()
    module.count = Tensor(torch.arange(3), (Space(3),))
    module.scalar = Tensor(torch.tensor(2.0), ())
    module.none = Tensor(torch.zeros(0, 2), (Space(0), Space(2)))
    assert module.count.dtype == torch.int64
    assert module.scalar.item() == 2.0
    assert module.none.shape == (0, 2)
