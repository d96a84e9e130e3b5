"""Sources of virtual tensors: where they may be stored, and which reads are recognised."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from moduli.labels import Space, Tensor
from moduli.nn import Module, VirtualTensor, cached, virtual
from nn.helpers import labelled


class Box(Module):
    """A module whose virtual tensor is computed by the function that is passed."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function, self.calls = function, [0]
        for name, value in attributes.items():
            setattr(self, name, value)

    @virtual
    def value(self):
        self.calls[0] += 1
        return self.function(self)


def is_reused(module, change=None):
    """Whether the value is computed once before a change; check that it is computed again after it."""
    with torch.no_grad(), cached():
        first = module.value
        once = module.value is first and module.calls[0] == 1
        if change is not None:
            change()
            fresh = module.function(module)
            assert torch.equal(module.value, fresh)
            assert module.value is not first
        return once


def parameter(*values):
    return nn.Parameter(torch.tensor(values))


def test_tensors_in_lists_are_sources():
    a, b = parameter(1.0, 2.0), parameter(3.0, 4.0)
    module = Box(lambda m: torch.cat([m.a, m.b]), a=a, b=b)
    assert is_reused(module, lambda: b.add_(1))


def test_functions_with_several_results_are_recorded():
    a = parameter(3.0, 1.0, 2.0)
    module = Box(lambda m: m.a.sort()[0] + torch.stack(m.a.unbind()), a=a)
    assert is_reused(module, lambda: a.add_(1))


def test_tensors_in_keyword_arguments_are_sources():
    a, b = parameter(3.0, 1.0), parameter(1.0, 1.0)
    module = Box(lambda m: torch.add(input=m.a, other=m.b), a=a, b=b)
    assert is_reused(module, lambda: b.add_(1))


def test_plain_tensor_attributes_are_sources():
    module = Box(lambda m: m.table * 2, table=torch.ones(2))
    assert is_reused(module, lambda: setattr(module, "table", torch.zeros(2)))


def test_labelled_tensors_of_plain_modules_are_sources():
    holder = nn.Module()
    holder.table = Tensor(torch.ones(2), (Space(2),))
    module = Box(lambda m: m.holder.table.data * 2, holder=holder)
    assert is_reused(module, lambda: holder.table.data.add_(1))


def test_modules_in_weak_references_tuples_and_dicts_are_searched():
    other = nn.Linear(2, 2)
    module = Box(
        lambda m: m.reference().weight + m.table["deep"][0].weight,
        reference=weakref.ref(other),
        table={"deep": (other,)},
    )
    assert is_reused(module, lambda: other.weight.add_(1))


def test_modules_that_refer_to_their_parent_are_searched():
    child = nn.Linear(2, 2)
    module = Box(lambda m: m.child.weight + m.late.weight, child=child)
    child.parent = [module]
    module.late = nn.Linear(2, 2)
    assert is_reused(module, lambda: module.late.weight.add_(1))


def test_sources_of_an_inner_virtual_tensor_are_sources_of_the_outer():
    class Hidden:
        """An object that is not searched, so the source is only reachable through the inner virtual tensor."""

        def __init__(self, module):
            self.module = module

    inner = Box(lambda m: m.a * 2, a=parameter(1.0, 2.0))
    outer = Box(lambda m: m.hidden.module.value + 1, hidden=Hidden(inner))
    assert is_reused(outer)
    with torch.no_grad(), cached():
        inner.a.add_(1)
        inner.value
        assert torch.equal(outer.value, inner.a * 2 + 1)
        assert outer.value is outer.value


def test_sources_read_as_python_numbers_are_recorded():
    a = parameter(1.0, 2.0)
    module = Box(lambda m: torch.full((2,), m.a.sum().item()) + float(m.a[0].detach()), a=a)
    assert is_reused(module, lambda: a.add_(1))


