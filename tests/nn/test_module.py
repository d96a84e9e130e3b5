"""Modules with the tools of torch: conversions, loading, function transforms, export, parametrization and pruning."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize, prune

from moduli.device import Device
from moduli.labels import Space, Tensor
from moduli.nn import FrozenDict, Module, nograd_tensors
from nn.helpers import CHANNEL, Fit, assert_unchanged, assert_wrappers_are_storage, labelled, snapshot


def loss(module):
    return (module.coef * module.coef).sum().data


def test_buffer_wrappers_follow_conversions_and_loading():
    module = Fit().double()
    state = {name: torch.full_like(value, 3.0) for name, value in module.state_dict().items()}
    module.load_state_dict(state, labels="ignore")
    assert module.basis.dtype == torch.float64
    assert (module.basis.data == 3.0).all()
    assert (module.export("basis").data == 3.0).all()


def test_after_an_assigning_load_gradients_reach_the_registered_parameter():
    module = Fit()
    module.load_state_dict(
        {name: value.clone() for name, value in module.state_dict().items()}, assign=True, labels="ignore"
    )
    loss(module).backward()
    assert dict(module.named_parameters())["tensor:coef"].grad is not None
    assert_wrappers_are_storage(module)


def test_functional_calls_substitute_the_tensors_of_public_attributes():
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


def test_stacked_members_compute_their_own_results_under_vmap():
    members, x = [Fit(seed) for seed in range(3)], torch.ones(4)
    parameters, buffers = stack_module_state(members)
    stacked = vmap(lambda p, b: functional_call(members[0], (p, b), (x,)))(parameters, buffers)
    assert torch.allclose(stacked, torch.stack([member(x) for member in members]), atol=1e-6)


def test_export_takes_parameters_as_inputs_not_as_constants():
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


def test_the_public_attribute_reads_the_parametrized_value():
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
    assert_wrappers_are_storage(module)


def test_the_public_attribute_reads_the_pruned_value():
    module = Fit()
    prune.custom_from_mask(module, "tensor:coef", torch.tensor([1.0, 0.0, 1.0]))
    assert module.coef.data[1] == 0
    module(torch.ones(4)).sum().backward()
    gradient = module.get_parameter("tensor:coef_orig").grad
    assert gradient[1] == 0
    assert gradient[0] != 0
    before = snapshot(module)
    for attempt in (lambda: setattr(module, "coef", labelled(3)), lambda: delattr(module, "coef")):
        with pytest.raises(RuntimeError, match=r"prune\.remove"):
            attempt()
    assert_unchanged(before, snapshot(module))
    prune.remove(module, "tensor:coef")
    assert_wrappers_are_storage(module)
    assert module.coef.data[1] == 0


def test_the_device_is_correct_after_moves_by_torch():
    module, empty = Fit(), Module()
    parent = nn.ModuleList([module, empty])
    parent.to("meta")
    assert module.device == empty.device == Device("meta")
    parent.to_empty(device="cpu")
    assert module.device == empty.device == Device("cpu")
    module.extra = labelled(2)
    assert not module.extra.data.is_meta


def test_nograd_names_of_all_bases_are_united():
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


@pytest.mark.parametrize("previous", [nn.Parameter(torch.ones(2)), nn.Linear(1, 1), 3])
def test_a_labelled_tensor_replaces_any_attribute_of_the_same_name(previous):
    module = Module()
    module.w = previous
    module.w = labelled(2)
    assert list(module.state_dict()) == ["tensor:w"]
    module.register_buffer("b", torch.ones(2), persistent=False)
    module.b = labelled(2)
    assert list(module.state_dict()) == ["tensor:w", "tensor:b"]
    assert_wrappers_are_storage(module)


def test_a_refused_assignment_changes_nothing():
    class Fixed(Module):
        @property
        def w(self):
            return 3

    module = Fixed()
    before = snapshot(module)
    with pytest.raises(AttributeError, match="w"):
        module.w = labelled(2)
    assert_unchanged(before, snapshot(module))


def test_unfreeze_skips_dtypes_without_gradients():
    module = Fit()
    module.count = Tensor(torch.arange(3), (Space(3),))
    module.flags = Tensor(torch.tensor([True]), (Space(1),))
    module.wave = Tensor(torch.zeros(2, dtype=torch.complex64), (Space(2),))
    module.freeze().unfreeze()
    assert not module.count.requires_grad
    assert not module.flags.requires_grad
    assert module.wave.requires_grad
    assert module.coef.requires_grad


def test_get_parameter_dir_and_loading_use_public_names():
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


def test_exports_are_ordered_and_equal_by_value_after_pickling():
    a, b = Fit().export_all(), Fit().export_all()
    assert list(a) == ["basis", "coef"]
    assert a == b
    assert a != Fit(1).export_all()
    assert pickle.loads(pickle.dumps(a)) == a
    assert copy.deepcopy(a) == a
    assert isinstance(pickle.loads(pickle.dumps(a)), FrozenDict)


def test_a_module_and_its_tensors_report_the_same_device():
    module = Fit()
    assert module.device == module.coef.device == module.basis.device
    module.to("meta")
    assert module.device == module.coef.device == module.basis.device == torch.device("meta")
    assert Device("gpu") == Device("gpu", 0)


def test_state_dict_and_deepcopy_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Fit()
        module.state_dict()
        copy.deepcopy(module)
