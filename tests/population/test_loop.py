"""A population computes the values, gradients and buffers of a loop over its members."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strategies as trees
from moduli.population import Population
from population.helpers import MODELS, assert_same_members, close, copies, make_modules

N = 4
FORMS = ["auto", "loop", "vmap", "chunked"]


def forms(name):
    return FORMS[:2] if name in ("lstm", "gru") else FORMS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_calls_are_a_loop(name, training):
    for form in forms(name):
        nets, x = make_modules(name, N)
        pop = Population.from_modules(nets).train(training)
        out = pop(x, vectorize=form)
        close(out, torch.stack([net.train(training)(x) for net in nets]))
        assert_same_members(pop, nets)
        chunk = 3 if name not in ("lstm", "gru") else None
        close(pop(x, vectorize=form, chunk_size=chunk), torch.stack([net(x) for net in nets]))
        assert_same_members(pop, nets)


@pytest.mark.parametrize("name", MODELS)
def test_calls_on_slices_are_a_loop(name):
    nets, x = make_modules(name, N)
    pop = Population.from_modules(nets)
    xs = torch.stack([x + k for k in range(N)], 1)
    for form in forms(name):
        close(pop(xs, in_dims=1, vectorize=form), torch.stack([net(xs[:, k]) for k, net in enumerate(nets)]))


def test_in_dims_that_are_no_integers_are_refused():
    pop, x = Population.of(nn.Linear(3, 2), N), torch.ones(N, 5, 3)
    for wrong in ("0", 0.0, True, [{"x": 0}]):
        with pytest.raises(TypeError, match="it is a dimension, or one"):
            pop(x, in_dims=wrong)


X, Y, CLASSES = torch.randn(9, 6).double(), torch.randn(9, 4).double(), torch.arange(9) % 4
SOME = torch.where(torch.arange(9) == 2, -100, CLASSES)
LOSSES = {
    "cross entropy": lambda f: nn.functional.cross_entropy(f(X), CLASSES),
    "cross entropy, a row left out": lambda f: nn.functional.cross_entropy(f(X), SOME),
    "cross entropy, another class left out": lambda f: nn.functional.cross_entropy(f(X), CLASSES, ignore_index=1),
    "cross entropy, summed": lambda f: nn.functional.cross_entropy(f(X), CLASSES, reduction="sum"),
    "cross entropy, weighted": lambda f: nn.functional.cross_entropy(f(X), CLASSES, weight=Y[0].exp()),
    "cross entropy, smooth": lambda f: nn.CrossEntropyLoss(label_smoothing=0.1)(f(X), CLASSES),
    "cross entropy of probabilities": lambda f: nn.functional.cross_entropy(f(X), Y.softmax(1)),
    "cross entropy of one row": lambda f: nn.functional.cross_entropy(f(X[0]), CLASSES[0]),
    "squares": lambda f: nn.functional.mse_loss(f(X), Y),
    "squares, turned round": lambda f: nn.MSELoss()(Y, f(X)),
    "squares, summed": lambda f: nn.functional.mse_loss(f(X), Y, reduction="sum"),
    "powers": lambda f: ((f(X) - Y) ** 2).sum(1).mean(),
    "a penalty": lambda f: f(X).pow(2).mean() + f[0].weight.square().sum() + f[2].bias.mean().mean(),
}


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("form", FORMS)
def test_attention_without_gradients(rows, form):
    """Attention is fused for many rows and vectorised for few; both equal a module."""
    torch.manual_seed(0)
    nets = [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True).double().eval() for _ in range(N)]
    pop, x = Population.from_modules(nets).eval(), torch.randn(rows, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        close(pop(x, vectorize=form), torch.stack([net(x) for net in nets]))
        close(pop.losses(lambda f: f(x).square().mean()), torch.stack([net(x).square().mean() for net in nets]))
    assert torch.backends.mha.get_fastpath_enabled()
    close(pop(x, vectorize=form), torch.stack([net(x) for net in nets]))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_linear_layers(name):
    """Losses computed for all members at once, and similar ones that are not."""
    torch.manual_seed(0)
    pop = Population.of(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double(), 5)
    assert pop.explain(X).startswith("stacked")
    result, expected = (pop.losses_and_gradients(LOSSES[name], vectorize=form) for form in ("auto", "loop"))
    close(result[0], expected[0])
    close(result[1].matrix, expected[1].matrix)
    assert bool(expected[1].norm().gt(0).all())


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("form", ["auto", "vmap"])
def test_cross_entropy_of_separate_classes(form, ignored):
    """Members have different rows and classes, and different numbers of ignored rows."""
    torch.manual_seed(0)
    pop = Population.of(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double(), 5)
    xs, ys = torch.randn(5, 9, 6).double(), torch.randint(4, (5, 9))
    ys[2, :4] = ys[3, 1] = ignored

    def loss(f, x, y):
        return nn.functional.cross_entropy(f(x), y, ignore_index=ignored)

    losses, gradients = pop.losses_and_gradients(loss, xs, ys, in_dims=0, vectorize=form)
    expected = pop.losses_and_gradients(loss, xs, ys, in_dims=0, vectorize="loop")
    close(losses, expected[0])
    close(gradients.matrix, expected[1].matrix)
    assert len(set(losses.tolist())) == 5


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_a_loop(name):
    for form in forms(name):
        nets, x = make_modules(name, N)
        pop = Population.from_modules(nets)
        grads = pop.gradients(lambda f: f(x).square().mean(), vectorize=form)
        losses = torch.stack([net(x).square().mean() for net in nets])
        losses.sum().backward()
        for gradient, net in zip(grads, nets, strict=True):
            for g, p in zip(gradient.parameters(), net.parameters(), strict=True):
                close(g.data, torch.zeros_like(p) if p.grad is None else p.grad)
        assert_same_members(pop, nets)
        again = pop.losses(lambda f, y: f(y).square().mean(), x, vectorize=form)
        if name != "buffer":
            close(again, torch.stack([net(x).square().mean() for net in nets]))
        again.sum().backward()
        for leaf, *rows in zip(pop.parameters(), *(net.parameters() for net in nets), strict=True):
            if leaf.requires_grad and name != "batch norm":
                close(leaf.grad, torch.stack([p.grad for p in rows]))


def test_random_layers_draw_for_each_member():
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    pop, x = Population.of(net, 64), torch.ones(50, 2)
    for form in FORMS:
        torch.manual_seed(0)
        out = pop(x, vectorize=form)
        assert not torch.equal(out[0], out[1])
        assert abs((out == 0).double().mean() - 0.5) < 0.02
        same = pop(x, vectorize=form, randomness="same", chunk_size=None)
        if form != "chunked":
            assert torch.equal(same[0], same[1])
        with pytest.raises(RuntimeError, match="random"):
            pop(x, vectorize=form, randomness="error")


UNARY = [operator.neg, operator.pos, abs]
BINARY = [operator.add, operator.sub, operator.mul]


@settings(max_examples=25)
@given(trees.modules(), st.integers(0, 2**16))
def test_arithmetic_on_random_trees(net, seed):
    torch.manual_seed(seed)
    pops = []
    for _ in range(2):
        pop = Population.of(net, 3)
        for matrix in pop.matrices:
            matrix.copy_(torch.randint(-4, 5, matrix.shape))
        pops.append(pop)
    a, b = pops
    xs, ys = copies(a), copies(b)
    lone, per_member = copies(b)[0], torch.tensor([2.0, -1.0, 0.5])
    for fn in UNARY:
        assert_same_members(fn(a), [fn(x) for x in xs])
    for fn in BINARY:
        assert_same_members(fn(a, b), [fn(x, y) for x, y in zip(xs, ys, strict=True)])
        assert_same_members(fn(a, 3), [fn(x, 3) for x in xs])
        assert_same_members(fn(0.5, a), [fn(0.5, x) for x in xs])
        assert_same_members(fn(a, lone), [fn(x, lone) for x in xs])
        assert_same_members(fn(lone, a), [fn(lone, x) for x in xs])
        if a.layout.numel != 3:
            assert_same_members(fn(a, per_member), [fn(x, r) for x, r in zip(xs, per_member, strict=True)])
    assert_same_members(a / 4, [x / 4 for x in xs])
    r1, r2 = (torch.rand(3, 1, dtype=torch.float64) for _ in range(2))
    v = 0.5 * a + 1.5 * r1 * (b - a) - 2 * r2 * (lone - a)
    rows = zip(xs, ys, r1, r2, strict=True)
    expected = [0.5 * x + 1.5 * r.item() * (y - x) - 2 * s.item() * (lone - x) for x, y, r, s in rows]
    if all(g.dtype is torch.float64 for g in a.layout.groups):
        assert_same_members(v, expected)
    a += b
    a -= lone
    a *= 2
    for x, y in zip(xs, ys, strict=True):
        x += y
        x -= lone
        x *= 2
    assert_same_members(a, xs)


@settings(max_examples=25)
@given(trees.modules(ties=True, gaps=True), st.integers(0, 2**16))
def test_calls_on_random_trees(net, seed):
    torch.manual_seed(seed)
    pop = Population.of(net.double(), 3, init=0.5)
    nets, x = copies(pop), torch.randn(2, dtype=torch.float64)
    for form in ("auto", "loop"):
        close(pop(x, vectorize=form), torch.stack([net(x) for net in nets]))


def test_named_results_are_not_written_over():
    torch.manual_seed(0)
    a, b = (Population.of(nn.Linear, 3, 2, 2).to(torch.float64) for _ in range(2))
    x, y = a.matrix.clone(), b.matrix.clone()
    d = a - b
    e = 2 * d
    f = e + d
    g = d - 2 * (e - d)
    close(d.matrix, x - y)
    close(e.matrix, 2 * (x - y))
    close(f.matrix, 3 * (x - y))
    close(g.matrix, -(x - y))
    parts = [a - b, b - a]
    total = parts[0] + parts[1]
    close(parts[0].matrix, x - y)
    close(total.matrix, torch.zeros_like(x))
    close(sum(parts, start=a).matrix, x)


def test_arithmetic_that_would_need_a_graph_is_refused():
    from moduli.particles import differentiable

    pop = Population.of(nn.Linear, 4, 2, 1)
    t = torch.tensor(0.5, requires_grad=True)
    with differentiable():
        for act in (lambda: pop + t, lambda: -pop, lambda: pop.__iadd__(1), lambda: pop.lerp_(pop, 0.5)):
            with pytest.raises(RuntimeError, match="keeps no history"):
                act()
        merged = pop[0] + t * (pop[1] - pop[0])
    merged(torch.ones(2)).sum().backward()
    assert t.grad is not None


def test_labelled_outputs_have_a_member_axis():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2))

        def forward(self):
            import moduli as mo

            return mo.Tensor(self.w * 1.0, mo.Space(["a", "b"], name="letter"))

    pop = Population.of(Named, 3)
    for form in ("auto", "loop"):
        out = pop(vectorize=form)
        assert out.names == ("member", "letter")
        assert torch.equal(out.data, pop.matrix)
