"""Laws of arithmetic on random trees of modules, with ties, buffers, labelled and virtual tensors."""

import copy
import operator
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from moduli import particles
from moduli.labels import Space
from moduli.labels import Tensor as Labelled
from moduli.layout import layout_of
from moduli.nn import virtual
from moduli.particles import NytoModule, adopt, from_vector, vector
from strategies import modules

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


class Own(NytoModule):
    """A particle with a labelled tensor, a virtual tensor, and a tree of plain modules."""

    def __init__(self, tree):
        super().__init__()
        self.gain = Labelled(torch.tensor([1.0, 2.0], requires_grad=True), (Space(["r", "g"], name="c"),))
        self.tree = tree

    @virtual
    def twice(self):
        return self.gain * 2

    def forward(self, x):
        return self.tree(x) + self.twice.data.sum()


@st.composite
def particle(draw, dtypes=DTYPES):
    tree = draw(modules(dtypes=dtypes))
    return Own(tree) if draw(st.booleans()) else adopt(tree)


def values(net):
    return {name: p.detach() for name, p in net.named_parameters(remove_duplicate=False)}


def assert_close(a, b, *terms):
    """Check equality up to four roundings of numbers as large as the terms, or as the result without terms."""
    assert a.keys() == b.keys()
    for name in a:
        if not (a[name].is_floating_point() or a[name].is_complex()):
            assert torch.equal(a[name], b[name])
            continue
        info = torch.finfo(a[name].dtype)
        wide = torch.complex128 if a[name].is_complex() else torch.float64
        x, y = a[name].to(wide), b[name].to(wide)
        size = sum(each[name].to(wide).abs() for each in terms) if terms else torch.maximum(x.abs(), y.abs())
        within = (x - y).abs() <= 4 * info.eps * size + info.tiny
        assert (within | (x == y) | (x.isnan() & y.isnan())).all(), name


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert torch.equal(torch.nan_to_num(a[name]), torch.nan_to_num(b[name])), name


@given(particle(), st.integers(0, 2**16))
def test_arithmetic_satisfies_the_laws_of_a_vector_space(a, seed):
    g = torch.Generator().manual_seed(seed)
    b, c = particles.randn(a, 1.0, g), particles.randn(a, 1.0, g)
    assert_equal(values(a + b), values(b + a))
    assert_close(values((a + b) + c), values(a + (b + c)), values(a), values(b), values(c))
    assert_equal(values(a + 0 * b), values(a))
    assert_close(values(a - a), values(0 * a))
    assert_close(values(2.0 * (a + b)), values(2.0 * a + 2.0 * b), values(a), values(b))
    assert_close(values((0.5 + 0.25) * b), values(0.5 * b + 0.25 * b))
    assert_equal(values(operator.neg(-a)), values(a))
    assert_equal(values(1 * a), values(a))
    assert_equal(values(+a), values(a))
    assert_close(values(particles.lerp(a, b, 0.25)), values(a + 0.25 * (b - a)), values(a), values(b))


@pytest.mark.parametrize("fn", [operator.add, operator.sub, operator.mul, operator.truediv])
@given(net=particle(), lazy=st.booleans(), other=st.booleans(), seed=st.integers(0, 2**16))
def test_an_operation_equals_the_loop_over_tensors(fn, net, lazy, other, seed):
    a = net + 0 if lazy else net
    b = particles.randn(net, 1.0, torch.Generator().manual_seed(seed))
    if other:
        b._parameters
    expected = {name: fn(p, values(b)[name]) for name, p in values(a).items()}
    assert_equal(values(fn(a, b)), expected)
    assert_equal(values(fn(a, 3)), {name: fn(p, 3) for name, p in values(a).items()})
    assert_close(values(fn(3.5, a)), {name: fn(3.5, p).to(p.dtype) for name, p in values(a).items()})
    c = copy.deepcopy(a)
    parameters = dict(c.named_parameters())
    if fn is operator.add:
        c += b
    elif fn is operator.sub:
        c -= b
    elif fn is operator.mul:
        c *= b
    else:
        c /= b
    assert_equal(values(c), expected)
    assert all(parameters[name] is p for name, p in c.named_parameters())


@given(particle())
def test_results_have_the_structure_flags_ties_and_buffers_of_their_operand(net):
    state = {name: b.clone() for name, b in net.named_buffers()}
    flags = [p.requires_grad for p in net.parameters()]
    for result in (net + net, 2 * net, net.clone(), net.randn(), -net, net.detach(), net.product().clone().module()):
        assert layout_of(result) is layout_of(net)
        assert list(result.state_dict()) == list(net.state_dict())
        assert [p.requires_grad for p in result.parameters()] == flags
        assert all(p.is_leaf for p in result.parameters())
        assert type(result) is type(net)
        assert [type(m) for m in result.modules()] == [type(m) for m in net.modules()]
        assert not {id(m) for m in result.modules()} & {id(m) for m in net.modules()}
        for (name, mine), (_, theirs) in zip(result.named_buffers(), net.named_buffers(), strict=True):
            assert mine is not theirs
            assert torch.equal(mine, state[name])
            mine.zero_()
        assert all(torch.equal(b, state[name]) for name, b in net.named_buffers())


