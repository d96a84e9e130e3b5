"""Links without a step size or a schedule to tune, against the papers' formulas."""

import pytest
import torch

import moduli as mo
from m.first_order import close, run
from moduli import m, presets


class Prodigy(torch.optim.Optimizer):
    """The algorithm of the paper on one vector."""

    def __init__(self, params):
        super().__init__(params, {})
        self.d, self.r, self.s, self.m, self.v = 1e-6, 0.0, 0.0, 0.0, 0.0
        self.start = None

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        x = torch.cat([p.reshape(-1) for p in params])
        g = torch.cat([p.grad.reshape(-1) for p in params])
        self.start = x.clone() if self.start is None else self.start
        b3, d = 0.999**0.5, self.d
        self.m = 0.9 * self.m + 0.1 * d * g
        self.v = 0.999 * self.v + 0.001 * d**2 * g**2
        self.r = b3 * self.r + (1 - b3) * d**2 * (g @ (self.start - x))
        self.s = b3 * self.s + (1 - b3) * d**2 * g
        new = x - d * self.m / (self.v.sqrt() + d * 1e-8)
        self.d = max(d, (self.r / self.s.abs().sum()).item())
        for p, part in zip(params, new.split([p.numel() for p in params]), strict=True):
            p.copy_(part.view_as(p))


class DAdapt(torch.optim.Optimizer):
    """The algorithm of the paper on one vector, with a schedule `gamma`."""

    def __init__(self, params, gamma=lambda step: 1.0):
        super().__init__(params, {})
        self.d, self.r, self.m, self.v = 1e-6, 0.0, 0.0, 0.0
        self.s, self.gamma, self.steps = None, gamma, 0

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        x = torch.cat([p.reshape(-1) for p in params])
        g = torch.cat([p.grad.reshape(-1) for p in params])
        self.s = torch.zeros_like(g) if self.s is None else self.s
        rho, d = 0.999**0.5, self.d
        size, self.steps = d * self.gamma(self.steps), self.steps + 1
        self.m = 0.9 * self.m + 0.1 * size * g
        self.v = 0.999 * self.v + 0.001 * g**2
        A = self.v.sqrt() + 1e-8
        self.r = rho * self.r + (1 - rho) * size * (g @ (self.s / A))
        self.s = rho * self.s + (1 - rho) * size * g
        new = x - self.m / A
        self.d = max(d, (self.r / ((1 - rho) * self.s.abs().sum())).item())
        for p, part in zip(params, new.split([p.numel() for p in params]), strict=True):
            p.copy_(part.view_as(p))


@pytest.mark.parametrize(("link", "reference"), [(m.Prodigy, Prodigy), (m.DAdaptAdam, DAdapt)])
def test_is_its_paper(link, reference):
    close(run(lambda p: [link(), m.LR(1.0)], steps=60), run(reference, steps=60), 1e-9)


@pytest.mark.parametrize("gamma", [0.3, lambda step: 1 / (1 + step)])
def test_the_bound_of_dadaptation_includes_its_schedule(gamma):
    schedule = gamma if callable(gamma) else lambda step: gamma
    expected = run(lambda p: DAdapt(p, schedule), steps=60)
    close(run(lambda p: [m.DAdaptAdam(gamma=gamma), m.LR(1.0)], steps=60), expected, 1e-9)
    close(run(lambda p: presets.dadapt(gamma), steps=60), expected, 1e-9)


def test_the_estimate_grows_to_the_order_of_the_distance():
    for start in (0.01, 1.0, 100.0):
        w = torch.nn.Parameter(torch.full((4,), start, dtype=torch.float64))
        link = m.Prodigy(d0=1e-8)
        opt = mo.Optimizer([w], link, m.LR(1.0))
        for _ in range(300):
            opt.step(mo.closure(lambda w=w: w.abs().sum()))
        assert start / 100 < link.global_state["d"] < start * 10


@pytest.mark.parametrize("fuse", ["auto", False])
@pytest.mark.parametrize("r", [0.0, 2.0])
def test_schedule_free_is_its_paper(fuse, r):
    link = m.ScheduleFree(0.8, r=r)
    w = torch.nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
    scales = torch.tensor([1.0, 4.0], dtype=torch.float64)
    opt = mo.Optimizer([w], m.LR(0.1), link, fuse=fuse)
    x = z = w.detach().clone()
    for t in range(1, 20):
        y = 0.2 * z + 0.8 * x
        close([w.detach()], [y])
        opt.step(mo.closure(lambda: 0.5 * (scales * w**2).sum()))
        z = z - 0.1 * scales * y
        c = t**r / sum(i**r for i in range(1, t + 1))
        x = (1 - c) * x + c * z
        close(link.averages([w]), [x])
    before = w.detach().clone()
    with link.averaged([w]):
        close([w.detach()], [x])
    assert torch.equal(w.detach(), before)


def test_schedule_free_average_before_a_step_is_the_parameter():
    w = torch.nn.Parameter(torch.ones(2))
    assert torch.equal(m.ScheduleFree().averages([w])[0], w.detach())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.ScheduleFree(0.0), "ScheduleFree: momentum"),
        (lambda: m.Prodigy(d0=0.0), "Prodigy: d0"),
        (lambda: m.Prodigy(growth_rate=1.0), "Prodigy: growth_rate"),
        (lambda: m.DAdaptAdam(beta2=1.0), "DAdaptAdam: beta2"),
    ],
)
def test_wrong_arguments_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
