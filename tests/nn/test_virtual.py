"""Virtual tensors: gradients, labels, assignment, and copies."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from moduli.labels import Space, Tensor
from moduli.nn import Module, VirtualTensor, cached, virtual
from nn.helpers import Skew, formula, labelled, owners


@owners
def test_the_attribute_is_a_tensor_with_gradients_to_its_source(owner):
    module = owner()
    assert type(module.weight) is torch.Tensor
    module.weight.square().sum().backward()
    gradient, module.a.grad = module.a.grad, None
    formula(module).square().sum().backward()
    assert torch.allclose(gradient, module.a.grad)


def test_sources_may_belong_to_other_modules():
    class Tied(Module):
        def __init__(self, other):
            super().__init__()
            self.hidden = [other]

        @virtual
        def weight(self):
            return 2 * self.hidden[0].a

    other = Skew()
    module = Tied(other)
    module.weight.sum().backward()
    assert torch.equal(other.a.grad, torch.full((3, 3), 2.0))
    with torch.no_grad(), cached():
        first = module.weight
        assert module.weight is first
        other.a.add_(1)
        assert torch.equal(module.weight, 2 * other.a)
        module.hidden[0] = Skew(seed=1)
        assert torch.equal(module.weight, 2 * module.hidden[0].a)


def test_sources_in_enclosing_variables_are_read_every_time():
    other, owner = nn.Linear(2, 2), nn.Module()

    def materialize(owner, dtype, device):
        return other.weight * 3

    VirtualTensor.create(owner, "v", materialize)
    with torch.no_grad(), cached():
        assert torch.equal(owner.v.value, other.weight * 3)
        other.weight.add_(1)
        assert torch.equal(owner.v.value, other.weight * 3)
        other = nn.Linear(2, 2)
        assert torch.equal(owner.v.value, other.weight * 3)


def test_labelled_sources_and_labelled_results():
    class Mixed(Module):
        def __init__(self):
            super().__init__()
            self.a = labelled(3, names=["x"])

        @virtual
        def doubled(self):
            return self.a * 2.0

    module = Mixed()
    assert module.doubled.names == ("x",)
    module.doubled.sum().backward()
    assert torch.equal(module.a.data.grad, torch.full((3,), 2.0))
    with torch.no_grad(), cached():
        assert module.doubled is module.doubled
        module.a.data.add_(1)
        assert torch.equal(module.doubled.data, module.a.data * 2)
    assert module.export("doubled").dims == module.a.dims


def test_virtual_tensors_may_build_on_each_other():
    class Chain(Skew):
        @virtual
        def squared(self):
            return self.weight @ self.weight

        @virtual
        def shifted(self):
            return self.squared + 1

    module = Chain()
    with torch.no_grad(), cached():
        assert module.shifted is module.shifted
        assert module.squared is module.squared
        assert module.counter[0] == 1
        module.a.add_(1)
        assert torch.allclose(module.shifted, formula(module) @ formula(module) + 1)


def test_the_value_has_the_dtype_and_device_of_its_sources():
    module = Skew()
    with torch.no_grad():
        module.weight
        assert module.double().weight.dtype == torch.float64
        assert module.to("meta").weight.is_meta


def test_virtual_tensors_are_not_in_the_state_dict_or_repr():
    assert list(Skew().state_dict()) == ["a"]
    assert "weight" not in repr(Skew())


@owners
def test_cycles_raise_with_the_path(owner):
    class Loop(owner):
        @virtual
        def p(self):
            return self.q + 1

        @virtual
        def q(self):
            return self.r + 1

        @virtual
        def r(self):
            return self.q + 1

    module = Loop()
    for _ in range(2):
        with pytest.raises(RecursionError, match=r"Loop\.q needs its own value: Loop\.q -> Loop\.r -> Loop\.q"):
            module.p
    assert module.weight is not None


@owners
def test_a_missing_source_is_named(owner):
    module = owner()
    del module.a
    with pytest.raises(RuntimeError, match=r"computing \w+\.weight failed: .*'a'"):
        module.weight


def test_the_result_must_be_a_tensor():
    class Wrong(Module):
        @virtual
        def weight(self):
            return 3

    with pytest.raises(TypeError, match=r"Wrong\.weight must be a tensor.*int"):
        Wrong().weight


def test_virtual_decorates_methods_of_modules_only():
    class NoModule:
        @virtual
        def weight(self):
            return torch.ones(1)

    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        NoModule().weight
    with pytest.raises(TypeError, match="method"):
        virtual(3)
    assert isinstance(Skew.weight, virtual)
    assert Skew.weight.__wrapped__.__name__ == "weight"


class Log(Module):
    def __init__(self, values=(1.0, 2.0)):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(values).log())
        self.shift = nn.Parameter(torch.zeros(2))

    @virtual
    def scale(self):
        return self.raw.exp() + self.shift

    @scale.right_inverse
    def scale(self, value):
        return {"raw": value.log(), "shift": torch.zeros_like(value)}


@pytest.mark.parametrize("kind", [torch.tensor, lambda v: nn.Parameter(torch.tensor(v))])
def test_right_inverse_allows_assignment_in_place(kind):
    module = Log()
    raw = module.raw
    with torch.no_grad():
        module.scale
    module.scale = kind([3.0, 4.0])
    assert module.raw is raw
    assert torch.allclose(module.scale, torch.tensor([3.0, 4.0]))
    assert set(dict(module.named_parameters())) == {"raw", "shift"}


def test_a_failed_right_inverse_changes_nothing():
    class Bad(Log):
        @Log.scale.right_inverse
        def scale(self, value):
            return {"raw": value.log(), "shift": torch.zeros(5)}

    module = Bad()
    before = module.raw.detach().clone()
    with pytest.raises(ValueError, match=r"'shift' the shape \(5,\).*\(2,\)"):
        module.scale = torch.ones(2)
    assert torch.equal(module.raw, before)
    # The right inverse of the base class is unchanged.
    base = Log()
    base.scale = torch.ones(2)
    assert torch.allclose(base.scale, torch.ones(2))


def test_right_inverse_may_set_the_sources_itself_and_have_any_name():
    class Own(Module):
        def __init__(self):
            super().__init__()
            self.a = labelled(2)

        @virtual
        def half(self):
            return self.a / 2.0

        @half.right_inverse
        def _(self, value):
            self.a = value * 2.0

    module = Own()
    module.half = labelled(2, seed=5)
    assert torch.allclose(module.half.data, labelled(2, seed=5).data)


def test_right_inverse_of_labelled_sources_aligns_labels():
    class Aligned(Module):
        def __init__(self):
            super().__init__()
            self.a = Tensor(torch.zeros(2), (Space(["x", "y"]),))

        @virtual
        def same(self):
            return self.a * 1.0

        @same.right_inverse
        def same(self, value):
            return {"a": value}

    module = Aligned()
    module.same = Tensor(torch.tensor([1.0, 2.0]), (Space(["y", "x"]),))
    assert module.a.data.tolist() == [2.0, 1.0]


@owners
def test_without_right_inverse_it_cannot_be_assigned_or_deleted(owner):
    module = owner()
    with pytest.raises(AttributeError, match="derived and cannot be assigned"):
        module.weight = torch.ones(3, 3)
    with pytest.raises(AttributeError, match="derived"):
        del module.weight


@pytest.mark.parametrize("returned", [3, {"raw": 3}, {"training": torch.ones(1)}])
def test_a_right_inverse_that_returns_no_named_tensors_raises(returned):
    class Odd(Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.ones(2))

        @virtual
        def v(self):
            return self.raw

        @v.right_inverse
        def v(self, value):
            return returned

    with pytest.raises(TypeError, match=r"right inverse of Odd\.v"):
        Odd().v = torch.ones(2)


def save_and_load(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@owners
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load, copy.copy])
def test_copies_compute_from_their_own_sources(owner, copier):
    module = owner()
    with torch.no_grad():
        before = module.weight
        twin = copier(module)
        assert torch.allclose(twin.weight, before)
        twin.a = nn.Parameter(torch.zeros(3, 3))
        assert torch.allclose(twin.weight, torch.eye(3))
        if copier is not copy.copy:
            assert torch.allclose(module.weight, before)
        twin.__dict__["_parameters"] = {"a": nn.Parameter(torch.ones(3, 3))}
        assert torch.allclose(twin.weight, formula(twin))
        assert torch.allclose(module.weight, formula(module))


def test_replicas_compute_from_their_own_sources():
    module = Skew()
    with torch.no_grad():
        module.weight
        replica = module._replicate_for_data_parallel()
        replica.a = torch.zeros(3, 3)
        assert torch.allclose(replica.weight, torch.eye(3))
        assert torch.allclose(module.weight, formula(module))


def test_virtual_tensors_of_replicas_read_the_replica():
    class Method(Skew):
        def doubled(self, dtype, device):
            return 2 * self.a

    module = Method()
    VirtualTensor.create(module, "method", "doubled")
    VirtualTensor.create(module, "function", lambda owner, dtype, device: 2 * owner.a)
    # `torch.nn.parallel.replicate` does this for each gpu.
    replica = module._replicate_for_data_parallel()
    replica.a = torch.zeros(3, 3)
    for name in ("method", "function"):
        with cached():
            assert torch.equal(getattr(module, name).value, 2 * module.a)
            assert torch.equal(getattr(replica, name).value, torch.zeros(3, 3))
        assert getattr(replica, name).owner is replica
    del replica
    gc.collect()
    assert torch.equal(module.method.value, 2 * module.a)


@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_virtual_tensors_of_replicas_of_plain_modules_read_the_replica(copier):
    module = nn.Linear(2, 2)
    VirtualTensor.create(module, "doubled", double_weight)
    module = copier(module)
    replica = nn.Sequential(module)[0]._replicate_for_data_parallel()
    again = replica._replicate_for_data_parallel()
    for number, each in enumerate((replica, again)):
        each.weight = torch.full((2, 2), float(number))
        assert torch.equal(each.doubled.value, 2 * each.weight)
        assert each.doubled.owner is each
    assert torch.equal(module.doubled.value, 2 * module.weight)
    reference = weakref.ref(module)
    del module
    assert reference() is None


def double_weight(module, dtype, device):
    return 2 * module.weight


def test_a_module_with_a_cached_value_can_be_collected():
    module = Skew()
    with torch.no_grad():
        module.weight
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None
