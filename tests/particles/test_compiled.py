"""Particles in compiled functions, graph modules, and lazy modules."""

import copy
import pickle
import sys

import pytest
import torch
from torch import fx, nn

import moduli as mo
from moduli import particles as P
from moduli.layout import LayoutError
from moduli.particles import NytoModule, adopt


class Net(NytoModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture(autouse=True)
def switching(request):
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    if "thread" in request.node.name:
        sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_expressions_inside_a_compiled_function():
    n, k = Net(), Net()
    x = torch.randn(3, 2)

    def combine(n, k, x):
        return (n + k)(x) + (2 * n)(x) - (-k)(x) + (n + 0.5 * (k - n))(x)

    compiled = torch.compile(combine, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(n, k, x), combine(n, k, x))


def test_a_graph_module_is_a_value():
    g = adopt(torch.fx.symbolic_trace(Net()))
    x = torch.randn(3, 2)
    made = g + 0.5 * (g.randn() * 0)
    torch.testing.assert_close(made(x), g(x))
    assert torch.equal((2 * g).get_parameter("head.weight"), 2 * g.get_parameter("head.weight"))
    twin = copy.deepcopy(g)
    torch.testing.assert_close((twin - g).get_parameter("head.weight"), torch.zeros(2, 2))


def test_lazy_modules_are_refused_by_a_sentence():
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


class Scaled(mo.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


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
    a, b, x = Scaled(), Scaled(), torch.randn(3, 2)
    made = torch.compile(lambda x: fn(a, b, x), backend="eager")(x)
    assert torch.allclose(made, fn(a, b, x), atol=1e-6)


def test_compiled_operations_on_more_models_than_are_compiled_for():
    torch._dynamo.reset()
    x = torch.randn(3, 2)
    for _ in range(10):
        a, norm = Scaled(), adopt(nn.BatchNorm1d(2))
        assert torch.allclose(torch.compile(lambda x, a=a: (2 * a)(x), backend="eager")(x), (2 * a)(x))
        torch.compile(lambda x, norm=norm: (2 * norm)(x), backend="eager")(x)
