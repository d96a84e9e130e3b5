"""Settings per member are checked, scaled by schedulers and explored by PBT; the memory of a step is bounded."""

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim._groups import apply_groups

DOUBLE = torch.float64


def swarm(count=8):
    torch.manual_seed(0)
    return mo.Population.of(nn.Linear, count, 3, 2)


def loss(f):
    return (f(torch.ones(4, 3)) - 1).square().mean()


def test_settings_with_another_number_of_values_than_members_are_refused():
    five = torch.full((5,), 0.1)
    with pytest.raises(ValueError, match=r"0\.LR: lr has 5 numbers for 8 members"):
        mo.Optimizer(swarm(), m.LR(five))
    with pytest.raises(ValueError, match="Adam: beta1 has 5 numbers for 8 members"):
        mo.Optimizer(swarm(), m.ClipNorm(1.0), m.Adam(beta1=five), m.LR(0.1))
    pop = swarm()
    opt = mo.Optimizer(pop, m.LR(0.1))
    with pytest.raises(ValueError, match="lr has 5 numbers for 8 members"):
        opt.link("LR").set_param_groups([{"params": list(pop.parameters()), "lr": five}])
    assert not opt.link("LR").settings.local
    with pytest.raises(ValueError, match=r"lr has the shape \(8, 1\) for 8 members"):
        mo.Optimizer(swarm(), m.LR(torch.ones(8, 1)))  # with stacked parameters it would broadcast along another axis
    with pytest.raises(ValueError, match="amsgrad is a choice"):
        mo.Optimizer(swarm(), m.Adam(amsgrad=torch.ones(8, dtype=torch.bool)))
    opt.param_groups[0]["lr"] = five
    before = pop.matrix.clone()
    with pytest.raises(ValueError, match="lr has 5 numbers for 8 members"):
        opt.step(mo.closure(loss))
    assert torch.equal(pop.matrix, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
        lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.4, total_steps=5, cycle_momentum=False),
        lambda opt: torch.optim.lr_scheduler.LinearLR(opt),
    ],
    ids=["cosine", "exponential", "one cycle", "linear"],
)
def test_schedulers_scale_every_members_rate(make):
    rates = torch.tensor([0.1, 0.2, 0.4], dtype=DOUBLE)
    pop = swarm(3)
    opt = mo.Optimizer(pop, m.LR(rates))
    scheduler = make(opt)
    for _ in range(4):
        apply_groups(opt)
        now = opt.link("LR").settings[next(pop.parameters())]["lr"]
        torch.testing.assert_close(now, rates * (opt.param_groups[0]["lr"] / 0.4))
        opt.step(mo.closure(loss))
        scheduler.step()
    assert torch.equal(rates, torch.tensor([0.1, 0.2, 0.4], dtype=DOUBLE))