def test_sources_read_through_numpy_are_recorded():
    a = parameter(1.0, 2.0)
    module = Box(lambda m: m.a * float(np.asarray(m.a.detach()).sum()), a=a)
    with torch.no_grad(), cached():
        module.value
        a.add_(1)
        assert torch.equal(module.value, module.function(module))


def test_the_value_may_be_a_source_itself():
    a = parameter(1.0, 2.0)
    module = Box(lambda m: m.a, a=a)
    with torch.no_grad(), cached():
        assert module.value is a
        module.a = parameter(5.0)
        assert module.value is module.a


def test_views_of_a_source_are_recomputed():
    a = parameter(1.0, 2.0)
    module = Box(lambda m: m.a[:1], a=a)
    assert is_reused(module, lambda: a.add_(1))


def test_a_value_without_sources_is_reused():
    module = Box(lambda m: torch.zeros(3))
    assert is_reused(module)


def test_values_from_tensor_subclasses_are_not_reused():
    class Odd(torch.Tensor):
        pass

    module = Box(lambda m: m.a * 2, a=torch.ones(2).as_subclass(Odd))
    with torch.no_grad(), cached():
        assert module.value is not module.value


def test_values_from_sparse_sources_are_not_reused():
    module = Box(lambda m: m.a.to_dense(), a=torch.eye(2).to_sparse())
    with torch.no_grad(), cached():
        assert module.value is not module.value


def test_sources_of_scripted_functions_are_recomputed():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @torch.jit.script
        def twice(x):
            return x * 2

    a = parameter(1.0, 2.0)
    module = Box(lambda m: twice(m.a), a=a)
    with torch.no_grad(), cached():
        module.value
        a.add_(1)
        assert torch.equal(module.value, a * 2)


def test_values_of_functional_calls_are_not_reused():
    class Call(Box):
        def forward(self):
            return self.value

    module = Call(lambda m: m.a * 2, a=parameter(1.0, 2.0))
    other = {"a": torch.zeros(2)}
    with torch.no_grad(), cached():
        assert functional_call(module, other, ()) is not functional_call(module, other, ())
        assert torch.equal(module.value, module.a * 2)
    assert module.calls[0] == 3


class PlainBox(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.factor, self.calls = parameter(1.0, 2.0), 2.0, [0]
        self.child = nn.Linear(2, 2)

    @virtual
    def value(self):
        self.calls[0] += 1
        scale = self.factor if self.training else 0.0
        return self.a * scale + self.child.weight[0] * (1.0 if self.child.training else 0.5) * self.extra()

    def extra(self):
        return 1.0

    def function(self, _=None):
        return type(self).value.__wrapped__(self)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "factor", 3.0),
        lambda m: m.eval(),
        lambda m: m.child.eval(),
        lambda m: setattr(m, "extra", lambda: 7.0),
    ],
)
def test_changes_of_plain_attributes_of_plain_modules_are_noticed(change):
    module = PlainBox()
    with torch.no_grad(), cached():
        first = module.value
        assert module.value is first
        change(module)
        assert torch.equal(module.value, module.function())
        assert not torch.equal(module.value, first)


def test_a_plain_module_that_counts_its_reads_is_computed_every_time():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.reads = parameter(1.0), 0

        @virtual
        def value(self):
            self.reads += 1
            return self.a * self.reads

        @virtual
        def consumed(self):
            del self.left[0], self.reads
            self.reads = len(self.left)
            return self.a * self.reads

    module = Counts()
    with torch.no_grad(), cached():
        assert [module.value.item() for _ in range(3)] == [1.0, 2.0, 3.0]
        module.left = [1, 2, 3]
        assert [module.consumed.item() for _ in range(2)] == [2.0, 1.0]


