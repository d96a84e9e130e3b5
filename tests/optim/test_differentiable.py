"""Gradients through steps equal those through the update written out, under autograd and torch.func."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim import ChainError, ClosureError, functional, step_tensors

D = torch.float64


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


X = torch.randn(8, 3, dtype=D, generator=torch.Generator().manual_seed(1))


def compute_loss(net):
    return net(X).square().mean()


def by_hand(net, steps):
    """Return the loss after heavy-ball descent with weight decay, as a function of (rate, momentum, decay, shift)."""
    start = {name: p.detach().clone() for name, p in net.named_parameters()}

    def loss(params):
        return torch.func.functional_call(net, params, (X,)).square().mean()

    def end(rate, momentum, decay, shift):
        params = {name: p + shift for name, p in start.items()}
        ball = {name: torch.zeros_like(p) for name, p in start.items()}
        for _ in range(steps):
            grads = torch.func.grad(loss)(params)
            ball = {name: momentum * ball[name] + grads[name] for name in params}
            params = {name: p - rate * (ball[name] + decay * p) for name, p in params.items()}
        return loss(params)

    return end


def numbers():
    return [torch.tensor(x, dtype=D) for x in (0.1, 0.9, 0.05, 0.0)]


def test_hypergradients_of_a_network_are_those_of_the_update_by_hand():
    net = make_net()
    wanted = torch.func.grad(by_hand(make_net(), 4), argnums=(0, 1, 2))(*numbers())
    rate, momentum, decay = (x.requires_grad_() for x in numbers()[:3])
    opt = mo.Optimizer(net, m.HeavyBall(momentum), m.WeightDecay(decay), m.LR(rate), differentiable=True)
    params = list(net.parameters())
    for _ in range(4):
        opt.step(mo.closure(lambda: compute_loss(net)))
    assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
    gradients = torch.autograd.grad(compute_loss(net), (rate, momentum, decay))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-14)


def test_the_steps_are_those_of_an_ordinary_optimizer():
    net, other, rate = make_net(), make_net(), torch.tensor(0.1, dtype=D, requires_grad=True)
    opt = mo.Optimizer(net, m.ClipNorm(0.1), m.Adam(), m.LR(rate), differentiable=True)
    plain = mo.Optimizer(other, m.ClipNorm(0.1), m.Adam(), m.LR(0.1))
    for _ in range(5):
        a = opt.step(mo.closure(lambda: compute_loss(net)))
        b = plain.step(mo.closure(lambda: compute_loss(other)))
        assert a == pytest.approx(b.item(), rel=1e-12)
    torch.testing.assert_close(list(net.parameters()), list(other.parameters()), rtol=1e-6, atol=1e-9)


def test_parameters_that_are_no_leaves_are_functions_of_their_start():
    start = torch.tensor([1.0, -2.0], dtype=D, requires_grad=True)
    w = start * 1.0
    opt = mo.Optimizer([w], m.LR(0.1), differentiable=True)
    for _ in range(3):
        opt.step(mo.closure(lambda: (w**2).sum()))
    (gradient,) = torch.autograd.grad(w.sum(), start)
    torch.testing.assert_close(gradient, torch.full_like(start, 0.8**3))


def test_detach_cuts_the_graph_and_keeps_the_momentum():
    rate = torch.tensor(0.1, dtype=D, requires_grad=True)
    w = nn.Parameter(torch.tensor([1.0], dtype=D))
    opt = mo.Optimizer([w], m.HeavyBall(0.9), m.LR(rate), differentiable=True)
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert not w.is_leaf
    opt.detach_()
    assert w.is_leaf
    assert w.requires_grad
    before = w.item()
    opt.step(mo.closure(lambda: (w**2).sum()))
    (gradient,) = torch.autograd.grad(w.sum(), rate)
    assert gradient.item() == pytest.approx(-(0.9 * 2.0 + 2 * before))


def test_chains_that_cannot_be_differentiated_are_refused():
    w = nn.Parameter(torch.ones(2, dtype=D))
    with pytest.raises(ChainError, match="LBFGS can't be differentiated through"):
        mo.Optimizer([w], m.LBFGS(), m.LR(0.1), differentiable=True)
    with pytest.raises(ChainError, match="SOAP"):
        step_tensors([m.SOAP()], [w.reshape(2, 1) * 1])
    with pytest.raises(ClosureError, match="computes the gradient itself"):
        mo.Optimizer([w], m.LR(0.1), differentiable=True).step()
    torch.manual_seed(0)
    with pytest.raises(ChainError, match="population"):
        mo.Optimizer(mo.Population.of(make_net, 2), m.LR(0.1), differentiable=True)


def test_tensors_given_to_links_carry_gradients():
    x = torch.tensor([1.0, 2.0], dtype=D, requires_grad=True)
    (out,) = step_tensors([m.HeavyBall(0.9), m.LR(0.1)], [x * 1])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 0.1))
    (out,) = step_tensors(m.LR(0.1), [x * 1])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 0.1))
    (out,) = step_tensors(m.Normalize(1.0), [x * 1])
    wanted = torch.func.grad(lambda v: (v / v.norm()).sum())(x.detach())
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("links", [[m.ClipNorm], [m.ClipNorm, m.LR], [m.Negate], [m.Sign, m.LR]])
def test_tensors_given_to_links_are_not_written_to(links):
    instances = [link(0.1) if link in (m.ClipNorm, m.LR) else link() for link in links]
    t, g = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    step_tensors(instances, [t], grads=[g])
    assert t.tolist() == g.tolist() == [3.0, 4.0]


CHAINS = {
    "adam": lambda rate: [m.ClipNorm(0.1), m.Adam(), m.LR(rate)],
    "nag": lambda rate: [m.NAG(0.9), m.Centralize(), m.LR(rate)],
    "lion": lambda rate: [m.Lion(), m.LR(rate)],
    "amsgrad": lambda rate: [m.Adam(amsgrad=True), m.LR(rate)],
    "nadam": lambda rate: [m.NAdam(), m.LR(rate)],
    "cautious": lambda rate: [m.HeavyBall(0.9), m.Cautious(normalize=True), m.LR(rate)],
    "lamb": lambda rate: [m.Adam(), m.TrustRatio(), m.LR(rate)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_pure_step_equals_a_step_of_an_optimizer(name):
    net = make_net()
    opt = mo.Optimizer(make_net(), *CHAINS[name](0.1))
    ours = dict(opt.model.named_parameters())
    links = CHAINS[name](0.1)
    params = {key: p.detach() for key, p in net.named_parameters()}
    copies = {key: p.clone() for key, p in params.items()}
    state = first = functional.init(links, params)
    begin = params
    for _ in range(4):
        opt.step(mo.closure(lambda: compute_loss(opt.model)))
        grads = torch.func.grad(lambda q: torch.func.functional_call(net, q, (X,)).square().mean())(params)
        params, state = functional.step(links, params, grads, state)
    for key, value in params.items():
        torch.testing.assert_close(value, ours[key].detach(), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(begin[key], copies[key]) for key in copies)
    assert first == functional.init(links, copies)
    assert not any(link.state for link in links)


@pytest.mark.parametrize("name", CHAINS)
def test_torch_func_differentiates_a_pure_step(name):
    def end(rate):
        links, x = CHAINS[name](rate), [torch.tensor([1.0, -2.0], dtype=D)]
        state = functional.init(links, x)
        for _ in range(3):
            x, state = functional.step(links, x, [torch.sin(x[0])], state)
        return (x[0] * torch.tensor([1.0, 3.0], dtype=D)).sum()

    rate = torch.tensor(0.05, dtype=D)
    slope = torch.func.grad(end)(rate)
    with torch.no_grad():
        wanted = (end(rate + 1e-6) - end(rate - 1e-6)) / 2e-6
    assert slope.item() == pytest.approx(wanted.item(), rel=1e-5)
    live = rate.clone().requires_grad_()
    assert torch.autograd.grad(end(live), live)[0].item() == pytest.approx(slope.item(), rel=1e-12)


def test_a_pure_step_refuses_a_state_of_other_links():
    x = [torch.ones(2)]
    with pytest.raises(ValueError, match="make it with"):
        functional.step([m.LR(0.1)], x, x, functional.init([m.Adam(), m.LR(0.1)], x))


@pytest.mark.parametrize(
    ("grads", "state", "match"),
    [
        (2, None, r"the parameters are \[0\], the gradients \[0, 1\]"),
        ({"w": 1}, None, r"the parameters are \[0\], the gradients \['w'\]"),
        (1, {}, "not one of 1 parameters and these links"),
        (1, 2, "not one of 1 parameters and these links"),
    ],
)
def test_a_pure_step_refuses_gradients_and_state_of_other_parameters(grads, state, match):
    links, x = [m.Adam(), m.LR(0.1)], [torch.ones(2)]
    gradients = {"w": x[0]} if isinstance(grads, dict) else x * grads
    if not isinstance(state, dict):
        state = functional.init(links, x * (state or 1))
    with pytest.raises(ValueError, match=match):
        functional.step(links, x, gradients, state)


def test_a_pure_step_leaves_parameters_without_a_gradient():
    links, x = [m.Adam(), m.WeightDecay(0.1), m.LR(0.1)], [torch.ones(2), torch.ones(3)]
    params, state = functional.step(links, x, [torch.ones(2), None], functional.init(links, x))
    assert params[0].tolist() != [1.0, 1.0]
    assert params[1].tolist() == [1.0, 1.0, 1.0]
    after, _ = functional.step(links, params, [None, torch.ones(3)], state)
    assert torch.equal(after[0], params[0])
    assert not torch.equal(after[1], params[1])


def test_a_pure_step_counts_for_schedules():
    links, x = [m.LR(lambda step: 10.0**-step)], [torch.zeros(1, dtype=D)]
    state = functional.init(links, x)
    for _ in range(3):
        x, state = functional.step(links, x, [torch.ones(1, dtype=D)], state)
    assert x[0].item() == pytest.approx(-1.11)
