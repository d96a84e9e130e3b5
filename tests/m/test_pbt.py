"""Population-based training: members copy better ones, with their state, and vary settings."""

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import moduli as mo
from m.population_cases import loss, population, rows, steps
from moduli import m


class Counted(nn.Module):
    """A model with a buffer."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("mark", torch.zeros(2, dtype=torch.float64))

    def forward(self):
        return (self.w - 2).square().sum()


def test_pbt_takes_over_weights_buffers_and_state():
    torch.manual_seed(3)
    pop = mo.Population.from_modules([Counted() for _ in range(8)])
    with torch.no_grad():
        dict(pop.named_buffers())["mark"].copy_(torch.arange(16, dtype=torch.float64).reshape(8, 2))
    links = [m.Adam(), m.EMA(0.9), m.LR(0.05), m.PBT({"lr.lr": (1e-3, 1.0)}, every=4, share=0.25, seed=2)]
    opt = mo.Optimizer(pop, *links)
    plain = copy.deepcopy(pop)
    reference = mo.Optimizer(plain, m.Adam(), m.EMA(0.9), m.LR(0.05))
    reference.link("LR").set_param_groups(
        [{"params": [p for _, p in plain.named_parameters()], "lr": opt.attrs["hyperparameters"]["lr.lr"].clone()}]
    )
    for _ in range(4):
        losses = opt.step(mo.closure(lambda net: net()))
        reference.step(mo.closure(lambda net: net()))
    order = losses.argsort()
    replaced = opt.attrs["replaced"]
    assert set(replaced) == set(order[-2:].tolist())
    assert set(replaced.values()) <= set(order[:2].tolist())
    index = torch.arange(8)
    for target, source in replaced.items():
        index[target] = source
    for (_, mine), (_, theirs) in zip(pop.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(mine, theirs[index])
    marks = torch.arange(16, dtype=torch.float64).reshape(8, 2)
    assert torch.equal(dict(pop.named_buffers())["mark"], marks[index])
    for name in ("Adam", "EMA"):
        mine, theirs = (next(iter(each.link(name).state.values())) for each in (opt, reference))
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine[key], value[index]), key


def test_pbt_explores_within_the_limits():
    pop = population(16)
    opt = mo.Optimizer(pop, m.LR(0.1), m.PBT({"lr.lr": (0.01, 0.5)}, every=2, perturb=0.5, seed=0))
    seen = [opt.attrs["hyperparameters"]["lr.lr"]]
    assert len(set(seen[0].tolist())) == 16
    assert 0.01 <= seen[0].min() < 0.03 < 0.2 < seen[0].max() <= 0.5
    for t in range(1, 21):
        steps(opt, 1)
        now = opt.attrs["hyperparameters"]["lr.lr"]
        if t % 2:
            assert torch.equal(now, seen[-1])
        else:
            changed = (now != seen[-1]).nonzero()[:, 0].tolist()
            for i in changed:
                source = opt.attrs["replaced"][i]
                ratio = float(now[i] / seen[-1][source])
                assert min(abs(ratio - 0.5), abs(ratio - 1.5)) < 1e-6 or float(now[i]) in (
                    pytest.approx(0.01),
                    pytest.approx(0.5),
                )
            seen.append(now)
        assert now.min() >= 0.01 - 1e-9
        assert now.max() <= 0.5 + 1e-7


def test_pbt_varies_settings_from_the_first_step_on():
    pop, twin = population(), population()
    opt = mo.Optimizer(pop, m.LR(0.1), m.PBT({"lr.lr": (1e-3, 1.0)}, every=100, seed=1))
    rates = opt.attrs["hyperparameters"]["lr.lr"].double()
    start = rows(twin)
    steps(opt, 1)
    gradient = torch.cat(
        [
            g.reshape(8, -1)
            for g in torch.autograd.grad(twin.losses(loss).sum(), [p for _, p in twin.named_parameters()])
        ],
        1,
    )
    torch.testing.assert_close(rows(pop), start - rates[:, None] * gradient, rtol=1e-6, atol=1e-9)


def test_pbt_finds_the_good_learning_rates():
    pop = population(16)
    opt = mo.Optimizer(pop, m.LR(1.0), m.PBT({"lr.lr": (1e-6, 1.0)}, every=5, seed=0))
    first = opt.attrs["hyperparameters"]["lr.lr"].log().mean()
    steps(opt, 100)
    assert opt.attrs["hyperparameters"]["lr.lr"].log().mean() > first + 3
    assert pop.losses(loss).max() < 1e-2


def test_pbt_copies_the_state_of_links_that_run_on_each_member():
    pop = population()
    opt = mo.Optimizer(pop, m.GaLore(m.SOAP(), rank=1), m.LR(0.01), m.PBT({"lr.lr": (1e-3, 0.1)}, every=3, seed=1))
    steps(opt, 3)
    link = opt.link("GaLore")
    states = [dict(row) for _, part in link.links() for row in part.state.values()]
    tensors = [value for value in pytree.tree_leaves(states) if isinstance(value, torch.Tensor)]
    assert tensors
    assert opt.attrs["replaced"]
    for target, source in opt.attrs["replaced"].items():
        assert all(torch.equal(value[target], value[source]) for value in tensors)
    steps(opt, 3)
    assert bool(rows(pop).isfinite().all())


def test_pbt_copies_the_matrices_of_links_that_run_for_all_members_at_once():
    pop = population()
    opt = mo.Optimizer(pop, m.SOAP(), m.LR(0.01), m.PBT({"lr.lr": (1e-3, 0.1)}, every=3, seed=1))
    steps(opt, 3)
    states = opt.link("SOAP").state
    matrices = [matrix for state in states.values() for key in ("covariances", "rows") for matrix in state[key]]
    assert matrices
    assert opt.attrs["replaced"]
    for target, source in opt.attrs["replaced"].items():
        assert all(torch.equal(matrix[target], matrix[source]) for matrix in matrices)


def test_pbt_with_parameters_that_are_thawed_later():
    pop = population()
    named = dict(pop.named_parameters())
    named["bias"].requires_grad_(False)
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.1), m.PBT({"lr.lr": (1e-3, 1.0)}, every=2, seed=1))
    steps(opt, 2)
    for target, source in opt.attrs["replaced"].items():
        assert torch.equal(named["bias"][target], named["bias"][source])
    named["bias"].requires_grad_(True)
    steps(opt, 4)
    assert bool(rows(pop).isfinite().all())


def test_pbt_names_have_to_fit_the_chain():
    with pytest.raises(mo.optim.ChainError, match=r"0 links.*'adam.beta1'"):
        mo.Optimizer(population(), m.LR(0.1), m.PBT({"adam.beta1": (0.1, 0.9)}))
    with pytest.raises(mo.optim.ChainError, match=r"2 links.*'lr.lr'"):
        mo.Optimizer(population(), m.LR(0.1), m.LR(0.1), m.PBT({"lr.lr": (0.1, 0.9)}))
    opt = mo.Optimizer(population(), m.LR(0.1), m.LR(0.1), m.PBT({"1.LR.lr": (0.1, 0.9)}, every=2))
    steps(opt, 4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pbt_replaces_a_member_whose_loss_is_no_number(value):
    pop = mo.Population.from_modules([torch.nn.Linear(2, 1, bias=False) for _ in range(6)])
    weight = dict(pop.named_parameters())["weight"]
    with torch.no_grad():
        weight[4] = value
    opt = mo.Optimizer(pop, m.LR(0.01), m.PBT({"lr.lr": (1e-3, 1.0)}, every=1, share=0.2, seed=0))
    opt.step(mo.closure(lambda net: net(torch.ones(1, 2)).square().sum()))
    assert list(opt.attrs["replaced"]) == [4]
    assert weight.isfinite().all()
