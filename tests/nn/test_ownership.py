"""Public wrappers hold the registered tensors, after any sequence of what torch can do to a module."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrize, prune

import moduli as mo
from moduli.labels import Space, Tensor
from moduli.nn import Module, nograd_tensors, tie
from nn.helpers import Fit, assert_wrappers_are_storage, labelled

NAMES = ["a", "b", "c", "state"]
names = st.sampled_from(NAMES)


@nograd_tensors("state")
class Part(Module):
    def __init__(self):
        super().__init__()
        self.state = Tensor(torch.arange(2.0), (Space(["u", "v"]),))
        self.a = labelled(2, 3)


class Live(RuleBasedStateMachine):
    """A module tree and a plain dictionary of what each public name should read as."""

    @initialize()
    def start(self):
        self.module = nn.Sequential(Part(), nn.Linear(3, 2))
        self.expected = {"state": torch.arange(2.0), "a": labelled(2, 3).data.detach().clone()}

    @property
    def part(self):
        return self.module[0]

    def everything(self, change):
        self.expected = {name: change(value) for name, value in self.expected.items()}

    @rule(name=names, seed=st.integers(0, 9), trained=st.booleans(), shape=st.lists(st.integers(0, 3), max_size=2))
    def assign(self, name, seed, trained, shape):
        value = labelled(tuple(shape), requires_grad=trained, seed=seed)
        before = getattr(self.part, name) if name in self.expected else None
        setattr(self.part, name, value)
        self.expected[name] = value.data.detach().clone()
        after = getattr(self.part, name)
        if before is not None and (before.dims, before.dtype) == (value.dims, value.dtype):
            assert after.data is before.data
        else:
            assert after.requires_grad == (trained and name != "state")

    @rule(name=names)
    def delete(self, name):
        if name in self.expected:
            delattr(self.part, name)
            del self.expected[name]
        else:
            with pytest.raises(AttributeError):
                delattr(self.part, name)

    @rule(name=names, value=st.sampled_from([None, 3, "module", "parameter"]))
    def replace(self, name, value):
        replacement = {"module": nn.Identity(), "parameter": nn.Parameter(torch.ones(1))}.get(value, value)
        setattr(self.part, name, replacement)
        assert getattr(self.part, name) is replacement
        self.expected.pop(name, None)
        delattr(self.part, name)

    @rule(
        dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
        flag=st.sampled_from(["", "overwrite", "swap"]),
    )
    def convert(self, dtype, flag):
        with flag_set(flag):
            self.module.to(dtype)
        self.everything(lambda value: value.to(dtype))

    @rule(flag=st.sampled_from(["", "overwrite", "swap"]))
    def meta_and_back(self, flag):
        with flag_set(flag):
            state = copy.deepcopy(self.module.state_dict())
            self.module.to("meta")
            assert all(getattr(self.part, name).data.is_meta for name in self.expected)
            self.module.to_empty(device="cpu")
            self.module.load_state_dict(state)

    @rule(assign=st.booleans(), factor=st.sampled_from([0.5, 2.0]))
    def load(self, assign, factor):
        state = copy.deepcopy(self.module.state_dict())
        for value in state.values():
            value.mul_(factor)
        self.module.load_state_dict(state, assign=assign)
        self.everything(lambda value: value * factor)

    @rule(how=st.sampled_from(["deepcopy", "pickle", "save", "weights"]))
    def duplicate(self, how):
        original, twin = self.module, duplicate_by(self.module, how)
        self.module = twin
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.fill_(-99)

    @rule(kind=st.sampled_from(["plain", "foreach", "fused"]))
    def step(self, kind):
        trained = [name for name in self.expected if getattr(self.part, name).requires_grad]
        parameters = [getattr(self.part, name).data for name in trained]
        if not parameters or any(p.dtype == torch.float16 for p in parameters):
            return
        options = {} if kind == "plain" else {kind: True}
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.25, **options)
        self.module.zero_grad()
        sum((getattr(self.part, name).data.sum() for name in trained), torch.tensor(0.0)).backward()
        for name in trained:
            assert dict(self.part.named_parameters())[f"tensor:{name}"].grad is not None
        optimizer.step()
        for name in trained:
            self.expected[name] = self.expected[name] - 0.25

    @rule(frozen=st.booleans())
    def freeze(self, frozen):
        (self.part.freeze if frozen else self.part.unfreeze)()
        for name in self.expected:
            assert getattr(self.part, name).requires_grad == (not frozen and name != "state")

    @rule()
    def call_functionally(self):
        tensors = {**dict(self.part.named_parameters()), **dict(self.part.named_buffers())}
        other = {name: torch.full_like(value, 7) for name, value in tensors.items()}
        reader = Reader(self.part, list(self.expected))
        values = functional_call(reader, {f"part.{name}": value for name, value in other.items()}, ())
        assert all((value == 7).all() for value in values)

    @rule()
    @precondition(lambda self: self.expected)
    def map_over_members(self):
        members = [Reader(self.part, list(self.expected)), Reader(copy.deepcopy(self.part), list(self.expected))]
        with torch.no_grad():
            for parameter in members[1].parameters():
                parameter.add_(1)
        state = stack_module_state([member.requires_grad_(False) for member in copy.deepcopy(members)])
        stacked = vmap(lambda parameters, buffers: functional_call(members[0], (parameters, buffers), ()))(*state)
        for values, *each in zip(stacked, *(member() for member in members), strict=True):
            assert torch.equal(values, torch.stack(each))

    @rule(name=names)
    def parametrize(self, name):
        if name in self.expected:
            key = self.part._labelled[name][0]
            parametrize.register_parametrization(self.part, key, Plus())
            assert torch.equal(getattr(self.part, name).data, self.expected[name])
            parametrize.remove_parametrizations(self.part, key)

    @rule(name=names)
    def prune(self, name):
        if name in self.expected and name != "state" and self.expected[name].numel():
            prune.identity(self.part, f"tensor:{name}")
            assert torch.equal(getattr(self.part, name).data, self.expected[name])
            prune.remove(self.part, f"tensor:{name}")

    @invariant()
    def wrappers_equal_their_storage(self):
        assert_wrappers_are_storage(self.module)
        assert set(self.part._labelled) == set(self.expected)
        registered = {*self.part._parameters, *self.part._buffers}
        assert registered == {("buffer:" if name == "state" else "tensor:") + name for name in self.expected}
        for name, value in self.expected.items():
            wrapper = getattr(self.part, name)
            assert wrapper.dtype == value.dtype
            assert torch.equal(wrapper.data.detach(), value)
            assert torch.equal(self.part.export(name).data, value)


class Reader(nn.Module):
    """A module whose call reads public attributes of another."""

    def __init__(self, part, wanted):
        super().__init__()
        self.part, self.wanted = part, wanted

    def forward(self):
        return tuple(getattr(self.part, name).data.clone() for name in self.wanted)


class Plus(nn.Module):
    def forward(self, x):
        return x + 0

    def right_inverse(self, x):
        return x


class flag_set:
    """A context in which one of torch's two flags for conversions is set."""

    def __init__(self, flag):
        self.flag = flag

    def set(self, value):
        if self.flag == "overwrite":
            torch.__future__.set_overwrite_module_params_on_conversion(value)
        elif self.flag == "swap":
            torch.__future__.set_swap_module_params_on_conversion(value)

    def __enter__(self):
        self.set(True)

    def __exit__(self, *_):
        self.set(False)


