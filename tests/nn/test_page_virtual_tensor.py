"""The page on virtual tensors, sentence by sentence."""

import gc
import inspect
import weakref

import pytest
import torch
from torch import nn

from moduli.nn import Module, VirtualTensor, VirtualTensorAttributes


class Scaled(nn.Module):
    def __init__(self, base=nn.Module):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.seen = []

    def doubled(self, dtype, device):
        self.seen.append((dtype, device))
        return 2 * self.w

    @staticmethod
    def static(dtype, device):
        return torch.zeros(2)

    @property
    def computed(self):
        return 3


class OurScaled(Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.seen = []

    doubled = Scaled.doubled
    static = Scaled.static
    computed = Scaled.computed


owners = pytest.mark.parametrize("owner", [Scaled, OurScaled])


def test_the_signature():
    parameters = inspect.signature(VirtualTensor).parameters
    assert list(parameters) == ["owner", "name", "materializer", "dtype", "device", "persist"]
    assert [parameters[name].default for name in ("dtype", "device", "persist")] == [None, None, False]
    assert list(inspect.signature(VirtualTensor.create).parameters) == list(parameters)


@owners
def test_a_tensor_attribute_derived_from_other_attributes(owner):
    module = owner()
    module.v = VirtualTensor(module, "v", "doubled")
    assert torch.equal(module.v.value, torch.tensor([2.0, 4.0]))
    with torch.no_grad():
        module.w.fill_(5.0)
    assert torch.equal(module.v.value, torch.tensor([10.0, 10.0]))


@owners
def test_preserving_the_type_and_device_conversion_enabled_by_to(owner):
    module = owner()
    VirtualTensor.create(module, "v", "doubled")
    assert module.double().v.value.dtype == torch.float64
    assert module.half().v.value.dtype == torch.float16
    module.to("meta")
    assert module.v.device == torch.device("meta")
    assert module.v.value.is_meta


@owners
def test_a_string_materializer_is_a_method_called_with_dtype_and_device(owner):
    module = owner()
    VirtualTensor.create(module, "v", "doubled", dtype=torch.float64)
    assert module.v.value.dtype == torch.float64
    assert module.seen == [(torch.float64, torch.device("cpu"))]


@owners
def test_a_callable_materializer_is_called_with_owner_dtype_and_device(owner):
    module, seen = owner(), []

    def materialize(*args):
        seen.append(args)
        return module.w

    VirtualTensor.create(module, "v", materialize)
    module.v.value
    assert seen == [(module, torch.float32, torch.device("cpu"))]


def test_dtype_none_is_the_default_of_torch():
    module = Scaled().double()
    VirtualTensor.create(module, "v", "doubled")
    assert module.v.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        VirtualTensor.create(module, "d", "doubled")
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.d.dtype == torch.float64


def test_device_none_is_the_default_of_torch():
    module = Scaled()
    with torch.device("meta"):
        VirtualTensor.create(module, "v", "doubled")
    assert module.v.device == torch.device("meta")


def test_persist_decides_whether_the_reference_is_in_the_state_dict():
    module = Scaled()
    VirtualTensor.create(module, "kept", "doubled", persist=True)
    VirtualTensor.create(module, "lost", "doubled")
    assert "_kept_ref" in module.state_dict()
    assert "_lost_ref" not in module.state_dict()
    assert {"_kept_ref", "_lost_ref"} <= {name for name, _ in module.named_buffers()}


def test_attribute_error_string_materializer_must_be_an_attribute_of_owner():
    module = Scaled()
    with pytest.raises(AttributeError, match="nothing"):
        VirtualTensor(module, "v", "nothing")
    assert not module._buffers


@pytest.mark.parametrize("name", ["static", "computed", "w"])
def test_type_error_attribute_specified_by_materializer_must_be_a_method(name):
    module = Scaled()
    with pytest.raises(TypeError, match="must be a method"):
        VirtualTensor(module, "v", name)
    assert not module._buffers


def test_the_finalizer_deletes_the_attributes_added_when_its_reference_count_goes_to_zero():
    module = Scaled()
    virtual = VirtualTensor(module, "v", "doubled")
    assert "_v_ref" in module._buffers
    del virtual
    gc.collect()
    assert "_v_ref" not in module._buffers


def test_replacing_the_attribute_removes_the_reference():
    module = Scaled()
    VirtualTensor.create(module, "v", "doubled")
    module.v = None
    gc.collect()
    assert not module._buffers


@owners
def test_the_owner_is_referenced_weakly(owner):
    module = owner()
    virtual = VirtualTensor(module, "v", "doubled")
    module.v = virtual
    assert virtual.owner is module
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None
    assert virtual.owner is None
    with pytest.raises(RuntimeError, match="no longer exists"):
        virtual.value
    assert "owner gone" in repr(virtual)


def test_a_function_is_referenced_strongly():
    module = Scaled()

    def materialize(owner, dtype, device):
        return owner.w + 1

    VirtualTensor.create(module, "v", materialize)
    reference = weakref.ref(materialize)
    del materialize
    gc.collect()
    assert reference() is not None
    assert torch.equal(module.v.value, module.w + 1)


def test_linked_attributes_is_an_alias_of_virtual_tensor_attributes():
    assert VirtualTensor.LinkedAttributes is VirtualTensorAttributes


def test_attributes_is_a_named_tuple_with_attribute_ref():
    module = Scaled()
    virtual = VirtualTensor(module, "v", "doubled")
    assert virtual.attributes == ("_v_ref",)
    assert virtual.attributes.ref == "_v_ref"
    assert isinstance(virtual.attributes, VirtualTensor.LinkedAttributes)


def test_create_is_equivalent_to_assigning():
    a, b = Scaled(), Scaled()
    a.v = VirtualTensor(a, "v", "doubled")
    assert VirtualTensor.create(b, "v", "doubled") is None
    assert torch.equal(a.v.value, b.v.value)
    assert a.v.attributes == b.v.attributes


def test_device_and_dtype_can_be_read_and_set():
    module = Scaled()
    VirtualTensor.create(module, "v", "doubled")
    assert (module.v.dtype, module.v.device) == (torch.float32, torch.device("cpu"))
    module.v.dtype = torch.float64
    assert module.v.dtype == module._v_ref.dtype == module.v.value.dtype == torch.float64
    module.v.device = torch.device("meta")
    assert module.v.device == torch.device("meta")
    assert module.v.value.is_meta


def test_name_gives_the_reference_its_name():
    module = Scaled()
    virtual = VirtualTensor(module, "abc", "doubled")
    assert virtual.name == "abc"
    assert module._abc_ref.numel() == 0


def test_to_sets_dtype_and_device_of_the_reference_and_returns_none():
    module = Scaled()
    VirtualTensor.create(module, "v", "doubled")
    assert module.v.to(torch.float64) is None
    assert module._v_ref.dtype == torch.float64
    module.v.to("meta", torch.float16)
    assert (module.v.dtype, module.v.device.type) == (torch.float16, "meta")
    module.v.to(torch.zeros(1))
    assert (module.v.dtype, module.v.device.type) == (torch.float32, "cpu")
    before = module._v_ref
    module.v.to(torch.float32, non_blocking=True, copy=True)
    assert module._v_ref is not before
    module.v.to(device="meta", copy=True)
    module.v.to(torch.float64)
    assert (module.v.dtype, module.v.device.type) == (torch.float64, "meta")
    module.v.to(device="cpu", memory_format=torch.preserve_format)
    assert (module.v.dtype, module.v.device.type) == (torch.float64, "cpu")
    with pytest.raises(TypeError):
        module.v.to("cpu", nonsense=1)


def test_value_is_cast_even_if_the_materializer_fails_to_ensure_the_dtype():
    module = Scaled()
    VirtualTensor.create(
        module, "v", lambda owner, dtype, device: torch.ones(2, dtype=torch.int32), dtype=torch.float64
    )
    assert module.v.value.dtype == torch.float64


def test_gradients_flow_through_the_cast():
    module = Scaled()
    VirtualTensor.create(module, "v", "doubled", dtype=torch.float64)
    module.v.value.sum().backward()
    assert torch.equal(module.w.grad, torch.tensor([2.0, 2.0]))


def test_a_materializer_that_returns_no_tensor_says_so():
    module = Scaled()
    VirtualTensor.create(module, "v", lambda owner, dtype, device: 3)
    with pytest.raises(TypeError, match=r"Scaled\.v must be a tensor.*int"):
        module.v.value


def test_a_reference_name_in_use_is_refused():
    module = Scaled()
    module.register_buffer("_v_ref", torch.zeros(3))
    with pytest.raises(AttributeError, match="_v_ref"):
        VirtualTensor(module, "v", "doubled")
    assert module._v_ref.shape == (3,)


def test_a_method_overridden_on_the_instance_is_the_one_called():
    module = Scaled()
    VirtualTensor.create(module, "v", "doubled")
    module.doubled = lambda dtype, device: module.w * 100
    assert torch.equal(module.v.value, module.w * 100)


@pytest.mark.parametrize("name", [3, None])
def test_the_name_must_be_text(name):
    with pytest.raises(TypeError, match="string"):
        VirtualTensor(Scaled(), name, "doubled")


@pytest.mark.parametrize("name", ["a b", "", "class", "1a", "a.b"])
def test_the_name_must_be_an_identifier(name):
    with pytest.raises(ValueError, match="identifier"):
        VirtualTensor(Scaled(), name, "doubled")


def test_a_materializer_is_checked_at_construction():
    with pytest.raises(TypeError, match="materializer"):
        VirtualTensor(Scaled(), "v", 3)
    with pytest.raises(TypeError, match="owner"):
        VirtualTensor(object(), "v", "doubled")
