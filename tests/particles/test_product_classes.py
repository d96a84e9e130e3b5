"""Products: copies, pickles, and classes of products and particles defined by users."""

import copy
import pickle

import pytest
import torch
from torch import nn

from moduli.compat.nytorch import Particle, ParticleModule, Product
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
