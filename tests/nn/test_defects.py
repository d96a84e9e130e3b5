"""Cases that are easily got silently wrong, each shown to work or to be refused."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize, prune

from moduli.device import Device
from moduli.labels import Space, Tensor
from moduli.nn import FrozenDict, Module, VirtualTensor, cached, nograd_tensors
from nn.helpers import CHANNEL, Fit, labelled, picture, same_picture, wrappers_are_storage


def loss(module):
    return (module.coef * module.coef).sum().data


def test_d1_buffer_wrappers_follow_conversions_and_loading():
    module = Fit().double()
    state = {name: torch.full_like(value, 3.0) for name, value in module.state_dict().items()}
    module.load_state_dict(state, labels="ignore")
    assert module.basis.dtype == torch.float64
    assert (module.basis.data == 3.0).all()
    assert (module.export("basis").data == 3.0).all()


def test_d2_after_an_assigning_load_gradients_land_on_the_live_parameter():
    module = Fit()
    module.load_state_dict(
        {name: value.clone() for name, value in module.state_dict().items()}, assign=True, labels="ignore"
    )
    loss(module).backward()
    assert dict(module.named_parameters())["tensor:coef"].grad is not None
    wrappers_are_storage(module)


def test_d3_functional_calls_substitute_what_public_attributes_read():
    module, x = Fit(), torch.ones(4)
    parameters = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    other = {name: torch.randn_like(value) for name, value in parameters.items()}
    twin = Fit()
    twin.load_state_dict(other, labels="ignore")
    assert torch.equal(functional_call(module, other, (x,)), twin(x))
    gradient = grad(lambda p: functional_call(module, p, (x,)).sum())(other)
    twin(x).sum().backward()
    assert torch.allclose(gradient["tensor:coef"], twin.coef.data.grad)
    assert gradient["tensor:coef"].abs().sum() > 0


def test_d3_stacked_members_give_their_own_results():
    members, x = [Fit(seed) for seed in range(3)], torch.ones(4)
    parameters, buffers = stack_module_state(members)
    stacked = vmap(lambda p, b: functional_call(members[0], (p, b), (x,)))(parameters, buffers)
    assert torch.allclose(stacked, torch.stack([member(x) for member in members]), atol=1e-6)


def test_d4_export_takes_parameters_as_inputs_not_as_constants():
    module, x = Fit(), torch.ones(4)
    program = torch.export.export(module, (x,))
    assert not program.constants
    assert set(program.state_dict) == set(module.state_dict())
    assert torch.allclose(program.module()(x), module(x), atol=1e-6)
    with torch.no_grad():
        program.state_dict["tensor:coef"].zero_()
    assert torch.allclose(program.module()(x), module.head.bias, atol=1e-6)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def test_d5_parametrizations_are_seen_by_the_public_attribute():
    module = Fit()
    before = module.export("coef")
    parametrize.register_parametrization(module, "tensor:coef", Double())
    assert torch.allclose(module.coef.data, before.data)
    with torch.no_grad():
        module.parametrizations["tensor:coef"].original.fill_(3.0)
    assert (module.coef.data == 6.0).all()
    assert module.coef.dims == before.dims
    loss(module).backward()
    assert module.parametrizations["tensor:coef"].original.grad is not None
    module.coef = Tensor(torch.full((3,), 8.0), (CHANNEL,))
    assert (module.parametrizations["tensor:coef"].original == 4.0).all()
    with pytest.raises(RuntimeError, match="remove_parametrizations"):
        del module.coef
    parametrize.remove_parametrizations(module, "tensor:coef")
    assert (module.coef.data == 8.0).all()
    wrappers_are_storage(module)


def test_d5_pruning_is_seen_by_the_public_attribute():
    module = Fit()
    prune.custom_from_mask(module, "tensor:coef", torch.tensor([1.0, 0.0, 1.0]))
    assert module.coef.data[1] == 0
    module(torch.ones(4)).sum().backward()
    gradient = module.get_parameter("tensor:coef_orig").grad
    assert gradient[1] == 0
    assert gradient[0] != 0
    before = picture(module)
    for attempt in (lambda: setattr(module, "coef", labelled(3)), lambda: delattr(module, "coef")):
        with pytest.raises(RuntimeError, match=r"prune\.remove"):
            attempt()
    same_picture(before, picture(module))
    prune.remove(module, "tensor:coef")
    wrappers_are_storage(module)
    assert module.coef.data[1] == 0


def test_d6_the_device_is_true_after_moves_made_by_torch():
    module, empty = Fit(), Module()
    parent = nn.ModuleList([module, empty])
    parent.to("meta")
    assert module.device == empty.device == Device("meta")
    parent.to_empty(device="cpu")
    assert module.device == empty.device == Device("cpu")
    module.extra = labelled(2)
    assert not module.extra.data.is_meta


def test_d7_multiple_inheritance_unites_nograd_names():
    @nograd_tensors("a")
    class A(Module):
        pass

    @nograd_tensors("b")
    class B(Module):
        pass

    @nograd_tensors("c")
    class C(A, B):
        pass

    class D(C):
        pass

    assert D.__nograd_tensors__ == {"a", "b", "c"}
    module = D()
    module.a = module.b = module.c = labelled(2)
    assert not list(module.parameters())
    assert set(module._buffers) == {"buffer:a", "buffer:b", "buffer:c"}


@pytest.mark.parametrize("held", [nn.Parameter(torch.ones(2)), nn.Linear(1, 1), 3])
def test_d8_a_labelled_tensor_replaces_whatever_had_the_name(held):
    module = Module()
    module.w = held
    module.w = labelled(2)
    assert list(module.state_dict()) == ["tensor:w"]
    module.register_buffer("b", torch.ones(2), persistent=False)
    module.b = labelled(2)
    assert list(module.state_dict()) == ["tensor:w", "tensor:b"]
    wrappers_are_storage(module)


def test_d8_a_refused_assignment_leaves_nothing_behind():
    class Fixed(Module):
        @property
        def w(self):
            return 3

    module = Fixed()
    before = picture(module)
    with pytest.raises(AttributeError, match="w"):
        module.w = labelled(2)
    same_picture(before, picture(module))


def test_d9_unfreeze_skips_what_cannot_take_gradients():
    module = Fit()
    module.count = Tensor(torch.arange(3), (Space(3),))
    module.flags = Tensor(torch.tensor([True]), (Space(1),))
    module.wave = Tensor(torch.zeros(2, dtype=torch.complex64), (Space(2),))
    module.freeze().unfreeze()
    assert not module.count.requires_grad
    assert not module.flags.requires_grad
    assert module.wave.requires_grad
    assert module.coef.requires_grad


def test_d10_reordered_labels_are_aligned_on_load():
    a, b = Module(), Module()
    a.w = Tensor(torch.tensor([1.0, 2.0]), (Space(["a", "b"]),))
    b.w = Tensor(torch.zeros(2), (Space(["b", "a"]),))
    b.load_state_dict(a.state_dict())
    assert b.w.data.tolist() == [2.0, 1.0]


def test_d11_parameters_are_found_shown_and_loaded_by_their_public_names():
    module = Module()
    module.inner = Fit()
    assert module.get_parameter("inner.coef") is module.inner.coef.data
    assert module.get_buffer("inner.basis") is module.inner.basis.data
    assert module.get_parameter("inner.tensor:coef") is module.inner.coef.data
    assert module.get_parameter("inner.head.weight") is module.inner.head.weight
    with pytest.raises(AttributeError):
        module.get_parameter("inner.nothing")
    assert "coef" in repr(module)
    assert "tensor:coef" not in dir(module.inner)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.coef = nn.Parameter(torch.ones(3))
            self.register_buffer("basis", torch.ones(3, 4))
            self.head = nn.Linear(4, 2)

    fit = Fit()
    fit.load_state_dict(Plain().state_dict(), labels="ignore")
    assert (fit.coef.data == 1).all()
    assert (fit.basis.data == 1).all()


def test_d12_exports_are_ordered_compared_by_value_and_survive_pickle():
    a, b = Fit().export_all(), Fit().export_all()
    assert list(a) == ["basis", "coef"]
    assert a == b
    assert a != Fit(1).export_all()
    assert pickle.loads(pickle.dumps(a)) == a
    assert copy.deepcopy(a) == a
    assert isinstance(pickle.loads(pickle.dumps(a)), FrozenDict)


def test_d13_module_and_tensors_agree_on_the_device():
    module = Fit()
    assert module.device == module.coef.device == module.basis.device
    module.to("meta")
    assert module.device == module.coef.device == module.basis.device == torch.device("meta")
    assert Device("gpu") == Device("gpu", 0)


# -- virtual tensors ---------------------------------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def doubled(self, dtype, device):
        return 2 * self.w


def plus_one(owner, dtype, device):
    return owner.w + 1


def test_v1_creating_again_under_the_same_name_works():
    module = Half()
    for factor in range(3):
        VirtualTensor.create(module, "v", lambda owner, dtype, device, factor=factor: factor * owner.w)
        gc.collect()
        assert torch.equal(module.v.value, factor * module.w)
    VirtualTensor.create(module, "v", "doubled", persist=True)
    gc.collect()
    assert torch.equal(module.v.value, 2 * module.w)
    assert "_v_ref" in module.state_dict()


def test_v1_a_temporary_of_the_same_name_does_not_take_the_reference_away():
    module = Half()
    VirtualTensor.create(module, "v", "doubled")
    kept = module.v
    module.v = VirtualTensor(module, "v", plus_one)
    del kept
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
def test_v2_copies_are_independent_and_work(materializer, copier):
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


def test_v2_a_copy_of_a_parent_rebinds_its_children():
    parent = nn.Sequential(Half(), Half())
    VirtualTensor.create(parent[0], "v", "doubled")
    twin = copy.deepcopy(parent)
    assert twin[0].v.owner is twin[0]
    average = torch.optim.swa_utils.AveragedModel(parent)
    assert average.module[0].v.owner is average.module[0]


def test_v3_a_virtual_tensor_of_another_module_or_name_is_refused():
    class Ours(Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def doubled(self, dtype, device):
            return 2 * self.w

    a, b = Ours(), Ours()
    foreign, misnamed = VirtualTensor(b, "v", "doubled"), VirtualTensor(a, "v", "doubled")
    with pytest.raises(ValueError, match="another"):
        a.v = foreign
    with pytest.raises(ValueError, match=r"'v'.*'u'"):
        a.u = misnamed
    a.v = misnamed
    assert torch.equal(a.v.value, 2 * a.w)


def test_v4_the_value_is_reused_in_a_scope_has_a_shape_and_is_a_tensor_to_other_code():
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


def test_v4_cycles_are_named():
    module = Half()
    VirtualTensor.create(module, "a", lambda owner, dtype, device: owner.b.value + 1)
    VirtualTensor.create(module, "b", lambda owner, dtype, device: owner.a.value + 1)
    with pytest.raises(RecursionError, match=r"Half\.a -> Half\.b -> Half\.a"):
        module.a.value


def test_v4_the_dtype_is_restored_when_it_persists():
    module, other = Half(), Half()
    for each in (module, other):
        VirtualTensor.create(each, "v", "doubled", persist=True)
    module.half()
    other.load_state_dict(module.state_dict())
    assert other.v.dtype == torch.float16
    third = copy.deepcopy(other).double()
    third.load_state_dict(module.state_dict(), assign=True)
    assert third.v.dtype == torch.float16


def test_v4_a_missing_attribute_inside_is_reported_as_such():
    module = Half()
    VirtualTensor.create(module, "v", lambda owner, dtype, device: owner.nothing)
    with pytest.raises(RuntimeError, match=r"Half\.v failed: .*nothing"):
        module.v.value
    with pytest.raises(RuntimeError, match="nothing"):
        module.v.shape
    del module._buffers["_v_ref"]
    with pytest.raises(RuntimeError, match="_v_ref"):
        module.v.dtype


def test_none_of_this_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Fit()
        module.state_dict()
        copy.deepcopy(module)
