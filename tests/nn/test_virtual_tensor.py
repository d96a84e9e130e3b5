"""`VirtualTensor`: each documented statement, then copies, foreign owners and operations."""

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from moduli.nn import Module, VirtualTensor, VirtualTensorAttributes, cached


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


class LabelledScaled(Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.seen = []

    doubled = Scaled.doubled
    static = Scaled.static
    computed = Scaled.computed


owners = pytest.mark.parametrize("owner", [Scaled, LabelledScaled])


def test_the_constructor_and_create_have_the_documented_signature():
    parameters = inspect.signature(VirtualTensor).parameters
    assert list(parameters) == ["owner", "name", "materializer", "dtype", "device", "persist"]
    assert [parameters[name].default for name in ("dtype", "device", "persist")] == [None, None, False]
    assert list(inspect.signature(VirtualTensor.create).parameters) == list(parameters)


@owners
def test_the_value_is_computed_from_other_attributes(owner):
    module = owner()
    module.v = VirtualTensor(module, "v", "doubled")
    assert torch.equal(module.v.value, torch.tensor([2.0, 4.0]))
    with torch.no_grad():
        module.w.fill_(5.0)
    assert torch.equal(module.v.value, torch.tensor([10.0, 10.0]))


@owners
def test_conversions_of_the_owner_apply_to_the_value(owner):
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


def test_the_dtype_defaults_to_that_of_torch():
    module = Scaled().double()
    VirtualTensor.create(module, "v", "doubled")
    assert module.v.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        VirtualTensor.create(module, "d", "doubled")
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.d.dtype == torch.float64


def test_the_device_defaults_to_that_of_torch():
    module = Scaled()
    with torch.device("meta"):
        VirtualTensor.create(module, "v", "doubled")
    assert module.v.device == torch.device("meta")


def test_persist_decides_whether_the_reference_is_in_the_state_dict():
    module = Scaled()
    VirtualTensor.create(module, "saved", "doubled", persist=True)
    VirtualTensor.create(module, "unsaved", "doubled")
    assert "_saved_ref" in module.state_dict()
    assert "_unsaved_ref" not in module.state_dict()
    assert {"_saved_ref", "_unsaved_ref"} <= {name for name, _ in module.named_buffers()}


def test_a_string_materializer_must_name_an_attribute_of_the_owner():
    module = Scaled()
    with pytest.raises(AttributeError, match="nothing"):
        VirtualTensor(module, "v", "nothing")
    assert not module._buffers


@pytest.mark.parametrize("name", ["static", "computed", "w"])
def test_a_string_materializer_must_name_a_method(name):
    module = Scaled()
    with pytest.raises(TypeError, match="must be a method"):
        VirtualTensor(module, "v", name)
    assert not module._buffers


def test_deleting_a_virtual_tensor_removes_its_reference_buffer():
    module = Scaled()
    virtual = VirtualTensor(module, "v", "doubled")
    assert "_v_ref" in module._buffers
    del virtual
    gc.collect()
    assert "_v_ref" not in module._buffers


def test_replacing_the_attribute_removes_the_reference_buffer():
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


def test_the_reference_buffer_is_named_after_the_virtual_tensor():
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


def test_a_materializer_that_returns_no_tensor_raises():
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


# -- copies, other owners, and operations ---------------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def doubled(self, dtype, device):
        return 2 * self.w


def plus_one(owner, dtype, device):
    return owner.w + 1


def test_creating_again_under_the_same_name_replaces_the_virtual_tensor():
    module = Half()
    for factor in range(3):
        VirtualTensor.create(module, "v", lambda owner, dtype, device, factor=factor: factor * owner.w)
        gc.collect()
        assert torch.equal(module.v.value, factor * module.w)
    VirtualTensor.create(module, "v", "doubled", persist=True)
    gc.collect()
    assert torch.equal(module.v.value, 2 * module.w)
    assert "_v_ref" in module.state_dict()


def test_deleting_a_replaced_virtual_tensor_keeps_the_reference_of_the_new_one():
    module = Half()
    VirtualTensor.create(module, "v", "doubled")
    replaced = module.v
    module.v = VirtualTensor(module, "v", plus_one)
    del replaced
    gc.collect()
    assert torch.equal(module.v.value, module.w + 1)


@pytest.mark.parametrize("materializer", ["doubled", plus_one])
@pytest.mark.parametrize(
    "copier",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: torch.load(saved(module), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "save"],
)
def test_copies_compute_from_their_own_owner(materializer, copier):
    module = Half()
    VirtualTensor.create(module, "v", materializer, persist=True)
    twin = copier(module)
    assert twin.v.owner is twin
    with torch.no_grad():
        twin.w.fill_(100.0)
    expected = twin.doubled(None, None) if materializer == "doubled" else plus_one(twin, None, None)
    assert torch.equal(twin.v.value, expected)
    twin.half()
    assert twin.v.value.dtype == torch.float16
    assert module.v.value.dtype == torch.float32
    del module
    gc.collect()
    assert torch.equal(twin.v.value, expected.half())
    twin.v = None
    gc.collect()
    assert "_v_ref" not in twin._buffers


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return buffer


def test_copying_a_parent_rebinds_the_virtual_tensors_of_its_children():
    parent = nn.Sequential(Half(), Half())
    VirtualTensor.create(parent[0], "v", "doubled")
    twin = copy.deepcopy(parent)
    assert twin[0].v.owner is twin[0]
    average = torch.optim.swa_utils.AveragedModel(parent)
    assert average.module[0].v.owner is average.module[0]


def test_assigning_a_virtual_tensor_of_another_module_or_name_is_refused():
    class Owner(Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def doubled(self, dtype, device):
            return 2 * self.w

    a, b = Owner(), Owner()
    foreign, misnamed = VirtualTensor(b, "v", "doubled"), VirtualTensor(a, "v", "doubled")
    with pytest.raises(ValueError, match="another"):
        a.v = foreign
    with pytest.raises(ValueError, match=r"'v'.*'u'"):
        a.u = misnamed
    a.v = misnamed
    assert torch.equal(a.v.value, 2 * a.w)


def test_the_value_is_cached_in_a_scope_and_operations_of_torch_accept_it():
    module, calls = Half(), []

    def count(owner, dtype, device):
        calls.append(1)
        return 2 * owner.w

    VirtualTensor.create(module, "v", count)
    with cached():
        for _ in range(3):
            assert torch.equal(torch.sin(module.v), torch.sin(2 * module.w))
    assert len(calls) == 1
    assert module.v.shape == (2,)
    assert module.v.ndim == len(module.v.shape) == 1
    assert torch.equal(module.v + 1, 2 * module.w + 1)
    assert torch.equal(1 - module.v, 1 - 2 * module.w)
    assert torch.equal(module.w @ module.v, module.w @ (2 * module.w))
    assert torch.equal(torch.stack([module.v, module.w]), torch.stack([2 * module.w, module.w]))
    assert torch.equal(module.v[1], 2 * module.w[1])
    assert [x.item() for x in module.v] == [2.0, 4.0]
    assert (module.v > 3).tolist() == [False, True]
    assert (module.v == torch.tensor([2.0, 0.0])).tolist() == [True, False]
    assert len(module.v) == 2
    assert float(module.v.detach()[0]) == 2.0
    assert module.v.detach().numpy().tolist() == [2.0, 4.0]
    assert torch.allclose(module.v, 2 * module.w)
    assert {module.v: 1}[module.v] == 1
    with pytest.raises(RuntimeError):
        bool(module.v)


def test_the_error_of_a_cycle_names_its_path():
    module = Half()
    VirtualTensor.create(module, "a", lambda owner, dtype, device: owner.b.value + 1)
    VirtualTensor.create(module, "b", lambda owner, dtype, device: owner.a.value + 1)
    with pytest.raises(RecursionError, match=r"Half\.a -> Half\.b -> Half\.a"):
        module.a.value


def test_a_persistent_reference_restores_the_dtype():
    module, other = Half(), Half()
    for each in (module, other):
        VirtualTensor.create(each, "v", "doubled", persist=True)
    module.half()
    other.load_state_dict(module.state_dict())
    assert other.v.dtype == torch.float16
    third = copy.deepcopy(other).double()
    third.load_state_dict(module.state_dict(), assign=True)
    assert third.v.dtype == torch.float16


def test_a_missing_attribute_inside_the_materializer_is_named():
    module = Half()
    VirtualTensor.create(module, "v", lambda owner, dtype, device: owner.nothing)
    with pytest.raises(RuntimeError, match=r"Half\.v failed: .*nothing"):
        module.v.value
    with pytest.raises(RuntimeError, match="nothing"):
        module.v.shape
    del module._buffers["_v_ref"]
    with pytest.raises(RuntimeError, match="_v_ref"):
        module.v.dtype
