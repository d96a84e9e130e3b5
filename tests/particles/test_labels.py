"""Labels in arithmetic: entries pair by label in sums, products, populations, merges and edited relatives."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import particles as P
from moduli.particles import StructureError
from particles.helpers import Net


class Labelled(mo.Module):
    def __init__(self, values, **axes):
        super().__init__()
        self.w = mo.tensor(values, **axes).attach()


def test_models_pair_labels_as_labelled_tensors_do():
    a, b = Labelled([1.0, 2.0], ch=["r", "g"]), Labelled([10.0, 20.0], ch=["g", "r"])
    for result, expected in (
        (a + b, a.w + b.w),
        (b + a, b.w + a.w),
        (a - b, a.w - b.w),
        (a * b, a.w * b.w),
        (a + 0.5 * (b - a), a.w + 0.5 * (b.w - a.w)),
        (P.lerp(a, b, 0.25), a.w + 0.25 * (b.w - a.w)),
        (P.only(a, "w") + b, a.w + b.w),
        (P.map(torch.add, a, b), a.w + b.w),
        (P.where(False, a, b), 0 * a.w + b.w),
    ):
        assert result.w.dims == expected.dims
        assert torch.equal(result.w.data, expected.data)
    assert P.dot(a, b).item() == 1 * 20 + 2 * 10
    assert P.distance(a, b).item() == pytest.approx((19**2 + 8**2) ** 0.5)
    with P.differentiable():
        assert torch.equal((a + b).w.data, (a.w + b.w).data)
    c = copy.deepcopy(a)
    c += b
    assert c.w.sel(ch="r").item() == 21
    P.lerp_(c, b, 1.0)
    assert c.w.sel(ch="r").item() == 20
    P.axpy_(c, 1.0, b)
    assert c.w.sel(ch="g").item() == 20
    assert (a + (b + 0)).w.sel(ch="r").item() == 21  # an operand that was not evaluated yet


def test_axes_may_be_in_another_order():
    a = Labelled(torch.arange(6.0).reshape(2, 3), y=["a", "b"], x=["p", "q", "r"])
    b = Labelled(torch.arange(6.0).reshape(3, 2) * 10, x=["r", "q", "p"], y=["b", "a"])
    assert torch.equal((a + b).w.data, (a.w + b.w).data)
    a -= b
    assert a.w.sel(y="b", x="p").item() == 3 - 40


@pytest.mark.parametrize("other", [{"ch": ["r", "b"]}, {"channel": ["r", "g"]}])
def test_other_labels_are_refused_by_name(other):
    a, b = Labelled([1.0, 2.0], ch=["r", "g"]), Labelled([1.0, 2.0], **other)
    before = a.w.data.clone()
    for act in (lambda: a + b, lambda: a.__iadd__(b), lambda: P.lerp(a, b, 0.5), lambda: P.dot(a, b)):
        with pytest.raises(StructureError, match=r"'tensor:w' is labelled differently"):
            act()
    assert torch.equal(a.w.data, before)


def test_populations_and_merge_pair_labels():
    a, b = Labelled([1.0, 2.0], ch=["r", "g"]), Labelled([10.0, 20.0], ch=["g", "r"])
    pop = mo.Population.from_modules([a, a])
    assert torch.equal((pop + b)[0].w.data, (a.w + b.w).data)
    assert torch.equal(mo.merge.lerp(a, b, 0.5).w.data, (0.5 * a.w + 0.5 * b.w).data)
    assert torch.equal(mo.merge.linear([a, b]).w.data, (0.5 * a.w + 0.5 * b.w).data)
    state = mo.merge.linear([a.state_dict(), b.state_dict()])
    assert torch.equal(state["tensor:w"], (0.5 * a.w + 0.5 * b.w).data)


def test_relatives_follow_a_change_of_label_order():
    a = Labelled([1.0, 2.0], ch=["r", "g"])
    twin = a.clone()
    a.w = mo.tensor([5.0, 6.0], ch=["g", "r"]).attach()
    assert twin.touch().w.dims == a.w.dims
    assert (twin.product() + a.product()).module().w.sel(ch="r").item() == 12


def test_a_subclass_of_the_labelled_tensor_is_registered_as_its_class():
    class Spectrum(mo.Tensor):
        pass

    n = mo.Module()
    n.s = Spectrum(torch.tensor([1.0, 2.0], requires_grad=True), (mo.Space(["a", "b"], name="k"),))
    assert [name for name, _ in n.named_parameters()] == ["tensor:s"]
    assert type(n.s) is Spectrum
    assert n.s.names == ("k",)
    twin = 2 * n
    assert type(twin.s) is Spectrum
    assert twin.s.data.tolist() == [2, 4]
    assert type(copy.deepcopy(n).s) is Spectrum


class Gain(mo.nn.Module):
    def __init__(self, values, **axes):
        super().__init__()
        self.w = mo.tensor(values, **axes).attach()


class Outer(mo.Module):
    def __init__(self, *args, **axes):
        super().__init__()
        self.gain = Gain(*args, **axes)


def relabelled():
    a = Outer([1.0, 2.0], ch=["r", "g"])
    b = a.clone()
    b.gain.w = mo.tensor([20.0, 10.0], ch=["g", "r"]).attach()
    return a, b


def test_products_pair_labels():
    a, b = relabelled()
    x, y = a.product(), b.product()
    assert x._version is y._version
    assert (x + y).module().gain.w.sel(ch="r").item() == 11
    assert (y - x).module().gain.w.sel(ch="r").item() == 9
    assert P.map(torch.add, x, y).module().gain.w.sel(ch="g").item() == 22
    assert copy.deepcopy(y).module().gain.w.sel(ch="g").item() == 20
    a.product_(y)
    assert a.gain.w.sel(ch="r").item() == 10
    a, b = relabelled()
    a.product().axpy_(1.0, b.product())
    assert a.gain.w.sel(ch="g").item() == 22
    a.gain.w = mo.tensor([1.0, 2.0], ch=["g", "b"]).attach()
    with pytest.raises(StructureError, match=r"'gain.tensor:w' is labelled differently"):
        a.product() + b.product()


def test_a_product_keeps_the_labels_it_was_taken_with():
    a, _ = relabelled()
    product = a.product()
    a.gain.w = mo.tensor([0.0, 0.0], ch=["g", "r"]).attach()
    assert product.module().gain.w.sel(ch="r").item() == 1


@pytest.mark.parametrize("source", [lambda net: net, lambda net: net.state_dict()], ids=["module", "state dict"])
def test_migrate_pairs_labels(source):
    a, b = Outer([1.0, 2.0], ch=["r", "g"]), Outer([20.0, 10.0], ch=["g", "r"])
    assert P.migrate(source(b), to=a).gain.w.sel(ch="r").item() == 10
    values = torch.arange(6.0).reshape(2, 3)
    a, b = Outer(values, y=["a", "b"], x=[1, 2, 3]), Outer(10 * values.T, x=[1, 2, 3], y=["a", "b"])
    assert torch.equal(P.migrate(source(b), to=a).gain.w.data, 10 * values)
    with pytest.raises(StructureError, match="labels of gain.w"):
        P.migrate(source(Outer(values, y=["a", "c"], x=[1, 2, 3])), to=a)


def test_a_product_keeps_the_values_it_was_taken_with():
    net = Net()
    product, before = net.product(), net.body[0].weight.detach().clone()
    net.body[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert torch.equal(product.module().body[0].weight, before)
    assert torch.equal((2 * product).module().body[0].weight, 2 * before)


def test_members_of_a_population_pair_labels():
    values = torch.arange(6.0).reshape(2, 3)
    a, b = Outer(values, y=["a", "b"], x=[1, 2, 3]), Outer(10 * values.T, x=[1, 2, 3], y=["a", "b"])
    pop = mo.Population.from_modules([a, b])
    assert torch.equal(pop[1].gain.w.data, 10 * values)
    pop = mo.Population.from_modules([Outer([1.0, 2.0], ch=["r", "g"]), Outer([20.0, 10.0], ch=["g", "r"])])
    assert pop[1].gain.w.sel(ch="r").item() == 10
    with pytest.raises(
        StructureError, match=r"(?s)members 0 and 1 cannot be stacked: .*w.*the labels of axis 'y' differ"
    ):
        mo.Population.from_modules([a, Outer(values, y=["a", "c"], x=[1, 2, 3])])
