"""Closures of every form: without a result, without backward, with an ignored flag, differentiated before the step."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim import ClosureError

D = torch.float64


def one(value=3.0):
    return nn.Parameter(torch.tensor([value], dtype=D))


def test_a_closure_that_returns_nothing_uses_the_gradients_that_are_there():
    w = one()
    opt = mo.Optimizer([w], m.LR(0.1))
    (w**2).sum().backward()
    assert opt.step(lambda: None) is None
    assert w.item() == pytest.approx(2.4)


def test_without_gradients_a_closure_that_returns_nothing_moves_nothing():
    w = one()
    assert mo.Optimizer([w], m.Adam(), m.LR(0.1)).step(lambda: None) is None
    assert w.item() == 3.0


def test_a_link_that_needs_the_loss_says_so_where_there_is_none():
    w = one()
    w.grad = torch.ones_like(w)
    with pytest.raises(ClosureError, match="returned nothing, but this chain needs the loss"):
        mo.Optimizer([w], m.PolyakStepSize()).step(lambda: None)
    assert w.item() == 3.0


@pytest.mark.parametrize("make", [lambda w: (w**2).sum(), lambda w: w.sum()], ids=["square", "linear"])
def test_a_loss_without_backward_is_differentiated(make):
    w, v = one(), one()
    opt, other = mo.Optimizer([w], m.HeavyBall(0.9), m.LR(0.1)), mo.Optimizer([v], m.HeavyBall(0.9), m.LR(0.1))
    for _ in range(3):
        a = opt.step(lambda: make(w))
        b = other.step(mo.closure(lambda: make(v)))
        assert torch.equal(a.detach(), b)
        assert torch.equal(w, v)


def test_a_closure_that_ignores_the_backward_flag_is_differentiated():
    w = one()
    opt = mo.Optimizer([w], m.LR(0.1))
    for _ in range(2):
        opt.step(lambda backward=True: (w**2).sum())
    assert w.item() == pytest.approx(3.0 * 0.8**2)


def test_a_loss_that_was_differentiated_before_the_step_uses_its_gradients():
    w = one()
    opt = mo.Optimizer([w], m.LR(0.1))
    for _ in range(2):
        opt.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        assert opt.step(lambda: loss) == loss
    assert w.item() == pytest.approx(3.0 * 0.8**2)


def test_a_loss_without_a_graph_is_refused():
    w = one()
    with pytest.raises(ClosureError, match="there is no gradient"):
        mo.Optimizer([w], m.LR(0.1)).step(lambda: (w**2).sum().detach())
    with pytest.raises(ClosureError, match="there is no gradient"):
        mo.Optimizer([w], m.LR(0.1)).step(lambda: 3.0)


def test_gradients_accumulated_before_an_ordinary_closure_count():
    w = one()
    opt = mo.Optimizer([w], m.LR(0.1))
    (w**2).sum().backward()

    def closure():
        loss = (w**2).sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert w.item() == pytest.approx(3.0 - 0.1 * 12)


CHAINS = {
    "SAM": lambda: [m.SAM(), m.LR(0.1)],
    "SAM inside": lambda: [m.SAM(modules=[m.Adam()]), m.LR(0.1)],
    "square": lambda: [m.SquareHomotopy(), m.LR(0.001)],
    "two reformulations": lambda: [m.SquareHomotopy(), m.SAM(), m.LR(0.001)],
    "gradient sampling": lambda: [m.GradientSampling(n=4, seed=0), m.LR(0.01)],
    "L-BFGS on log": lambda: [m.LogHomotopy(), m.LBFGS(), m.Backtracking()],
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_step_returns_the_loss_before_it(name):
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=D))

    def loss():
        return (w**2).sum() + (w**4).sum()

    opt = mo.Optimizer([w], *CHAINS[name]())
    for _ in range(3):
        before = loss().detach()
        assert torch.equal(opt.step(mo.closure(loss)), before)


def test_a_reformulation_that_never_evaluates_the_point_returns_nothing():
    w = one()
    opt = mo.Optimizer([w], m.GradientSampling(n=3, include_x0=False, seed=0), m.LR(0.01))
    assert opt.step(mo.closure(lambda: (w**2).sum())) is None


class Saved:
    """A context that counts the elements saved for backward in `count`."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x)
        self.hooks.__enter__()
        return self

    def pack(self, tensor):
        self.count += tensor.numel()
        return tensor

    def __exit__(self, *args):
        self.hooks.__exit__(*args)


@pytest.mark.parametrize(
    "links",
    [
        lambda: [m.MeZO(seed=0), m.LR(1e-3)],
        lambda: [m.SPSA(seed=0), m.LR(1e-3)],
        lambda: [m.RDSA(seed=0), m.LR(1e-3)],
        lambda: [m.FDM(), m.LR(1e-3)],
        lambda: [m.OpenES(population=4, seed=0), m.LR(1e-3)],
    ],
    ids=["MeZO", "SPSA", "RDSA", "FDM", "OpenES"],
)
def test_evaluations_without_a_gradient_save_nothing_for_backward(links):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(8, 3)
    opt = mo.Optimizer(net, *links())
    with Saved() as saved:
        opt.step(mo.closure(lambda: net(x).square().mean()))
    assert saved.count == 0


def test_a_line_search_saves_for_backward_only_where_it_needs_gradients():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(8, 3)
    closure = mo.closure(lambda: net(x).square().mean())
    with Saved() as once:
        closure()
    with Saved() as none:
        closure(False)
    opt = mo.Optimizer(net, m.LR(1e6), m.Backtracking())
    with Saved() as saved:
        opt.step(closure)
    assert opt.num_evaluations > 2
    assert none.count == 0
    assert saved.count == once.count


def test_a_users_closure_called_for_the_value_runs_without_grad_mode():
    w = one()
    seen = []

    def closure(backward=True):
        seen.append(torch.is_grad_enabled())
        loss = (w**2).sum()
        if backward:
            w.grad = None
            loss.backward()
        return loss

    mo.Optimizer([w], m.LR(10.0), m.Backtracking()).step(closure)
    assert seen[0]
    assert not any(seen[1:])


def test_a_loss_that_differentiates_inside_keeps_its_value():
    w = one(0.5)
    x = torch.linspace(0, 1, 5, dtype=D).requires_grad_()

    def loss():
        u = torch.sin(w * x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope - 1).square().mean()

    opt = mo.Optimizer([w], m.LR(0.5), m.Backtracking())
    first = opt.step(mo.closure(loss))
    evaluations = opt.num_evaluations
    for _ in range(10):
        last = opt.step(mo.closure(loss))
    assert last < first
    assert evaluations == 3  # one more than two: the first attempt ran without grad mode, which this loss needs
    assert mo.closure(loss)(False) == loss()


def test_a_function_with_one_required_argument_is_called_with_the_model():
    net = nn.Linear(1, 1)
    for function in (lambda model: model.weight.sum(), lambda scale=1.0: scale * net.weight.sum()):
        expected = net.weight.item()
        assert float(mo.Optimizer(net, m.LR(0.25)).step(mo.closure(function))) == expected
        assert net.weight.item() == pytest.approx(expected - 0.25)