def test_two_virtual_tensors_of_one_name_keep_their_own_values():
    module = nn.Module()
    module.w = parameter(1.0)
    old = VirtualTensor(module, "v", lambda owner, dtype, device: owner.w * 2)
    new = VirtualTensor(module, "v", lambda owner, dtype, device: owner.w * 3)
    with torch.no_grad(), cached():
        for _ in range(2):
            assert (old.value.item(), new.value.item()) == (2.0, 3.0)
        assert old.value is old.value
        del old
        assert new.value.item() == 3.0


def test_a_method_replaced_on_a_plain_owner_is_called():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = parameter(1.0)

        def doubled(self, dtype, device):
            return self.w * 2

    module = Owner()
    VirtualTensor.create(module, "v", "doubled")
    with torch.no_grad(), cached():
        assert module.v.value is module.v.value
        module.doubled = lambda dtype, device: module.w * 100
        assert module.v.value.item() == 100.0


def test_an_unassigned_enclosing_variable_is_accepted():
    def make():
        def materialize(owner, dtype, device):
            return owner.w * 2 if True else later

        module = nn.Module()
        module.w = parameter(1.0)
        VirtualTensor.create(module, "v", materialize)
        with torch.no_grad(), cached():
            result = module.v.value is module.v.value
        later = 3
        return result, later

    assert make()[0]


def test_callable_objects_as_materializers():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, owner, dtype, device):
            return owner.w * self.factor

    module = nn.Module()
    module.w = parameter(1.0)
    VirtualTensor.create(module, "v", Scale(3))
    twin = copy.deepcopy(module)
    with torch.no_grad(), cached():
        assert module.v.value is module.v.value
        twin.w.add_(1)
        assert twin.v.value.item() == 6.0


def test_a_virtual_tensor_copied_alone_stays_with_its_owner():
    module = nn.Module()
    module.w = parameter(1.0, 2.0)
    VirtualTensor.create(module, "v", lambda owner, dtype, device: owner.w * 2, persist=True)
    assert copy.copy(module.v) is module.v
    assert copy.deepcopy(module.v) is module.v
    assert module.v.persist
    with torch.no_grad(), cached():
        assert np.asarray(module.v).tolist() == [2.0, 4.0]
    assert repr(module.v) == "VirtualTensor('v' of Module, torch.float32, cpu)"


def test_right_inverse_reaches_sources_in_children_and_takes_labelled_values():
    class Deep(Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(2, 1, bias=False)

        @virtual
        def row(self):
            return self.child.weight[0] * 2

        @row.right_inverse
        def row(self, value):
            return {"child.weight": value.unsqueeze(0) / 2}

    module = Deep()
    module.row = Tensor(torch.tensor([4.0, 6.0]), (Space(2),))
    assert torch.equal(module.row, torch.tensor([4.0, 6.0]))
    module.row = torch.tensor([1.0, 2.0])
    assert torch.equal(module.row, torch.tensor([1.0, 2.0]))


def test_expressions_with_labelled_values():
    class Labelled(Module):
        def __init__(self):
            super().__init__()
            self.w = labelled(2, names=["x"])
            VirtualTensor.create(self, "v", lambda owner, dtype, device: owner.w * 2.0)

    module = Labelled()
    doubled = module.w.data * 2
    assert module.v.value.names == ("x",)
    assert torch.equal((module.v + module.w).data, doubled + module.w.data)
    assert torch.equal((module.w + module.v).data, doubled + module.w.data)
    assert torch.equal((module.v * 3.0).data, doubled * 3)
    assert torch.equal(torch.sin(module.v).data, doubled.sin())
    assert torch.equal(module.v.sum("x").data, doubled.sum())
    module.double()
    assert module.v.value.dtype == torch.float64
    assert module.v.value.names == ("x",)


@pytest.mark.parametrize("taken", [nn.Identity(), 3])
def test_a_buffer_cannot_be_tied_to_a_taken_name(taken):
    from moduli.nn import tie

    module = nn.Module()
    module.register_buffer("table", torch.ones(2))
    module.other = taken
    with pytest.raises(KeyError, match="already exists"):
        tie(module, "other", to="table")