@given(particle())
def test_a_vector_and_back_is_the_same_model(net):
    assert_equal(values(from_vector(net, vector(net))), values(net))
    lazy = net + 1
    assert_equal(values(from_vector(net, vector(lazy))), values(lazy))


@given(particle(dtypes=(torch.float32,)), st.integers(0, 2**16))
def test_the_forward_of_a_result_is_that_of_the_combined_parameters(net, seed):
    b = particles.randn(net, 0.1, torch.Generator().manual_seed(seed))
    x = torch.ones(3)
    result = 0.5 * net + b
    other = dict(b.named_parameters())
    combined = {name: 0.5 * p + other[name] for name, p in net.named_parameters()}
    torch.testing.assert_close(result(x), functional_call(net, combined, (x,)), rtol=1e-5, atol=1e-5)


@given(particle(dtypes=(torch.float32,)))
def test_optimizers_stay_valid_through_operations_in_place(net):
    trainable = [p for p in net.parameters() if p.requires_grad]
    if not trainable:
        return
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net *= 2
    net += 1
    net -= 0.5 * net
    net **= 2
    particles.lerp_(net, 0 * net, 0.5)
    sum(p.sum() for p in trainable).backward()
    before = values(net)
    before = {name: p.clone() for name, p in before.items()}
    optimizer.step()
    ties = {name: p.requires_grad for name, p in net.named_parameters(remove_duplicate=False)}
    assert_equal(values(net), {name: p - 1 if ties[name] else p for name, p in before.items()})


@given(particle())
def test_copies_and_pickles_still_combine(net):
    lazy = net + net
    for one in (net, lazy):
        for twin in (copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))):
            assert_equal(values(twin), values(one))
            assert_equal(values(twin + one), values(one + one))
            assert_equal(values(net + twin), values(net + one))
            assert twin._version_kernel is one._version_kernel
            assert layout_of(twin) is layout_of(one)


@given(particle(dtypes=(torch.float32, torch.float64)), st.floats(0.1, 2.0))
def test_reductions_are_those_of_the_vector(net, scale):
    other = particles.randn(net, scale, torch.Generator().manual_seed(1))
    x, y = vector(net).double(), vector(other).double()
    for p in (1.0, 2.0, float("inf")):
        norm = particles.norm(net, p).double()
        torch.testing.assert_close(
            norm, torch.linalg.vector_norm(x, p) if x.numel() else norm * 0, rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(particles.dot(net, other).double(), x @ y, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(particles.distance(net, other).double(), (x - y).norm(), rtol=1e-4, atol=1e-4)
    lazy, product = net * 1.5, net.product()
    torch.testing.assert_close(particles.norm(lazy).double(), 1.5 * x.norm(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product.norm(), particles.norm(net))
    torch.testing.assert_close(product.dot(product), particles.dot(net, net))


@given(particle(dtypes=(torch.float32, torch.complex64)))
def test_arithmetic_of_products_equals_that_of_modules(net):
    b = net.randn()
    x, y = net.product(), b.product()
    for result, expected in (
        (x + y, net + b), (x - 2 * y, net - 2 * b), (-x, -net), (abs(x * y), abs(net * b)), (x / 3, net / 3), (2 - x, 2 - net),
    ):  # fmt: skip
        assert_close(values(result.module()), values(expected))
    net.product_(x + y)
    assert_close(values(net), values(x.module()))


@given(particle(dtypes=(torch.float32,)))
def test_differentiable_results_reach_operands_and_coefficients(net):
    b = net.clone()
    t = torch.tensor(0.25, requires_grad=True)
    with particles.differentiable():
        result = net + t * (b - 2 * net)
        loss = sum((p * p).sum() for p in result.parameters()) + particles.norm(result) * 0 + t * 0
    loss.backward()
    x = vector(net).detach()
    merged = x + 0.25 * (x - 2 * x)
    expected = (2 * merged * (x - 2 * x)).sum()
    torch.testing.assert_close(t.grad, expected, rtol=1e-4, atol=1e-4)
    assert_equal(values(result + 0), values(result))
    assert all(p.is_leaf for p in (result + 0).parameters())


def test_operations_that_would_change_integer_parameters_to_floats_raise():
    net = NytoModule()
    net.w = nn.Parameter(torch.tensor([4, 6]), requires_grad=False)
    net.v = nn.Parameter(torch.ones(2))
    assert torch.equal((net + net).w, torch.tensor([8, 12]))
    assert torch.equal((2 * net).w, torch.tensor([8, 12]))
    for act in (lambda: net / 2, lambda: 0.5 * net, lambda: net * 1j, lambda: net.randn()):
        with pytest.raises(TypeError, match=r"'[wv]'"):
            act()
    for act in (lambda n: n.__itruediv__(2), lambda n: n.__imul__(0.5), lambda n: n.__imul__(1j)):
        with pytest.raises(TypeError, match=r"'[wv]'"):
            act(net)
    assert torch.equal(net.v, torch.ones(2))
    net.set_param_config(operational=False, name="w")
    assert torch.equal((net / 2).w, net.w)
    assert torch.equal((net / 2).v, net.v / 2)
