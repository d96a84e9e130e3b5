"""Prodigy's estimate includes the step size of each step, whichever link or group it is scheduled in."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m, optim, presets

D = torch.float64
STEPS = 60
RATE = optim.schedules.Cosine(1.0, steps=STEPS, warmup=10)
TARGET = torch.linspace(-2.0, 3.0, 5, dtype=D)


def losses(w):
    return (w - TARGET).abs().sum() + 0.1 * ((w - TARGET) ** 2).sum()


def write_out(rate, decay=0.0):
    """Return the parameters and d after the authors' algorithm, which weights numerator and denominator by d and the step size."""
    w, d, d0, beta1, beta2 = torch.zeros(5, dtype=D, requires_grad=True), 1e-2, 1e-2, 0.9, 0.999
    beta3 = beta2**0.5
    start, mean, square, s, above = w.detach().clone(), torch.zeros(5, dtype=D), torch.zeros(5, dtype=D), 0.0, 0.0
    for step in range(STEPS):
        (g,) = torch.autograd.grad(losses(w), w)
        lr = rate(step)
        with torch.no_grad():
            above = beta3 * above + (d / d0) * d * lr * float(g @ (start - w))
            mean = beta1 * mean + d * (1 - beta1) * g
            square = beta2 * square + d * d * (1 - beta2) * g * g
            s = beta3 * s + (d / d0) * d * lr * g
            below = float(s.abs().sum())
            w -= d * lr * (mean / (square.sqrt() + d * 1e-8) + decay * w)
            d = max(d, above / below) if below else d
    return w.detach(), d


def run(*links, change=None):
    """Return the parameters and d after all steps; `change` is called with the optimizer before each step."""
    w = nn.Parameter(torch.zeros(5, dtype=D))
    opt = mo.Optimizer([w], *links)
    for step in range(STEPS):
        if change is not None:
            change(opt, step)
        opt.step(lambda: losses(w))
    (prodigy,) = [link for top in opt.modules for _, link in top.links() if isinstance(link, m.Prodigy)]
    return w.detach(), float(prodigy.global_state["next_d"])


def set_rate(opt, step):
    opt.param_groups[0]["lr"] = RATE(step)


CHAINS = {
    "preset": (lambda: presets.prodigy(RATE, d0=1e-2), None),
    "LR of a function": (lambda: [m.Prodigy(d0=1e-2), m.LR(RATE)], None),
    "a scheduler's group": (lambda: [m.Prodigy(d0=1e-2), m.LR(1.0)], set_rate),
    "StepSize": (lambda: [m.Prodigy(d0=1e-2), m.StepSize(RATE)], None),
    "nested": (lambda: [m.Split(lambda p: True, [m.Prodigy(d0=1e-2)]), m.LR(RATE)], None),
    "inside": (lambda: [m.Split(lambda p: True, [m.Prodigy(d0=1e-2), m.LR(RATE)])], None),
    "beside": (
        lambda: [m.Split(lambda p: True, [m.Prodigy(d0=1e-2)], m.LR(lambda step: 1.0 / (1 + step))), m.LR(RATE)],
        None,
    ),
    "two factors": (lambda: [m.Prodigy(d0=1e-2), m.LR(0.5), m.StepSize(lambda step: 2 * RATE(step))], None),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_estimate_includes_the_schedule(name):
    make, change = CHAINS[name]
    (w, d), (expected, distance) = run(*make(), change=change), write_out(RATE)
    torch.testing.assert_close(w, expected, rtol=1e-8, atol=1e-8)
    assert d == pytest.approx(distance, rel=1e-8)
    unaware = write_out(lambda step: 1.0)[1]
    assert abs(unaware - distance) > 0.01 * distance


def test_warmup_is_a_schedule_too():
    w, d = run(m.Prodigy(d0=1e-2), m.Warmup(20, start_lr=0.1))
    expected, distance = write_out(lambda step: 0.1 + 0.9 * min(step / 20, 1))
    torch.testing.assert_close(w, expected, rtol=1e-8, atol=1e-8)
    assert d == pytest.approx(distance, rel=1e-8)


def test_a_constant_step_size_leaves_the_estimate():
    """A constant step size cancels in the estimate; a group with step size 0 does not move and does not count."""
    moved, still = (nn.Parameter(torch.zeros(5, dtype=D)) for _ in range(2))
    opt = mo.Optimizer([{"params": [moved]}, {"params": [still], "lr": 0.0}], m.Prodigy(d0=1e-2), m.LR(1.0))
    for _ in range(STEPS):
        opt.step(lambda: losses(moved) + losses(still))
    assert torch.equal(still.detach(), torch.zeros(5, dtype=D))
    expected, distance = write_out(lambda step: 1.0)
    torch.testing.assert_close(moved.detach(), expected, rtol=1e-8, atol=1e-8)
    assert float(opt.modules[0].global_state["next_d"]) == pytest.approx(distance, rel=1e-8)


@pytest.mark.parametrize("decay", [0.1, 3.0])
def test_decay_is_multiplied_by_the_estimate_and_the_schedule(decay):
    (w, d), (expected, distance) = run(*presets.prodigy(RATE, d0=1e-2, weight_decay=decay)), write_out(RATE, decay)
    torch.testing.assert_close(w, expected, rtol=1e-8, atol=1e-8)
    assert d == pytest.approx(distance, rel=1e-8)
    assert not torch.allclose(w, write_out(RATE)[0], atol=1e-3)


def test_groups_with_other_betas_and_step_sizes_have_one_estimate():
    params = [nn.Parameter(torch.full((3,), float(i), dtype=D)) for i in range(4)]
    groups = [{"params": params[:2]}, {"params": params[2:], "beta1": 0.5, "lr": 0.5}]
    opt = mo.Optimizer(groups, m.Prodigy(d0=1e-2), m.LR(1.0))
    w, lr, memory = [p.detach().clone() for p in params], [1.0, 1.0, 0.5, 0.5], [0.9, 0.9, 0.5, 0.5]
    start, d, r = [p.clone() for p in w], 1e-2, 0.0
    mean, square, s = ([torch.zeros(3, dtype=D) for _ in w] for _ in range(3))
    beta3 = 0.999**0.5
    for _ in range(20):
        opt.step(lambda: sum(losses(p.sum() + TARGET * 0 + i) for i, p in enumerate(params)))
        grads = []
        for i, p in enumerate(w):
            x = p.clone().requires_grad_()
            grads.append(torch.autograd.grad(losses(x.sum() + TARGET * 0 + i), x)[0])
        r = beta3 * r + (1 - beta3) * d * d * sum(lr[i] * float(g @ (start[i] - w[i])) for i, g in enumerate(grads))
        for i, g in enumerate(grads):
            mean[i] = memory[i] * mean[i] + (1 - memory[i]) * d * g
            square[i] = 0.999 * square[i] + 0.001 * d * d * g * g
            s[i] = beta3 * s[i] + (1 - beta3) * lr[i] * d * d * g
            w[i] = w[i] - lr[i] * d * mean[i] / (square[i].sqrt() + d * 1e-8)
        d = max(d, r / sum(float(each.abs().sum()) for each in s))
    for p, expected in zip(params, w, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-8, atol=1e-8)