def duplicate_by(module, how):
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    buffer = io.BytesIO()
    if how == "save":
        torch.save(module, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)
    twin = copy.deepcopy(module)
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    return twin


TestLive = Live.TestCase
TestLive.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("flag", ["", "overwrite", "swap"])
@pytest.mark.parametrize("change", ["half", "double", "bfloat16", "float"])
def test_half_double_bfloat16_and_float_convert_every_wrapper(change, flag):
    module = Fit()
    with flag_set(flag):
        getattr(module, change)()
    assert_wrappers_are_storage(module)
    assert module.basis.dtype == module.coef.dtype == module.head.weight.dtype


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.compiles_labels
def test_compiled_equals_eager_and_follows_training(backend):
    torch._dynamo.reset()
    module, x = Fit(), torch.ones(4)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        assert torch.allclose(compiled(x), module(x), atol=1e-5)
        optimizer.zero_grad()
        compiled(x).sum().backward()
        gradient = module.coef.data.grad.clone()
        optimizer.zero_grad()
        module(x).sum().backward()
        assert torch.allclose(gradient, module.coef.data.grad, atol=1e-5)
        optimizer.step()


@pytest.mark.compiles_labels
def test_attributes_may_be_set_inside_compiled_code():
    torch._dynamo.reset()

    class Counting(Module):
        def __init__(self):
            super().__init__()
            self.w = labelled(2)
            self.calls = 0

        def forward(self, x):
            self.calls = self.calls + 1
            return self.w.data * x

    module = Counting()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    x = torch.ones(2)
    assert torch.equal(compiled(x), compiled(x))
    assert module.calls == 2


