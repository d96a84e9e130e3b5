"""Results that reuse the memory of temporaries equal results in new memory."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moduli.particles import adopt
from moduli.population import Population, _core
from population.helpers import close


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Reuse the memory of small populations too."""
    monkeypatch.setattr(_core, "_LEAST", 0)


def pair(seed=0, count=5):
    torch.manual_seed(seed)
    return tuple(Population.of(nn.Linear, count, 3, 2).to(torch.float64) for _ in range(2))


def test_swarm_step_is_the_formula():
    x, best = pair()
    v, leader = 0.1 * x.randn(), adopt(nn.Linear(3, 2).double())
    r1, r2 = torch.rand(2, 5, dtype=torch.float64)
    xs, bs, vs = (pop.matrix.clone() for pop in (x, best, v))
    row = torch.cat([p.detach().reshape(-1) for p in leader.parameters()])
    c1, c2 = r1[:, None].clone(), r2[:, None].clone()
    step = 0.7 * v + 1.5 * r1 * (best - x) - r2 * (leader - x) + leader
    r1.zero_(), r2.zero_()
    with torch.no_grad():
        leader.weight.zero_()
    close(step.matrix, 0.7 * vs + 1.5 * c1 * (bs - xs) - c2 * (row - xs) + row)


CHANGES = {
    "in place": lambda a: a.__imul__(3.0),
    "matrix": lambda a: a.matrix.zero_(),
    "leaf": lambda a: next(a.parameters()).data.zero_(),
    "member": lambda a: a[0].weight.data.zero_(),
    "part": lambda a: a[1:3].matrix.zero_(),
    "replace": lambda a: a.replace([0], a[1]),
    "lerp": lambda a: a.lerp_(a[0], 0.5),
    "axpy": lambda a: a.axpy_(2.0, a),
    "load": lambda a: a.load_state_dict({k: torch.zeros_like(v) for k, v in a.state_dict().items()}),
    "initialise": lambda a: [leaf.data.normal_() for leaf in a.parameters()],
    "migrate": lambda a: a[:4].migrate(torch.arange(4.0), 2),
    "to": lambda a: a.to(torch.float32),
    "sum": lambda a: a.__iadd__(a - 2 * a),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("called", [False, True])
def test_operands_may_change_afterwards(change, called):
    a, b = pair()
    if called:
        a(torch.ones(3, dtype=torch.float64))
    x, y = a.matrix.clone(), b.matrix.clone()
    d = a - b
    e = 2 * a + 3 * b
    CHANGES[change](a)
    close(d.matrix, x - y)
    close(e.matrix, 2 * x + 3 * y)


HOLDERS = {
    "matrix": lambda a: a.matrix,
    "row": lambda a: a.matrix[0],
    "leaves": lambda a: next(iter(a.parameters())),
    "view of a leaf": lambda a: next(a.parameters()).detach(),
    "member": lambda a: a[0].weight,
    "part": lambda a: a[1:3].matrix,
    "array": lambda a: a.matrix.numpy(),
    "storage": lambda a: torch.tensor([], dtype=torch.float64).set_(a.matrix.untyped_storage()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_results_do_not_share_memory_with_views_of_operands(holder):
    a, b = pair()
    a(torch.ones(3, dtype=torch.float64))
    x, y = a.matrix.clone(), b.matrix.clone()
    reference = HOLDERS[holder](a)
    d = a - b
    if isinstance(reference, torch.Tensor):
        reference.detach().fill_(7.0)
    else:
        reference[:] = 7.0
    close(d.matrix, x - y)
    assert bool((a.matrix == 7.0).any())


@pytest.mark.parametrize("holder", HOLDERS)
def test_storage_is_used_again_only_when_nothing_refers_to_it(holder):
    """A result reuses the matrix of a deleted population, unless a view of it is referenced."""
    a, b, other = (Population.of(nn.Linear(96, 96).double(), 16) for _ in range(3))
    assert a.matrix.nbytes > 1 << 18
    reference = HOLDERS[holder](b)
    before = reference.detach().clone() if isinstance(reference, torch.Tensor) else reference.copy()
    where = a.matrix.data_ptr()
    del a, b
    results = [(other / (k + 2)).matrix for k in range(4)]
    assert where == results[0].data_ptr()
    assert bool((reference == before).all())


def test_memory_of_temporaries_is_reused():
    a, b = pair()
    places = []

    def note(pop):
        places.append(pop._values.matrices[0].data_ptr())
        return pop

    result = 0.5 * note(a - b) + a
    assert result._values.matrices[0].data_ptr() == places[0]
    named = a - b
    before = named.matrix.clone()
    double = 2 * named
    assert double.matrix.data_ptr() != named.matrix.data_ptr()
    close(named.matrix, before)


def test_in_place_sums():
    for fn in (operator.iadd, operator.isub):
        a, b = pair()
        x, y = a.matrix.clone(), b.matrix.clone()
        sign = 1.0 if fn is operator.iadd else -1.0
        step = 0.5 * (b - a) + 2 * a
        same = a
        a = fn(a, step)
        assert a is same
        close(a.matrix, x + sign * (0.5 * (y - x) + 2 * x))
        close(step.matrix, 0.5 * (y - x) + 2 * x)
        a = fn(a, 0.1 * b)
        close(a.matrix, x + sign * (0.5 * (y - x) + 2 * x) + sign * 0.1 * y)
        c = b - a
        d = c.matrix.clone()
        e = b - a
        e = fn(e, e)
        close(e.matrix, d + sign * d)


def test_results_keep_their_values_when_operands_are_deleted():
    a, b = pair()
    x, y = a.matrix.clone(), b.matrix.clone()
    d = a - b
    del a, b
    other = [Population.of(nn.Linear, 5, 3, 2).to(torch.float64) for _ in range(4)]
    close(d.matrix, x - y)
    assert len(other) == 4


def test_long_chains_of_sums():
    a, b = pair()
    x, y = a.matrix.clone(), b.matrix.clone()
    for _ in range(100):
        a = a + 0.5 * (b - a)
        x = x + 0.5 * (y - x)
    close(a.matrix, x)
    total = a - a
    for _ in range(30):
        total = total + a + a + a
    close(total.matrix, 90 * x)


OPERATORS = [operator.add, operator.sub]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_random_programs(steps):
    """Check random sequences of operations, in place and not, on populations that are also read in between."""
    pops = [*pair(1, 3), *pair(2, 3)]
    plain = [pop.matrix.clone() for pop in pops]
    column = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    for kind, i, j in steps:
        if kind < 2:
            fn = OPERATORS[kind]
            pops[i], plain[i] = fn(pops[i], pops[j]), fn(plain[i], plain[j])
        elif kind == 2:
            pops[i], plain[i] = column * (pops[i] - pops[j]), column[:, None] * (plain[i] - plain[j])
        elif kind == 3:
            pops[i], plain[i] = 0.5 * pops[i] - 2 * pops[j], 0.5 * plain[i] - 2 * plain[j]
        elif kind == 4:
            pops[i] += 0.25 * pops[j]
            plain[i] = plain[i] + 0.25 * plain[j]
        elif kind == 5:
            pops[i] = 1.5 * (pops[j] - column * (pops[i] - pops[j])) + pops[i]
            plain[i] = 1.5 * (plain[j] - column[:, None] * (plain[i] - plain[j])) + plain[i]
        elif kind == 6:
            pops[i].matrix.mul_(0.5)
            plain[i] = plain[i] * 0.5
        else:
            pops[i], plain[i] = pops[i] - pops[j][0], plain[i] - plain[j][0]
    for pop, matrix in zip(pops, plain, strict=True):
        close(pop.matrix, matrix)
