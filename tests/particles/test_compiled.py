"""Particles in compiled functions, particles of graph modules, and lazy modules."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from moduli import particles as P
from moduli.layout import LayoutError
from moduli.particles import adopt
from particles.helpers import Net


def test_compiled_expressions_of_models_equal_eager_ones():
    n, k = Net(), Net()
    x = torch.randn(3, 2)

    def combine(n, k, x):
        return (n + k)(x) + (2 * n)(x) - (-k)(x) + (n + 0.5 * (k - n))(x)

    compiled = torch.compile(combine, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(n, k, x), combine(n, k, x))


def test_graph_modules_have_arithmetic():
    g = adopt(torch.fx.symbolic_trace(Net()))
    x = torch.randn(3, 2)
    result = g + 0.5 * (g.randn() * 0)
    torch.testing.assert_close(result(x), g(x))
    assert torch.equal((2 * g).get_parameter("head.weight"), 2 * g.get_parameter("head.weight"))
    twin = copy.deepcopy(g)
    torch.testing.assert_close((twin - g).get_parameter("head.weight"), torch.zeros(2, 2))


def test_lazy_modules_are_refused_with_an_explanation():
    n = Net()
    twin = n.clone()
    before = list(n.state_dict())
    with pytest.raises(ValueError, match=r"'head.weight' is lazy: .* run one forward pass first"):
        n.head = nn.LazyLinear(3)
    assert list(n.state_dict()) == before
    assert torch.equal((n + twin).head.weight, n.head.weight + twin.head.weight)
    with pytest.raises(ValueError, match="is lazy"):
        adopt(nn.Sequential(nn.LazyLinear(2))) + 1
    lone = Net()
    lone.head = nn.LazyLinear(3)
    lone(torch.ones(1, 2))
    assert (2 * lone).head.weight.shape == (3, 2)


def test_adopted_graph_modules_pickle_and_recompile():
    x = torch.randn(3, 2)
    graph = adopt(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    twin = pickle.loads(pickle.dumps(2 * graph))
    assert torch.allclose((graph + twin)(x), (3 * graph)(x))
    twin.recompile()
    assert torch.allclose(twin(x), (2 * graph)(x))


def test_a_lazy_module_is_adopted_after_its_first_forward():
    lazy = nn.LazyLinear(3)
    with pytest.raises(LayoutError, match="this LazyLinear is lazy"):
        adopt(lazy)
    lazy(torch.ones(1, 2))
    assert torch.equal((2 * adopt(lazy)).weight, 2 * lazy.weight)


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
def test_compiled_functions_of_models_equal_eager_ones(fn):
    torch._dynamo.reset()
    a, b, x = Net(), Net(), torch.randn(3, 2)
    result = torch.compile(lambda x: fn(a, b, x), backend="eager")(x)
    assert torch.allclose(result, fn(a, b, x), atol=1e-6)


def test_compiled_operations_work_beyond_the_recompile_limit():
    torch._dynamo.reset()
    x = torch.randn(3, 2)
    for _ in range(10):
        a, norm = Net(), adopt(nn.BatchNorm1d(2))
        assert torch.allclose(torch.compile(lambda x, a=a: (2 * a)(x), backend="eager")(x), (2 * a)(x))
        torch.compile(lambda x, norm=norm: (2 * norm)(x), backend="eager")(x)