def test_betas_of_soap_may_differ_between_members_in_one_call(monkeypatch):
    betas = {
        "beta1": torch.tensor([0.5, 0.9, 0.99], dtype=DOUBLE),
        "beta2": torch.tensor([0.9, 0.99, 0.999], dtype=DOUBLE),
        "shampoo_beta": torch.tensor([0.8, 0.95, 0.999], dtype=DOUBLE),
    }
    inputs = torch.randn(16, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))

    def error(f):
        return (f(inputs).tanh() - inputs[:, :2]).square().mean()

    together = swarm(3).to(DOUBLE)
    alone = together.to_modules()
    calls = []
    learn = m.SOAP.learn
    monkeypatch.setattr(m.SOAP, "learn", lambda *args: (calls.append(1), learn(*args))[1])
    opt = mo.Optimizer(together, m.SOAP(precond_freq=3, **betas), m.LR(0.1))
    for _ in range(10):
        opt.step(mo.closure(error))
    assert len(calls) == 10 * len(list(alone[0].parameters()))
    for i, net in enumerate(alone):
        own = {name: value[i].item() for name, value in betas.items()}
        single = mo.Optimizer(net, m.SOAP(precond_freq=3, **own), m.LR(0.1))
        for _ in range(10):
            single.step(mo.closure(error))
        for mine, theirs in zip(together.to_modules()[i].parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_settings_that_a_link_reads_as_numbers_may_differ_between_members():
    together = swarm(3).to(DOUBLE)
    alone = together.to_modules()
    regs = torch.tensor([1e-6, 1e-2, 1.0], dtype=DOUBLE)
    opt = mo.Optimizer(together, m.Shampoo(reg=regs), m.LR(0.1))
    for _ in range(3):
        opt.step(mo.closure(lambda f: (f(torch.ones(4, 3, dtype=DOUBLE)) - 1).square().mean()))
    for i, net in enumerate(alone):
        single = mo.Optimizer(net, m.Shampoo(reg=regs[i].item()), m.LR(0.1))
        for _ in range(3):
            single.step(mo.closure(lambda f: (f(torch.ones(4, 3, dtype=DOUBLE)) - 1).square().mean()))
        for mine, theirs in zip(together.to_modules()[i].parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_pbt_with_wrong_positions_or_settings_is_refused():
    with pytest.raises(mo.optim.ChainError, match="PBT comes last"):
        mo.Optimizer(swarm(), m.PBT({"lr.lr": (1e-3, 1e-1)}), m.LR(0.1))
    with pytest.raises(TypeError, match="score is a float"):
        m.PBT({"lr.lr": (1e-3, 1e-1)}, score=1.0)
    for limits in (0.1, (1e-3, 1e-2, 1e-1)):
        with pytest.raises(ValueError, match="give two numbers"):
            m.PBT({"lr.lr": limits})
    with pytest.raises(mo.optim.ChainError, match="a choice and not a number"):
        mo.Optimizer(swarm(), m.Adam(), m.PBT({"adam.debias": (0, 1)}))
    with pytest.raises(mo.optim.ChainError, match="one PBT exchanges the members"):
        mo.Optimizer(swarm(), m.LR(0.1), *(m.PBT({"lr.lr": (1e-3, 1e-1)}) for _ in range(2)))


def test_pbt_ranks_by_a_validation_score():
    pop, counts = swarm(), []

    def score(population):
        assert not torch.is_grad_enabled()
        counts.append(len(population))
        return torch.arange(8)  # ranks the first member best, unlike the training loss

    opt = mo.Optimizer(pop, m.LR(0.0), m.PBT({"lr.lr": (1e-3, 1e-1)}, every=2, score=score, seed=0))
    for _ in range(2):
        opt.step(mo.closure(loss))
    assert counts == [8]
    assert set(opt.attrs["replaced"]) == {6, 7}
    assert set(opt.attrs["replaced"].values()) <= {0, 1}
    wrong = mo.Optimizer(swarm(), m.LR(0.1), m.PBT({"lr.lr": (1e-3, 1e-1)}, every=1, score=lambda p: torch.ones(3)))
    with pytest.raises(ValueError, match="one number per member"):
        wrong.step(mo.closure(loss))


def measure_peak(step):
    """Return the peak of the memory that a step allocates, in bytes, as counted by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    allocated = most = 0
    for event in sorted(seen.events(), key=lambda event: event.time_range.end):
        allocated += event.self_cpu_memory_usage
        most = max(most, allocated)
    return most


def test_a_step_allocates_at_most_twice_matrix_gradients_and_states():
    torch.manual_seed(0)
    pop = mo.Population.of(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 64
    )
    x, y = torch.randn(4, 64), torch.randint(0, 10, (4,))
    opt = mo.Optimizer(pop, m.Adam(), m.LR(1e-3))
    matrix = pop.matrix.numel() * 4
    # The first call measures forms of products, which is not part of a step.
    pop.losses(lambda f: nn.functional.cross_entropy(f(x), y)).sum().backward()
    pop.zero_grad()

    def steps():
        for _ in range(3):
            opt.step(mo.closure(lambda: pop.losses(lambda f: nn.functional.cross_entropy(f(x), y))))

    most = measure_peak(steps)
    state = 3 * matrix  # gradients and two moments; the matrix was allocated before
    assert state <= most <= 2 * (matrix + state) - matrix
