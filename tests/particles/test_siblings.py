"""Where mechanisms meet: buffers in every operation, labels in products, virtual tensors, compilers, threads, all or nothing."""

import copy
import operator
import pickle
import sys
import threading

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import prune

import moduli as mo
from moduli import particles as P
from moduli.layout import LayoutError
from moduli.particles import StructureError, adopt


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Gain(mo.nn.Module):
    def __init__(self, values, **axes):
        super().__init__()
        self.w = mo.tensor(values, **axes).attach()


class Outer(mo.Module):
    def __init__(self, *args, **axes):
        super().__init__()
        self.gain = Gain(*args, **axes)


# -- buffers -----------------------------------------------------------------------------------------------------------


def normed(mean, policy="operate"):
    made = adopt(nn.BatchNorm1d(2))
    made.running_mean.fill_(mean)
    return P.buffer_policy(made, policy, "running_*")


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.floordiv, operator.mod]


@pytest.mark.parametrize("fn", BINARY)
def test_buffers_take_part_in_every_operator(fn):
    a = normed(2.0)
    b = a.clone()
    b.running_mean.fill_(3.0)
    change = getattr(operator, f"i{fn.__name__}")
    for other in (b, 3, torch.tensor(3.0), torch.tensor([3.0, 4.0])):
        held = other.running_mean if isinstance(other, nn.Module) else other
        expected = fn(a.running_mean, held)
        assert torch.equal(fn(a, other).running_mean, expected)
        assert torch.equal(change(normed(2.0), other).running_mean, expected)
        theirs = other.product() if isinstance(other, nn.Module) else other
        assert torch.equal(fn(a.product(), theirs).module().running_mean, expected)
        if not isinstance(other, nn.Module):
            assert torch.equal(fn(other, a).running_mean, fn(held, a.running_mean))


def test_buffers_take_part_in_functions_of_models():
    a = normed(2.0)
    b = a.clone()
    b.running_mean.fill_(3.0)
    p, q = a.product(), b.product()
    for made, mean in (
        (P.where(False, a, b), 3.0),
        (P.where(b, a, b), 2.0),
        (P.where(False, a, 7.0), 7.0),
        (P.map(torch.maximum, a, b), 3.0),
        (P.map(lambda name, value: 0 * value + len(name), a, named=True), 12.0),
        (P.map(torch.maximum, p, q).module(), 3.0),
        (p.map(lambda value: 5 * value).module(), 10.0),
        (P.clamp(b, max=2.5), 2.5),
        (a + 0.5 * (b - a), 2.5),
        (0.5 * (b - a) + a, 2.5),
        (P.from_vector(a, P.vector(b)), 2.0),  # a vector is of parameters only
        (P.where(torch.zeros(4, dtype=torch.bool), a, b), 2.0),
    ):
        assert made.running_mean.tolist() == [mean, mean]
    drawn = (P.rand(a), p.rand().module(), P.rand(a, scale=0.5))
    assert all(0 <= value < 1 for each in drawn for value in each.running_mean.tolist())
    assert P.vector(a).shape == (4,)


def test_buffers_that_one_side_operates_on_are_refused_by_every_function():
    a, b = normed(2.0), normed(3.0, "copy")
    bare = adopt(nn.BatchNorm1d(2, track_running_stats=False))
    for x, y in ((a, b), (b, a), (a, bare), (bare, a)):
        for act in (
            lambda x, y: P.map(torch.add, x, y),
            lambda x, y: P.where(True, x, y),
            lambda x, y: P.axpy_(x, 1.0, y),
            lambda x, y: x - y,
        ):
            with pytest.raises(StructureError, match=r"the buffer 'running_mean' (has the policy|is missing)"):
                act(x, y)


def test_a_buffer_is_not_turned_into_another_kind_of_number():
    net = mo.Module()
    net.register_buffer("mask", torch.ones(2))
    P.buffer_policy(net, "operate")
    for act in (lambda: net * 1j, lambda: operator.imul(net, 1j), lambda: P.only(net, "mask") * 1j):
        with pytest.raises(TypeError, match="would turn 'mask' from torch.float32"):
            act()
    assert net.mask.tolist() == [1, 1]


# -- all or nothing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda a, b: P.lerp_(a, b, 0.5),
        lambda a, b: P.axpy_(a, 0.5, b),
        lambda a, b: operator.itruediv(a, b),
        lambda a, b: operator.itruediv(a, 2),
        lambda a, b: operator.iadd(a, torch.tensor([0.5, 0.5])),
    ],
)
def test_whole_numbers_are_refused_before_anything_is_changed(act):
    a = mo.Module()
    a.first = nn.Parameter(torch.ones(2))
    a.whole = nn.Parameter(torch.arange(2), requires_grad=False)
    b = a.clone() + 1
    with pytest.raises(TypeError, match="would turn 'whole' from torch.int64"):
        act(a, b)
    assert a.first.tolist() == [1, 1]
    P.axpy_(a, 2, b)
    assert a.whole.tolist() == [2, 5]


# -- labels ------------------------------------------------------------------------------------------------------------


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


def test_a_product_keeps_its_labels_when_its_particle_gets_others():
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


def test_a_product_keeps_its_values_when_its_particle_gets_others():
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


# -- virtual tensors ---------------------------------------------------------------------------------------------------


