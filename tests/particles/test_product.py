"""Products: copies, pickles, classes defined by users, and their methods beside the functions on modules."""

import copy
import pickle

import pytest
import torch
from torch import nn

from moduli.compat.nytorch import Particle, ParticleModule, PMProduct, Product
from moduli.particles import StructureError, adopt, from_vector, lerp_, vector
from particles.helpers import Net


def test_products_are_copied_and_pickled():
    n = Net()
    product = 2 * n.product()
    for twin in (copy.deepcopy(product), pickle.loads(pickle.dumps(product)), copy.copy(product)):
        assert torch.equal(twin.module().head.weight, 2 * n.head.weight)
        assert torch.equal((twin + product).module().head.weight, 4 * n.head.weight)
        assert twin.module()._version_kernel is n._version_kernel
    part = n.product().unary_operator(lambda p, _: nn.Parameter(p * 3))
    assert torch.equal(copy.deepcopy(part).module().head.bias, 3 * n.head.bias)
    wrapped = ParticleModule(Net()).product()
    assert torch.equal(copy.deepcopy(wrapped).module().root_module.head.bias, wrapped.module().root_module.head.bias)


class Numbers(Product):
    def __init__(self, values):
        self.values = values

    def unary_operator(self, fn):
        return Numbers([fn(x, None) for x in self.values])

    def binary_operator(self, other, fn):
        return Numbers([fn(x, y, None) for x, y in zip(self.values, other.values, strict=True)])

    def particle(self):
        return Point(self.values)

    def clone(self):
        return Numbers(list(self.values))

    def rand(self):
        return Numbers([0.5 for _ in self.values])

    randn = rand


class Point(Particle):
    def __init__(self, values):
        self.values = values

    def product(self):
        return Numbers(self.values)

    def product_(self, product):
        self.values[:] = product.values
        return self


class Terse(Numbers):
    unary_operator = binary_operator = None

    def __add__(self, other):
        return Terse([x + y for x, y in zip(self.values, other.values, strict=True)])

    def __neg__(self):
        return Terse([-x for x in self.values])

    def __mul__(self, factor):
        return Terse([factor * x for x in self.values])

    __rmul__ = __mul__


def test_user_defined_particles_and_products_have_arithmetic():
    a, b = Point([1.0, 2.0]), Point([10.0, 20.0])
    assert (a + b).values == [11, 22]
    assert (-a).values == [-1, -2]
    assert (2 * a - b / 2).values == [-3, -6]
    assert (1 - a).values == [0, -1]
    assert abs(-a).values == [1, 2]
    a += b
    assert a.values == [11, 22]
    a *= 2
    assert a.values == [22, 44]
    assert a.clone().values == [22, 44]
    assert a.rand().values == [0.5, 0.5]


def test_operators_defined_by_a_product_are_used():
    class Own(Point):
        def product(self):
            return Terse(self.values)

    a, b = Own([1.0, 2.0]), Own([10.0, 20.0])
    assert (a + b).values == [11, 22]
    assert (-a).values == [-1, -2]
    assert (3 * a).values == [3, 6]
    with pytest.raises(TypeError, match="has no arithmetic"):
        a / b


def make_net():
    torch.manual_seed(0)
    return adopt(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


def test_from_vector_undoes_vector():
    product = make_net().product()
    again = product.from_vector(product.vector())
    for one, two in zip(product.module().parameters(), again.module().parameters(), strict=True):
        assert torch.equal(one, two)


def test_from_vector_equals_the_function_on_modules():
    model = make_net()
    values = torch.arange(vector(model).numel(), dtype=torch.float32)
    assert torch.equal(vector(model.product().from_vector(values).module()), vector(from_vector(model, values)))
    with pytest.raises(StructureError, match="parameters in all"):
        model.product().from_vector(values[:-1])


def test_random_products_come_from_the_generator_and_are_scaled():
    def drawn(seed, scale):
        return make_net().product().randn(scale, torch.Generator().manual_seed(seed)).vector()

    assert torch.equal(drawn(1, 1.0), drawn(1, 1.0))
    assert not torch.equal(drawn(1, 1.0), drawn(2, 1.0))
    torch.testing.assert_close(drawn(1, 3.0), 3 * drawn(1, 1.0))
    uniform = make_net().product().rand(0.5, torch.Generator().manual_seed(0)).vector()
    assert uniform.min() >= 0
    assert uniform.max() < 0.5


def test_in_place_methods_write_into_the_parameters():
    model = make_net()
    twin = model.clone()
    parameter = model[0].weight
    model.product().lerp_(model.product() * 0 + 2, 0.25)
    lerp_(twin, twin * 0 + 2, 0.25)
    assert model[0].weight is parameter
    torch.testing.assert_close(vector(model), vector(twin))
    before = vector(model)
    model.product().axpy_(3.0, model.product() * 0 + 1)
    torch.testing.assert_close(vector(model), before + 3)


def test_in_place_methods_skip_parameters_that_are_not_operational():
    model = make_net()
    model.set_param_config(operational=False, name="0.weight")
    weight, bias = model[0].weight.clone(), model[0].bias.clone()
    model.product().axpy_(1.0, model.product() * 0 + 1)
    assert torch.equal(model[0].weight, weight)
    assert not torch.equal(model[0].bias, bias)


METHODS = {
    "norm": lambda x, y: x.norm(),
    "dot": lambda x, y: x.dot(y),
    "cosine": lambda x, y: x.cosine(y),
    "distance": lambda x, y: x.distance(y),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "axpy_": lambda x, y: x.axpy_(0.5, y),
    "sign": lambda x, y: x.sign(),
    "sqrt": lambda x, y: abs(x).sqrt(),
    "exp": lambda x, y: x.exp(),
    "clamp": lambda x, y: x.clamp(-0.1, 0.1),
    "map": lambda x, y: x.map(lambda p, q: p * q, y),
    "zeros_like": lambda x, y: x.zeros_like(),
    "vector": lambda x, y: x.vector(),
    "from_vector": lambda x, y: x.from_vector(torch.arange(float(x.vector().numel()))),
    "rand": lambda x, y: x.rand(2.0, torch.Generator().manual_seed(0)),
    "randn": lambda x, y: x.randn(2.0, torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", METHODS)
def test_products_of_wrappers_have_the_methods_of_products(name):
    first, second = make_net(), make_net()
    second.load_state_dict((2 * first + 1).state_dict())
    one, two = ParticleModule(first.clone()), None
    two = one * 2 + 1
    expected = METHODS[name](first.product(), (first * 2 + 1).product())
    result = METHODS[name](one.product(), two.product())
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected)
    elif expected is None:
        assert result is None
    else:
        assert isinstance(result, PMProduct)
        torch.testing.assert_close(result.vector(), expected.vector())
    with pytest.raises(AttributeError, match="has no attribute"):
        one.product().missing