def test_averaged_models_and_data_parallel_replicas_read_their_own_storage():
    module = Fit()
    average = torch.optim.swa_utils.AveragedModel(module)
    assert average.module.coef.data is not module.coef.data
    assert torch.equal(average.module.coef.data, module.coef.data)
    replica = module._replicate_for_data_parallel()
    copies = {key: (value * 2) for key, value in module._parameters.items()}
    for key, value in copies.items():
        setattr(replica, key, value)
    assert replica.coef.data is copies["tensor:coef"]


def test_removing_the_registered_name_removes_the_attribute():
    module = Fit()
    delattr(module, "tensor:coef")
    with pytest.raises(AttributeError, match="coef"):
        module.coef
    assert list(module.export_all()) == ["basis"]
    assert "coef" not in repr(module)
    module.coef = labelled(2)
    assert_wrappers_are_storage(module)


def test_shallow_copies_share_their_tensors():
    module = Fit()
    twin = copy.copy(module)
    assert twin.coef.data is module.coef.data


@pytest.mark.parametrize("flag", ["", "overwrite", "swap"])
def test_ties_survive_conversions(flag):
    module = Fit()
    tie(module, "again", to="coef")
    with flag_set(flag):
        module.half()
        assert module.again.data is module.coef.data
        module.to("meta").to_empty(device="cpu")
        assert module.again.data is module.coef.data
    assert len(list(module.parameters())) == 3


class Energy(Tensor):
    """A subclass of `Tensor` with an attribute."""

    def __init__(self, data, dims, unit):
        super().__init__(data, dims)
        self.unit = unit


def test_a_tensor_of_a_subclass_is_owned_and_read_back_as_its_class():
    module = Module()
    module.e = Energy(torch.ones(2, requires_grad=True), (Space(["s", "p"], name="orbital"),), "eV")
    assert [name for name, _ in module.named_parameters()] == ["tensor:e"]
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.double()):
        assert type(each.e) is Energy
        assert each.e.unit == "eV"
        assert each.e.data is each.get_parameter("e")
        assert each.e.names == ("orbital",)
    # Results of operations on it are plain Tensors, paired by label.
    total = module.e + mo.tensor(torch.tensor([1.0, 2.0]).double(), orbital=["p", "s"])
    assert type(total) is Tensor
    assert total.data.tolist() == [3.0, 2.0]
    assert type(torch.sin(module.e)) is Tensor
    module.e = mo.tensor([1.0], "x")
    assert type(module.e) is Tensor
    module.e = Energy(torch.ones(1), (Space(1),), "J")
    del module.e
    module.e = mo.tensor([1.0], "x")
    assert type(module.e) is Tensor


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_of_a_tensor_of_a_subclass_keep_the_class(copier):
    twin = copier(Energy(torch.ones(2), (Space(2),), "eV"))
    assert (type(twin), twin.unit, twin.data.tolist()) == (Energy, "eV", [1.0, 1.0])