class Tripled(mo.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        mo.VirtualTensor.create(self, "triple", "compute")

    def compute(self, dtype, device):
        return 3 * self.a


def test_virtual_tensors_of_results_read_from_the_result():
    net = Tripled()
    for made in (2 * net, net + net, P.lerp(net, 3 * net, 0.5), (2 * net.product()).module()):
        assert made.triple.owner is made
        assert made.triple.value.tolist() == [6, 6]
        assert copy.deepcopy(made).triple.value.tolist() == [6, 6]
        assert pickle.loads(pickle.dumps(made)).triple.value.tolist() == [6, 6]
    assert net.triple.owner is net
    assert net.triple.value.tolist() == [3, 3]
    plain = nn.Linear(2, 2)
    mo.VirtualTensor.create(plain, "triple", lambda owner, dtype, device: 3 * owner.bias)
    for made in (2 * adopt(plain), adopt(plain).detach()):
        assert made.triple.owner is made
        assert torch.equal(made.triple.value, 3 * made.bias)
        assert made._replicate_for_data_parallel().triple.owner is not made


def test_virtual_tensors_of_modules_that_relatives_get_read_from_them():
    net = Net()
    twin = net.clone()
    net.more = Tripled()
    assert twin.touch().more.triple.owner is twin.more
    twin.more.a.data.zero_()
    assert (twin.more.triple.value.tolist(), net.more.triple.value.tolist()) == ([0, 0], [3, 3])


# -- relatives and copies ----------------------------------------------------------------------------------------------


def test_hooks_that_an_edit_removed_are_removed_from_relatives():
    net = Net()
    twin = net.clone()
    prune.l1_unstructured(net.head, "weight", 0.5)
    assert "weight_mask" in dict(twin.touch().head.named_buffers())
    prune.remove(net.head, "weight")
    assert twin.touch()(torch.ones(1, 2)).shape == (1, 2)
    assert not twin.head._forward_pre_hooks


def test_a_product_whose_particle_was_edited_is_refused_when_copied():
    net = Net()
    product = net.product()
    net.head = nn.Linear(2, 7)
    for act in (copy.deepcopy, pickle.dumps, lambda each: each.module()):
        with pytest.raises(StructureError, match="has been edited since"):
            act(product)


def test_adopted_graph_modules_pickle_and_recompile():
    x = torch.randn(3, 2)
    graph = adopt(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    twin = pickle.loads(pickle.dumps(2 * graph))
    assert torch.allclose((graph + twin)(x), (3 * graph)(x))
    twin.recompile()
    assert torch.allclose(twin(x), (2 * graph)(x))


def test_a_lazy_module_is_adopted_after_it_has_seen_data():
    lazy = nn.LazyLinear(3)
    with pytest.raises(LayoutError, match="this LazyLinear is lazy"):
        adopt(lazy)
    lazy(torch.ones(1, 2))
    assert torch.equal((2 * adopt(lazy)).weight, 2 * lazy.weight)


# -- threads and compilers ---------------------------------------------------------------------------------------------


@pytest.fixture
def switching():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_operations_on_a_relative_that_another_thread_edits(switching):
    for _ in range(60):
        base = Net()
        relatives = [base.clone() for _ in range(6)]
        start, errors = threading.Barrier(6), []

        def run(k, relatives=relatives, start=start, errors=errors):
            start.wait()
            try:
                if k % 2:
                    setattr(relatives[k], f"p{k}", nn.Parameter(torch.full((1,), float(k))))
                for other in relatives:
                    relatives[k] + other
            except BaseException as error:  # noqa: BLE001 - told by the test
                errors.append(error)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        for each in (base, *relatives):
            assert [each.touch().get_parameter(f"p{k}").item() for k in (1, 3, 5)] == [1, 3, 5]


COMPILED = {
    "lerp": lambda a, b, x: P.lerp(a, b, 0.5)(x),
    "where": lambda a, b, x: P.where(True, a, b)(x),
    "map": lambda a, b, x: P.map(torch.abs, a)(x),
    "only": lambda a, b, x: (P.only(a, "head.*") * 2)(x),
    "product": lambda a, b, x: (a.product() + a.product()).module()(x),
    "clone_from": lambda a, b, x: a.clone_from(b)(x),
    "touch": lambda a, b, x: a.touch()(x),
    "norm": lambda a, b, x: P.norm(a) + P.dot(a, b) + P.vector(a - b).sum() + x,
    "named parts": lambda a, b, x: _add_named(a, b)(x),
}


def _add_named(a, b):
    step = b - a
    moved = a + 0.5 * step
    return moved + step + 2 * step


@pytest.mark.parametrize("fn", COMPILED.values(), ids=COMPILED)
def test_functions_of_models_inside_a_compiled_function(fn):
    torch._dynamo.reset()
    a, b, x = Net(), Net(), torch.randn(3, 2)
    made = torch.compile(lambda x: fn(a, b, x), backend="eager")(x)
    assert torch.allclose(made, fn(a, b, x), atol=1e-6)


def test_compiled_operations_on_more_models_than_are_compiled_for():
    torch._dynamo.reset()
    x = torch.randn(3, 2)
    for _ in range(10):
        a, norm = Net(), adopt(nn.BatchNorm1d(2))
        assert torch.allclose(torch.compile(lambda x, a=a: (2 * a)(x), backend="eager")(x), (2 * a)(x))
        torch.compile(lambda x, norm=norm: (2 * norm)(x), backend="eager")(x)
